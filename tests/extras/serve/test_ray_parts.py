"""What the application for Ray Serve is made of, where no cluster is needed. `test_ray.py` has the rest."""

import asyncio
import itertools
import json
import os

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanovllm_extras.options.all_options import Config
from nanovllm_extras.requests.lazy_outputs import RequestMetrics
from nanovllm_extras.serve.commands import serve_command as launch
from nanovllm_extras.serve.metrics_route import Metrics
from nanovllm_extras.serve.ray.calls import Call, run
from nanovllm_extras.serve.ray.prefix import PIECE, prefix_of
from nanovllm_extras.serve.ray.ray_metrics import merge_texts
from nanovllm_extras.serve.ray_options import RayOptions
from nanovllm_extras.serve.server_options import ServerOptions

PREFILL = ["--ray", "--ray-num-prefill-replicas", "1", "--kv-transfer-config"]
PRIVATE = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}
SHARED = {"kv_connector": "SharedMemoryConnector", "kv_connector_extra_config": {"name": "a"}}
BAD = [
    (["--ray-num-replicas", "2"], "--ray-num-replicas needs --ray"),
    (["--ray", "--ray-num-replicas", "0"], "ray_num_replicas must be an integer >= 1 or None, got 0"),
    (["--ray", "--ray-num-replicas", "2", "--ray-max-replicas", "3"], "cannot be combined with ray_min_replicas"),
    (["--ray", "--ray-min-replicas", "1"], "ray_min_replicas needs ray_max_replicas"),
    (["--ray", "--ray-target-ongoing-requests", "1"], "ray_target_ongoing_requests needs ray_max_replicas"),
    (["--ray", "--ray-min-replicas", "3", "--ray-max-replicas", "2"], "at most ray_max_replicas (2), got 3"),
    (["--ray", "--ray-num-ingress-replicas", "0"], "ray_num_ingress_replicas must be an integer >= 1, got 0"),
    (
        ["--ray", "--ray-stream-batching-interval-ms", "-1"],
        "stream_batching_interval_ms must be an integer >= 0, got -1",
    ),
    (["--ray", "--ray-num-prefill-replicas", "0"], "ray_num_prefill_replicas must be an integer >= 1 or None, got 0"),
    (["--ray", "--ray-prefill-timeout-s", "9"], "ray_prefill_timeout_s needs ray_num_prefill_replicas"),
    (["--ray", "--ray-num-prefill-replicas", "1"], "needs kv_transfer_config with the kv_connector"),
    ([*PREFILL, json.dumps(PRIVATE)], "needs kv_transfer_config with the kv_connector"),
    (
        [*PREFILL, json.dumps(SHARED | {"kv_role": "kv_both"})],
        "kv_transfer_config cannot have 'kv_role' with ray_num_prefill_replicas",
    ),
    (["--ray", "--ray-routing", "luck"], "invalid choice: 'luck'"),
    (["--ray", "--ui"], "--ui cannot be used with --ray"),
    (["--ray", "--trace", "run.jsonl"], "--trace cannot be used with --ray"),
    (
        ["--ray", "--enable-lora", "--allow-runtime-lora-updating"],
        "--allow-runtime-lora-updating and VLLM_ALLOW_RUNTIME_LORA_UPDATING cannot be used with --ray",
    ),
    (["--ray", "--block-size", "0"], "block_size"),
]


def test_bad_options_are_refused_before_anything_starts(capsys, monkeypatch):
    monkeypatch.setattr(launch, "serve", lambda *_: pytest.fail("it has started"))
    for words, message in BAD:
        with pytest.raises(SystemExit) as ended:
            launch.main(words)
        assert ended.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split()), words


def test_scaling():
    assert RayOptions().scaling(8) == {"num_replicas": 1}
    assert RayOptions(num_replicas=3).scaling(8) == {"num_replicas": 3}
    config = {"min_replicas": 0, "max_replicas": 5, "target_ongoing_requests": 4}
    assert RayOptions(min_replicas=0, max_replicas=5).scaling(8) == {"autoscaling_config": config}
    assert RayOptions(max_replicas=5, target_ongoing_requests=7).scaling(8)["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 5,
        "target_ongoing_requests": 7,
    }


