"""`nanovllm serve --ray` with two replicas; the truth is the server without Ray.

One cluster for all, in the order of this file: prefixes are counted first, and the last tests end replicas.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from nanovllm import TINY_QWEN3
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.server_options import ServerOptions
from tests.extras.serve.conftest import Client
from tests.extras.serve.ray_server import (
    WITH_RAY,
    environment_with_token,
    processes_below,
    ray_command,
    replicas_below,
    server_of,
)
from tests.extras.serve.real_server import QUESTIONS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    WITH_RAY,
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),  # Ray's own
]

CHAT = "/v1/chat/completions"
KEY = {"Authorization": "Bearer key-1"}
ENGINE = ["--device", "cpu", "--num-kv-blocks", "2048", "--max-num-seqs", "16"]
LONG = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}
END = "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def environment():
    return environment_with_token()


@pytest.fixture(scope="module")
def command(environment):
    options = ["--ray-num-replicas", "2", "--ray-health-check-period-s", "1", "--api-key", "key-1", "key-2"]
    with ray_command(environment, *options, *ENGINE) as started:
        yield started


@pytest.fixture(scope="module")
def server(command):
    return server_of(*command)


@pytest.fixture(scope="module")
def address(command):
    return re.search(r"^cluster +(\S+)$", command[1], re.MULTILINE)[1]


@pytest.fixture(scope="module")
def alone():
    """The same server without Ray, without a socket."""
    with AsyncLLM(TINY_QWEN3, device="cpu", num_kv_blocks=2048, max_num_seqs=16) as llm:
        yield Client(make_app(ServerOptions(model_names=("tiny-qwen3",), api_keys=("key-1", "key-2")), llm), KEY)


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, headers=KEY, timeout=120) as client:
        yield client


def chat(question, **others):
    return {"messages": [{"role": "user", "content": question}], **others}


def without_names(value):
    """An answer without what differs between two answers: names, times, what was cached."""
    if isinstance(value, list):
        return [without_names(one) for one in value]
    if isinstance(value, dict):
        names = (
            "id",
            "item_id",
            "request_id",
            "created",
            "created_at",
            "completed_at",
            "cached_tokens",
            "cache_write_tokens",
            "replica",
            "root",
        )
        if "cache_read_input_tokens" in value:  # of a message, whose `input_tokens` are without them
            value = {**value, "input_tokens": value["input_tokens"] + value["cache_read_input_tokens"]}
            value.pop("cache_read_input_tokens")
        return {name: without_names(one) for name, one in value.items() if name not in names}
    return value


BAD_ARGUMENTS = [
    ({"port": 1}, "port is an option of Serve here"),
    ({"num_blocks": 1}, "unrecognized arguments: --num-blocks=1"),
    ({"block_size": "many"}, "invalid int value: 'many'"),
    ({"ray_num_replicas": 2, "ray_max_replicas": 2}, "ray_num_replicas cannot be combined with"),
    ({"max_num_seqs": 0}, "max_num_seqs"),
]


def test_bad_arguments_of_the_application():
    from nanovllm_extras.serve.ray import build_app

    for arguments, message in BAD_ARGUMENTS:
        with pytest.raises(ValueError, match=re.escape(message)):
            build_app(arguments)


def test_arguments_of_the_application():
    """From a command line all are text; from a config file they have types."""
    from nanovllm_extras.serve.ray import build_app

    texts = {
        "model": str(TINY_QWEN3),
        "ray-max-replicas": "3",
        "device": "cpu",
        "max_num_seqs": "7",
        "enforce_eager": "true",
    }
    typed = {"ray_max_replicas": 3, "device": "cpu", "max_num_seqs": 7, "enforce_eager": True, "api_key": ["a", "b"]}
    for arguments, keys in ((texts, ()), (typed, ("a", "b"))):
        ingress = build_app(arguments)._bound_deployment
        engine = ingress.init_args[0]._bound_deployment
        options, server_options = engine.init_args[:2]
        assert (options["max_num_seqs"], options["enforce_eager"], server_options.api_keys) == (7, True, keys)
        assert engine.max_ongoing_requests == 7
        assert engine._deployment_config.autoscaling_config.max_replicas == 3


def test_when_the_tree_cannot_say_load_decides(monkeypatch):
    """Ray's own router raises, and its request waits for ever."""
    from ray.exceptions import RayError

    from nanovllm_extras.serve.ray import router

    errors = [KeyError("replica"), RayError("the tree's actor has died")]

    async def fail(*_):
        raise errors.pop()

    async def by_load(self, candidates, pending):
        return [candidates]

    monkeypatch.setattr(router.PrefixCacheAffinityRouter, "choose_replicas", fail)
    monkeypatch.setattr(router.PrefixRouter, "_by_load", by_load)
    for _ in range(2):
        assert asyncio.run(make_router().choose_replicas(["a", "b"], None)) == [["a", "b"]]


