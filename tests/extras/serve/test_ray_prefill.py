"""Prefill apart from decode by Ray Serve: tokens are those of `transformers`, whatever fails.

One cluster for all, with a prefill replica and two decode replicas; the last tests end replicas. Failures that depend
on the moment come from fake handles.
"""

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import transformers

from nanovllm_extras.serve.ray.calls import Part
from nanovllm_extras.serve.server_options import ServerOptions
from tests.conftest import hf_greedy
from tests.extras.serve.conftest import CHAT_TEMPLATE
from tests.extras.serve.ray_server import (
    WITH_RAY,
    environment_with_token,
    metric_of,
    ray_command,
    replicas_below,
    server_of,
)
from tests.extras.serve.test_front import CHAT, COMPLETION, WITH_USAGE, tokens_of, unique, values_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    WITH_RAY,
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),  # Ray's own
]

PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


# ---- the calls of replicas, with handles of this file


class Parts:
    """An answer: its items are parts, exceptions, or a future to wait for."""

    def __init__(self, items):
        self.items, self.is_cancelled = list(items), False

    def __aiter__(self):
        return self

    async def __anext__(self):
        item = self.items.pop(0)
        if isinstance(item, BaseException):
            raise item
        return await item if isinstance(item, asyncio.Future) else item

    def cancel(self):
        self.is_cancelled = True


class Handle:
    """Of a deployment that has these answers, one for each call. num_healthy: its replicas that are."""

    def __init__(self, *answers, num_healthy=1):
        self.answers, self.num_healthy = [Parts(items) for items in answers], num_healthy
        self.calls = []

    def options(self, **_):
        return self

    def remote(self, *_, call):
        self.calls.append(call)
        return self.answers[len(self.calls) - 1]

    def broadcast(self, method):
        return self

    async def results_async(self, **_):
        from ray.serve.exceptions import DeploymentUnavailableError

        if not self.num_healthy:
            raise DeploymentUnavailableError("Prefill")
        return [None] * self.num_healthy


def died():
    from ray.exceptions import ActorDiedError

    return ActorDiedError()


def part(status, body=b"", is_last=True):
    return Part(status, [(b"content-type", b"application/json")] if status else [], body, is_last)