def test_each_replica_has_its_devices(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    on_cpu, anywhere, on_cuda = (Config("folder", device=device) for device in ("cpu", "auto", "cuda"))
    assert RayOptions(num_replicas=2).devices(on_cpu, 4) == {"num_gpus": 0, "num_cpus": 4}
    assert RayOptions(max_replicas=3).devices(anywhere, 0) == {"num_gpus": 0, "num_cpus": 2}
    assert RayOptions(num_replicas=9).devices(on_cpu, 0) == {"num_gpus": 0, "num_cpus": 1}
    assert RayOptions(num_replicas=2, num_prefill_replicas=2).devices(on_cpu, 0) == {"num_gpus": 0, "num_cpus": 2}
    assert RayOptions(num_replicas=2, num_cpus=3).devices(on_cpu, 0) == {"num_gpus": 0, "num_cpus": 3}
    assert RayOptions(num_replicas=2).devices(anywhere, 4) == {"num_gpus": 1, "num_cpus": 1}
    object.__setattr__(on_cuda, "tensor_parallel_size", 4)
    assert RayOptions(num_replicas=2).devices(on_cuda, 0) == {"num_gpus": 4, "num_cpus": 1}


# ---- keys of prompts


def key(**body):
    prefix = prefix_of(json.dumps(body).encode())
    return prefix and prefix.prompt


def chat(*contents, **others):
    roles = itertools.cycle(["user", "assistant"])
    return key(messages=[{"role": next(roles), "content": content} for content in contents], **others)


def test_a_key_has_a_character_for_each_piece_of_the_prompt():
    system, question, answer = "s" * 1000, "q" * 500, "a" * 500
    first, second = chat(system + question), chat(system + question, answer, "more")
    assert len(first) == len(json.dumps([[{"role": "user", "content": system + question}]], separators=",:")) // PIECE
    assert len(os.path.commonprefix([first, second])) >= len(first) - 1  # all but the piece in which the first ends
    other = chat(system + "x" * 500)
    assert 1000 // PIECE <= len(os.path.commonprefix([first, other])) <= 1100 // PIECE


def test_keys_of_other_requests():
    for field in ("prompt", "input"):
        assert key(**{field: "a" * 640}) == key(**{field: "a" * 640}, temperature=0, model="m")
        assert key(**{field: "a" * 640}) != key(**{field: "b" * 640})
        assert len(key(**{field: [1, 2, 3]})) == 1  # token ids too; a short prompt has one piece
        assert key(**{field: ""}) is None
    assert chat("a" * 100_000) == chat("a" * 200_000), "a long body is not parsed to its end"


def test_tools_come_before_the_conversation_as_in_a_template():
    tools = [{"type": "function", "function": {"name": "f" * 300}}]
    one, other = chat("a" * 300, tools=tools), chat("b" * 300, tools=tools)
    assert len(os.path.commonprefix([one, other])) >= 300 // PIECE
    assert os.path.commonprefix([one, chat("a" * 300)]) == ""


def test_keys_of_messages_begin_with_the_system_prompt_without_its_billing_header():
    def message(cch, question):
        texts = [f"x-anthropic-billing-header: cch={cch};", "s" * 1000]
        system = [{"type": "text", "text": text} for text in texts]
        return chat(question, system=system, max_tokens=1)

    first = message("00001", "q" * 500)
    assert message("99999", "q" * 500) == first
    assert 1000 // PIECE <= len(os.path.commonprefix([message("00001", "x" * 500), first])) <= 1100 // PIECE
    assert chat("q", system="s" * 1000) != chat("q", system="t" * 1000)


def test_a_body_without_a_prompt_has_no_key():
    bad = [b"", b"[1]", b"\xff{", b'{"model": "m"}', b"nonsense", b'{"messages": []}', b'{"prompt": "\\ud800"}']
    assert list(map(prefix_of, bad)) == [None] * len(bad)


# ---- the ingress


@pytest.mark.slow
def test_a_websocket_is_refused_as_without_ray():
    """The application sends `websocket.close` before it accepts, which servers answer with 403."""
    ingress_module = pytest.importorskip("nanovllm_extras.serve.ray.ingress")
    ingress = object.__new__(ingress_module.Ingress)
    ingress._options = ServerOptions(("m",))
    ingress._server = ingress_module.IngressServer(ingress._options, Metrics("m"))
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": "/llm/v1/realtime", "root_path": "/llm", "headers": []}
    asyncio.run(ingress.__serve_build_asgi_app__()(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1000, "reason": ""}]


# ---- an application behind a call

CALL = Call("POST", "/path", b"a=b", [(b"host", b"x")], ("1.2.3.4", 5), b"body")


def parts_of(app, interval_s):
    async def gather():
        return [part async for part in run(app, CALL, lambda: interval_s)]

    return asyncio.run(asyncio.wait_for(gather(), 60))


def start(status=200):
    return {"type": "http.response.start", "status": status, "headers": [(b"a", b"b")]}


def body(data, more=True):
    return {"type": "http.response.body", "body": data, "more_body": more}


def test_the_application_gets_the_request_and_its_answer_is_one_part():
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope, body=(await receive())["body"])
        await send(start(201))
        await send(body(b"one "))
        await send(body(b"two", more=False))

    assert parts_of(app, 10.0) == [(201, [(b"a", b"b")], b"one two", True)]
    assert (seen["method"], seen["path"], seen["query_string"]) == ("POST", "/path", b"a=b")
    assert (seen["client"], seen["headers"], seen["body"]) == (("1.2.3.4", 5), [(b"host", b"x")], b"body")