def make_router():
    """A router that no cluster knows."""
    from nanovllm_extras.serve.ray import router

    made = router.PrefixRouter.__new__(router.PrefixRouter)
    made._one_at_a_time = asyncio.Lock()
    return made


def test_a_request_is_sent_before_the_next_is_routed(monkeypatch):
    """As in Serve's router, a few tasks choose, and each request counts when its own task sends it."""
    from nanovllm_extras.serve.ray import router

    queues = {"a": 0, "b": 0}

    async def shortest(self, candidates, pending):
        return min(candidates, key=queues.get)

    async def route(one, requests):
        for request in requests:
            request.set_result(await one.choose_replicas(["a", "b"]))

    async def send(request):
        queues[await request] += 1

    async def burst():
        one, requests = make_router(), [asyncio.Future() for _ in range(12)]
        shared = iter(requests)
        await asyncio.gather(*(route(one, shared) for _ in range(4)), *map(send, requests))

    monkeypatch.setattr(router.PrefixCacheAffinityRouter, "choose_replicas", shortest)
    asyncio.run(burst())
    assert queues == {"a": 6, "b": 6}


class Handle:
    """Of a deployment whose router is `starting` for a time, and whose one replica answers "well"."""

    def __init__(self, starting):
        self.starting = starting
        self.num_questions = 0

    def options(self, **_):
        return self

    def broadcast(self, method):
        self.num_questions += 1
        return self

    async def results_async(self, **_):
        await self.starting.wait()
        return ["well"]


def test_the_ingress_gets_no_request_before_its_router_has_started():
    from nanovllm_extras.serve.ray.ingress import Ingress

    async def start():
        handle = Handle(asyncio.Event())
        ingress = Ingress(handle, ServerOptions(model_names=("m",)), "info")
        checking = asyncio.ensure_future(ingress.check_health())
        await asyncio.sleep(0.01)
        assert not checking.done()
        handle.starting.set()
        await checking
        await ingress.check_health()
        assert handle.num_questions == 1

    asyncio.run(start())


def test_requests_with_a_common_prefix_go_to_one_replica(server, client):
    """Eight conversations that grow, in turns: each finds all of its full blocks, which one of two replicas has."""
    by_replica = {name: tokens_of(server, name) for name in replicas_of(server)}
    for turn in range(4):
        for i in range(8):
            prompt = [10 * i + j % 10 + 3 for j in range(200 + 40 * turn)]
            usage = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).json()["usage"]
            expected = (len(prompt) - 40) // 16 * 16 if turn else 0
            assert usage["prompt_tokens_details"]["cached_tokens"] == expected, (i, turn)
    shares = [tokens_of(server, name) - before for name, before in by_replica.items()]
    assert min(shares) > 0, "all prefixes went to one replica"