def dispatch(prefill, decode, body=COMPLETION, timeout_s=60):
    """The status and the bytes of the answer of an ingress to these two deployments."""
    from nanovllm_extras.serve.ray.ingress import Ingress

    sent, messages = [], [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    async def run():
        ingress = Ingress(decode, ServerOptions(("m",)), "info", prefill, timeout_s)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        await ingress._forward(scope | {"state": {}}, receive, send)

    asyncio.run(asyncio.wait_for(run(), 50))
    assert [message["type"] for message in sent][:1] == ["http.response.start"]
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def test_the_prefill_replica_gets_the_prompt_first():
    prefill, decode = Handle([part(200, b"{}")]), Handle([part(200, b"answer")])
    assert dispatch(prefill, decode) == (200, b"answer")
    [first], [then] = prefill.calls, decode.calls
    assert json.loads(first.body) == {
        "prompt": COMPLETION["prompt"],
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 1,
        "n": 1,
        "stream": False,
    }
    assert json.loads(then.body) == COMPLETION


def test_a_prefill_replica_that_fails_does_not_matter():
    from ray.serve.exceptions import BackPressureError

    for failure in (died(), part(500), part(429), BackPressureError(1, 1)):
        assert dispatch(Handle([failure]), Handle([part(200, b"answer")])) == (200, b"answer")


@pytest.mark.parametrize(("num_healthy", "timeout_s"), [(0, 60), (1, 0.05)], ids=["none is healthy", "too slow"])
def test_a_prefill_that_does_not_come_is_cancelled(num_healthy, timeout_s):
    """Serve lets a call wait until a replica runs: without the health check, this would take 60 s."""

    class Waiting(Parts):
        async def __anext__(self):
            await asyncio.Event().wait()

    prefill = Handle([], num_healthy=num_healthy)
    prefill.answers = [Waiting([])]
    assert dispatch(prefill, Handle([part(200, b"answer")]), timeout_s=timeout_s) == (200, b"answer")
    assert prefill.answers[0].is_cancelled


def test_a_decode_replica_that_dies_before_the_first_byte_or_is_not_ready_is_replaced():
    for failed in ([died()], [part(200, is_last=False), died()], [part(503, b"{}")]):
        decode = Handle(failed, [part(200, b"one ", is_last=False), part(0, b"two")])
        assert dispatch(Handle([part(200)]), decode) == (200, b"one two")
        assert all(answer.is_cancelled for answer in decode.answers)


def test_a_request_whose_replicas_die_gets_503():
    decode = Handle([died()], [died()], [part(200)])
    status, answer = dispatch(Handle([part(200)]), decode)
    assert (status, json.loads(answer)["error"]["code"]) == (503, "unavailable")
    assert len(decode.calls) == 2


def test_a_stream_whose_replica_dies_ends_with_an_error_event():
    begin = Part(200, [(b"content-type", b"text/event-stream")], b"data: {}\n\n", False)
    status, answer = dispatch(Handle([part(200)]), Handle([begin, died()]))
    first, error, *end = answer.decode().split("\n\n")
    assert (status, first, end) == (200, "data: {}", ["data: [DONE]", ""])
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_died"


def test_the_application_has_a_deployment_for_each_role():
    from nanovllm_extras.serve.ray import build_app

    transfer = {"kv_connector": "SharedMemoryConnector", "kv_connector_extra_config": {"name": "a"}}
    arguments = {"device": "cpu", "ray_num_prefill_replicas": 3, "ray_num_replicas": 2, "kv_transfer_config": transfer}
    ingress = build_app(arguments)._bound_deployment
    decode, prefill = (ingress.init_args[i]._bound_deployment for i in (0, 3))
    assert ingress.init_args[4] == 60
    for deployment, name, number, role in (
        (prefill, "Prefill", 3, "kv_producer"),
        (decode, "Decode", 2, "kv_consumer"),
    ):
        assert (deployment.name, deployment.num_replicas) == (name, number)
        assert deployment.init_args[0]["kv_transfer_config"] == {**transfer, "kv_role": role}


# ---- a cluster


@pytest.fixture(scope="module")
def server(with_tokenizer):
    where = {"name": f"test-{os.getpid()}", "max_bytes": 1 << 26}
    transfer = {"kv_connector": "SharedMemoryConnector", "kv_connector_extra_config": where}
    replicas = ["--ray-num-prefill-replicas", "1", "--ray-num-replicas", "2", "--ray-health-check-period-s", "1"]
    engine = ["--device", "cpu", "--dtype", "float32", "--num-kv-blocks", "4096", "--block-size", "4"]
    engine += ["--chat-template", CHAT_TEMPLATE, "--kv-transfer-config", json.dumps(transfer)]
    options = [with_tokenizer, *replicas, *engine, "--max-num-seqs", "16"]
    with ray_command(environment_with_token(), *options) as (process, said):
        assert "1 for prefill, 2 for decode" in said
        yield server_of(process, said)


@pytest.fixture(scope="module")
def truth(tiny_checkpoint, with_tokenizer):
    """The token ids of the greedy answer to a request, by `transformers`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(with_tokenizer)

    def answer(body):
        text = body["prompt"] if "prompt" in body else f"user:{body['messages'][0]['content']}|assistant:"
        return hf_greedy(tiny_checkpoint[1], tokenizer.encode(text), body["max_tokens"])

    return answer


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def num_cached(response):
    return values_of(response)[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(("path", "is_stream"), [("/v1/completions", True), ("/v1/chat/completions", False)])
def test_answers_are_those_of_transformers_and_the_prompt_comes_from_the_store(server, client, truth, path, is_stream):
    body = unique(PATHS[path], f"{is_stream} {path}") | (WITH_USAGE if is_stream else {})
    before = {name: sum(loaded(server, name)) for name in ("Prefill", "Decode")}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert tokens_of(response)[1] == truth(body)
    assert response.text.endswith("data: [DONE]\n\n") == is_stream
    expected = (values_of(response)[-1]["usage"]["prompt_tokens"] - 1) // 4 * 4
    assert num_cached(response) == expected
    assert expected - 8 <= sum(loaded(server, "Decode")) - before["Decode"] <= expected  # the pool may have "user:"
    assert sum(loaded(server, "Prefill")) == before["Prefill"] == 0


def loaded(server, deployment):
    """The numbers of tokens that the replicas of a deployment have loaded from the store."""
    return metric_of(server, "external_prefix_cache_hits_total", deployment=deployment)


def test_a_decode_replica_that_is_killed_leaves_its_requests_to_the_other(server, client):
    """Answers that are not streams have no byte before their end. The truth is the same requests before."""
    bodies = [unique(COMPLETION, f"{i} killed") | {"max_tokens": 400} for i in range(16)]

    def ask(body):
        return client.post("/v1/completions", json=body)

    with ThreadPoolExecutor(16) as threads:
        expected = list(threads.map(ask, bodies))
        asking = [threads.submit(ask, body) for body in bodies]
        deadline = time.monotonic() + 60
        while min(metric_of(server, "num_requests_running", deployment="Decode")) < 2:
            assert time.monotonic() < deadline
        os.kill(replicas_below(server.process.pid, "Decode")[0], signal.SIGKILL)
        responses = [one.result() for one in asking]
    assert [response.status_code for response in responses] == [200] * 16
    assert list(map(tokens_of, responses)) == list(map(tokens_of, expected))