def test_the_first_part_leaves_at_once_and_the_others_merge():
    """Until a minute is over, or the answer. No byte is lost."""

    async def app(scope, receive, send):
        await send(start())
        for i in range(10):
            await send(body(b"%d" % i))
            await asyncio.sleep(0.005)
        await send(body(b"end", more=False))

    merged = parts_of(app, 60.0)
    assert [(part.body, part.is_last) for part in merged] == [(b"0", False), (b"123456789end", True)]
    assert len(parts_of(app, 0.0)) == 11


def test_a_part_leaves_when_its_time_has_come():
    """Though the application says nothing more."""

    async def talk():
        has_left, parts = asyncio.Event(), []

        async def app(scope, receive, send):
            await send(start())
            await send(body(b"0"))
            await asyncio.sleep(0)
            await send(body(b"1"))
            await send(body(b"2"))
            await has_left.wait()
            await send(body(b"end", more=False))

        async for part in run(app, CALL, lambda: 0.02):
            parts.append(part.body)
            if part.body.endswith(b"2"):
                has_left.set()
        return parts

    parts = asyncio.run(asyncio.wait_for(talk(), 60))
    assert (b"".join(parts), parts[-1]) == (b"012end", b"end")


def test_an_error_of_the_application_is_raised():
    async def app(scope, receive, send):
        await send(start())
        raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        parts_of(app, 0.0)


def test_the_application_is_told_when_the_generator_is_closed():
    ended = []

    async def app(scope, receive, send):
        try:
            await send(start())
            await asyncio.sleep(30)
        finally:
            await receive()  # the body
            ended.append((await receive())["type"])

    async def leave():
        parts = run(app, CALL, lambda: 0.0)
        await anext(parts)
        await asyncio.wait_for(parts.aclose(), 5)

    asyncio.run(leave())
    assert ended == ["http.disconnect"]


# ---- metrics


def samples_of(text):
    families = text_string_to_metric_families(text.decode())
    return {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}


def test_metrics_of_replicas_have_their_names():
    """All that two servers say, once each, with two more labels."""
    texts = []
    for replica, num_tokens in (("r1", 3), ("r2", 5)):
        metrics = Metrics("model")
        metrics.note_end(RequestMetrics(1.0, 2.0, 3.0, 7), 1.0, num_tokens, [7], "stop")
        texts.append(({"deployment": "Engine", "replica": replica}, metrics.as_text()))
    merged = merge_texts(texts)
    expected = {}
    for added, text in texts:
        for (name, *labels), value in samples_of(text).items():
            expected[(name, *sorted([*labels, *added.items()]))] = value
    assert samples_of(merged) == expected
    assert [line for line in merged.splitlines() if line.startswith(b"#")] == [
        line for line in texts[0][1].splitlines() if line.startswith(b"#")
    ]
    assert merge_texts([]) == b""