REQUESTS = [
    ("POST", "/v1/chat/completions", chat(QUESTIONS[0], temperature=0, logprobs=True, top_logprobs=3, max_tokens=20)),
    ("POST", "/v1/chat/completions", chat(QUESTIONS[1], temperature=1, seed=7, n=3, max_tokens=20)),
    ("POST", "/v1/completions", {"prompt": ["Paged", [1, 2, 3]], "temperature": 0, "max_tokens": 9, "echo": True}),
    ("POST", "/v1/responses", {"input": QUESTIONS[2], "temperature": 0, "max_output_tokens": 20}),
    ("POST", "/v1/messages", chat(QUESTIONS[2], temperature=0, max_tokens=20)),
    ("POST", "/v1/messages/count_tokens", chat(QUESTIONS[2])),
    ("POST", "/v1/messages", chat("Hi", max_tokens=1, tools=[{"type": "bash_20250124", "name": "bash"}])),
    ("POST", "/v1/embeddings", {"input": ["one text", "another"]}),
    ("POST", "/v2/rerank", {"query": "What?", "documents": ["one text", "another"]}),
    ("POST", "/tokenize", {"prompt": "Paged attention"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/unknown", None),
    ("GET", "/nothing", None),
    ("GET", "/version", None),
    ("POST", "/v1/chat/completions", chat("Hi", temperature=-1)),
    ("POST", "/v1/chat/completions", {"messages": "no list"}),
    ("POST", "/v1/completions", {"prompt": "x " * 5000}),
    ("POST", "/v1/chat/completions", chat("Hi", model="another")),
]


def events_of(text):
    assert text.endswith(END), text[-200:]
    return [json.loads(event.removeprefix("data: ")) for event in text.removesuffix(END).split("\n\n")[:-1]]


def text_of(events):
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def test_answers_are_those_of_the_server_without_ray(client, alone):
    for method, path, body in REQUESTS:
        got, expected = client.request(method, path, json=body), alone.request(method, path, json=body)
        assert got.status_code == expected.status_code, (path, got.text)
        assert got.headers["content-type"] == expected.headers["content-type"]
        assert without_names(got.json()) == without_names(expected.json()), path
    assert client.post("/v1/completions", content=b"{").json() == alone.post("/v1/completions", content=b"{").json()
    body = chat(QUESTIONS[0], temperature=0, stream=True, stream_options={"include_usage": True})
    got, expected = events_of(client.post("/v1/chat/completions", json=body).text), alone.events(CHAT, **body)
    assert text_of(got) == text_of(expected) != ""
    assert without_names(got[-1]) == without_names(expected[-1])  # usage
    assert httpx.post(client.base_url.join(CHAT), json=chat("Hi")).json()["error"]["code"] == "invalid_api_key"
    check_messages(client)
    large = client.post("/v1/completions", content=b"x" * (17 * 2**20))
    assert (large.status_code, large.json()["error"]["type"]) == (413, "invalid_request_error")


def test_a_response_is_asked_of_the_replica_that_stores_it(client):
    """Conversations whose first turns are distributed. Oracle: the whole conversation."""
    path, body = "/v1/responses", {"max_output_tokens": 5, "temperature": 0}
    replicas = set()
    for i in range(8):
        items, previous, own = [], {}, set()
        for turn in range(4):
            message = {"type": "message", "role": "user", "content": f"{'abcdefgh'[i] * 200} {turn}?"}
            items.append(message)
            one = client.post(path, json=body | {"input": [message]} | previous).json()
            whole = client.post(path, json=body | {"input": items, "store": False}).json()
            assert one["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
            assert client.get(f"{path}/{one['id']}").json() == one
            items += one["output"]
            previous = {"previous_response_id": one["id"]}
            own.add(one["id"].split("_")[1])
        assert len(own) == 1
        replicas |= own
        assert client.get(f"{path}/{one['id']}", headers={"Authorization": "Bearer key-2"}).status_code == 404
        page = client.get(f"{path}/{one['id']}/input_items", params={"limit": 1, "order": "asc"}).json()
        assert page["data"][0]["content"][0]["text"].endswith("0?")
        assert client.request("DELETE", f"{path}/{one['id']}").json()["deleted"]
        assert client.get(f"{path}/{one['id']}").status_code == 404
    assert len(replicas) == 2
    gone = client.post(path, json=body | {"input": "a", "previous_response_id": f"resp_gone_{'0' * 32}"})
    assert gone.json()["error"]["code"] == "previous_response_not_found"


def check_messages(client):
    """Streams end as they should, and errors of a replica and of the ingress have the form and the name they need."""
    path, body = "/v1/messages", chat(QUESTIONS[0], temperature=0, max_tokens=20)
    stream = client.post(path, json=body | {"stream": True}).text
    pieces = re.findall(r'"text_delta","text":("(?:[^"\\\\]|\\\\.)*")', stream)
    assert stream.startswith("event: message_start\n")
    assert stream.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert "".join(map(json.loads, pieces)) == client.post(path, json=body).json()["content"][0]["text"]
    refused, stranger = client.post(path, json={}), httpx.post(client.base_url.join(path), json=body)
    for response, kind in ((refused, "invalid_request_error"), (stranger, "authentication_error")):
        error = response.json()
        assert (error["type"], error["error"]["type"]) == ("error", kind)
        assert error["request_id"] == response.headers["x-request-id"]
    assert refused.headers["request-id"] == refused.headers["x-request-id"]
    assert httpx.post(client.base_url.join(path), json=body, headers={"x-api-key": "key-2"}).status_code == 200


def test_a_client_that_leaves_frees_its_sequence(server):
    aborted = ended_by(server, "abort")
    body = json.dumps(chat("Tell me.", stream=True, **LONG)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key-1\r\nContent-Length: {len(body)}"
    )
    with server.connect() as connection:
        connection.sendall(head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + body)
        while not server.metric("num_requests_running"):
            time.sleep(0.02)
        assert [load_of(server) for _ in range(8)] == [1] * 8, "that of all replicas"
    server.wait_until_idle()
    assert load_of(server) == 0
    assert ended_by(server, "abort") == aborted + 1


def load_of(server):
    return httpx.get(server.url + "/load", timeout=60).json()["server_load"]


def test_a_response_in_the_background_is_polled_at_its_replica(client):
    body = {"input": QUESTIONS[0], "temperature": 0, "max_output_tokens": 20}
    expected = client.post("/v1/responses", json=body).json()["output"][0]["content"]
    for is_stream in (False, True):
        with client.stream("POST", "/v1/responses", json=body | {"background": True, "stream": is_stream}) as begun:
            text = next(begun.iter_text())
        path = "/v1/responses/" + re.search(r'"id":"(resp_\w+)"', text)[1]
        while (response := client.get(path).json())["status"] in ("queued", "in_progress"):
            time.sleep(0.02)
        assert response["output"][0]["content"] == expected
        events = client.get(path, params={"stream": True, "starting_after": 1})
        assert (events.status_code, '"sequence_number":2}' in events.text) == (
            (200, True) if is_stream else (400, False)
        )


def ended_by(server, reason):
    text = httpx.get(server.url + "/metrics").text
    found = re.findall(rf'^nanovllm:request_success_total{{.*finished_reason="{reason}".*}} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found))


def replicas_of(server):
    return set(re.findall(r'replica="(\w+)"', httpx.get(server.url + "/metrics", timeout=60).text))


def tokens_of(server, replica):
    text = httpx.get(server.url + "/metrics").text
    (found,) = re.findall(rf'^nanovllm:prompt_tokens_total{{.*replica="{replica}"}} (\S+)$', text, re.MULTILINE)
    return float(found)


def test_a_cluster_that_serves_it_already_is_refused(environment, address, server):
    command = [sys.executable, "-m", "nanovllm_extras", "serve", "--ray", "--ray-address", address]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 1
    assert "this cluster already serves an application 'nanovllm'" in done.stderr
    assert replicas_of(server)


BREAK = """
import ray, sys
def break_engine(actor):
    def stop():
        raise SystemExit("broken by a test")
    actor._replica_impl._user_callable_wrapper._callable._llm.thread.post(stop)
ray.init(sys.argv[1], log_to_driver=False)
replica = ray.get_actor(f"SERVE_REPLICA::nanovllm#Engine#{sys.argv[2]}", namespace="serve")
ray.get(replica.__ray_call__.remote(break_engine))
"""


def test_a_replica_whose_engine_is_dead_is_replaced(environment, address, server, client):
    """Nobody asks it meanwhile: its health checks tell."""
    before = replicas_of(server)
    broken = min(before)
    broken_by = [sys.executable, "-c", BREAK, address, broken]  # a process has one cluster
    subprocess.run(broken_by, check=True, env=environment, timeout=300)
    deadline = time.monotonic() + 300
    while broken in (now := replicas_of(server)) or len(now) < 2:
        assert time.monotonic() < deadline, now
        time.sleep(0.2)
    assert len(now - before) == 1
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_replica_that_is_killed_costs_its_own_requests_an_error(server, client):
    """Eight streams and four whole answers on two replicas. The other requests get their answers unchanged."""
    bodies = [{"prompt": f"Question {i}: why?", "stream": i < 8, **LONG, "max_tokens": 800} for i in range(12)]
    with ThreadPoolExecutor(12) as threads:
        expected = list(threads.map(lambda body: client.post("/v1/completions", json=body), bodies))
    assert {one.status_code for one in expected} == {200}
    engines = replicas_below(server.process.pid, "Engine")
    assert len(engines) == 2
    with ThreadPoolExecutor(12) as threads:
        asking = [threads.submit(client.post, "/v1/completions", json=body) for body in bodies]
        deadline = time.monotonic() + 60
        while sum(running := running_by_replica(server)) < 12:
            assert time.monotonic() < deadline
        assert min(running) >= 2, running
        os.kill(engines[0], signal.SIGKILL)
        started = time.monotonic()
        answers = [one.result() for one in asking]
    codes = [outcome(answer, right) for answer, right in zip(answers, expected, strict=True)]
    assert set(codes) == {"replica_died", "right"}, codes
    assert time.monotonic() - started < 120
    assert client.post("/v1/completions", json=bodies[-1] | {"max_tokens": 3}).status_code == 200


def running_by_replica(server):
    text = httpx.get(server.url + "/metrics", timeout=60).text
    return [float(one) for one in re.findall(r"^nanovllm:num_requests_running{.*} (\S+)$", text, re.MULTILINE)]


def outcome(answer, right):
    """`right`, or the code of the error: as a status, or as the event that a stream ends with."""
    if answer.status_code != 200:
        assert answer.status_code == 503
        return answer.json()["error"]["code"]
    if not answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.json()["choices"] == right.json()["choices"]
        return "right"
    events, expected = events_of(answer.text), events_of(right.text)
    text, whole = (
        "".join(one["choices"][0]["text"] for one in each if "choices" in one) for each in (events, expected)
    )
    assert whole.startswith(text)
    if "error" not in events[-1]:
        assert text == whole
        return "right"
    assert events[-1]["error"]["type"] == "service_unavailable"
    return events[-1]["error"]["code"]


# ---- the end


def test_an_interrupt_ends_what_the_command_has_started(command, server, client):
    """As a terminal sends it: to all processes of the group. An answer in progress ends first."""
    process, _ = command
    below = processes_below(process.pid)
    assert {"raylet", "gcs_server"} <= set(below.values()), below
    body = {"prompt": "a", **LONG}
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(client.post, "/v1/completions", json=body)
        while not server.metric("num_requests_running"):
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        answer = asking.result()
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, LONG["max_tokens"])
    assert process.wait(120) == 0
    deadline = time.monotonic() + 60
    while left := {pid: name for pid, name in below.items() if Path(f"/proc/{pid}").exists()}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
