"""A front before a prefill engine and decode engines: tokens are those of one engine, whatever fails.

The engines are behind real sockets, the front is called without one. Failures come from `Flaky` servers, which
break a connection at a chosen byte.
"""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from nanovllm_extras import LoRARequest, SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.commands.front_command import main
from nanovllm_extras.serve.disaggregation import prefill_body
from nanovllm_extras.serve.front import FrontOptions, make_front
from tests.conftest import hf_greedy
from tests.extras.lora.peft_adapters import make_adapter
from tests.extras.serve.conftest import CHAT_TEMPLATE
from tests.extras.serve.real_server import QUESTIONS, in_thread, started

SMALL = {"num_kv_blocks": 256, "block_size": 4, "dtype": "float32"}
NOBODY = "http://127.0.0.1:9"  # the port "discard": refuses connections
PROMPT = "What is a block table, and what is it for?"
COMPLETION = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
CHAT = {
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
CLIENT = httpx.Client()
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def transfer(folder, role):
    where = {"shared_storage_path": str(folder), "max_bytes": 1 << 28}
    return {"kv_connector": "SharedStorageConnector", "kv_role": role, "kv_connector_extra_config": where}


@pytest.fixture(scope="module")
def engines(with_tokenizer, tmp_path_factory):
    """Servers of a prefill engine and of a decode engine, which share a folder of blocks."""
    folder = tmp_path_factory.mktemp("blocks")
    configs = [{"kv_transfer_config": transfer(folder, role)} for role in ("kv_producer", "kv_consumer")]
    with contextlib.ExitStack() as stack:
        servers = []
        for config in configs:
            llm = stack.enter_context(AsyncLLM(with_tokenizer, **SMALL, **config))
            llm.engine.tokenizer.chat_template = CHAT_TEMPLATE
            servers.append(stack.enter_context(in_thread(llm)))
        yield servers
        for server in servers:
            server.wait_until_idle()


@pytest.fixture
def truth(tiny_checkpoint, engines):
    """The token ids of the greedy answer to a request, by `transformers`."""

    def answer(body):
        text = body["prompt"] if "prompt" in body else f"user:{body['messages'][0]['content']}|assistant:"
        prompt_token_ids = engines[0].llm.engine.tokenizer.encode(text)
        return hf_greedy(tiny_checkpoint[1], prompt_token_ids, body["max_tokens"])

    return answer


class Flaky:
    """A server that answers each request with `answer`, and then closes the connection. It counts the requests."""

    def __init__(self, answer):
        self.answer, self.requests = answer, []
        self._loop, self._is_ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])

    async def _serve(self):
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._is_ready.set()
        await self._end.wait()
        server.close()

    async def _answer(self, reader, writer):
        self.requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.answer)
        await writer.drain()
        writer.close()

    def __enter__(self):
        self._thread.start()
        assert self._is_ready.wait(60)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)
        self._loop.close()


def ask(options, *requests):
    """The responses of a front to (method, path, body), one after the other."""

    async def send():
        app = make_front(options)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://front", timeout=30) as client,
        ):
            return [await client.request(method, path, json=body) for method, path, body in requests]

    return asyncio.run(send())


def direct(server, path, body):
    """The response of an engine itself."""
    return CLIENT.post(server.url + path, json=body, timeout=30)


def values_of(response):
    """The JSON values of an answer or of its events."""
    return [
        json.loads(one.removeprefix("data: ")) for one in response.text.split("\n\n") if one and "[DONE]" not in one
    ]


def tokens_of(response):
    """The text and the token ids of an answer or of a stream. How many tokens an event has depends on the time."""
    text, token_ids = "", []
    for choice in [choice for value in values_of(response) for choice in value.get("choices", ())]:
        message = choice.get("message") or choice.get("delta") or choice
        text += message.get("content") or message.get("text") or ""
        token_ids += choice.get("token_ids") or []
    assert token_ids, response.text
    return text, token_ids


def unique(body, name):
    """The request with a prompt that no other test has, and that begins differently."""
    key = "prompt" if "prompt" in body else "messages"
    prompt = f"{name}: {PROMPT}"
    return body | {key: prompt if key == "prompt" else [{"role": "user", "content": prompt}]}


@pytest.mark.parametrize(
    ("path", "body", "is_stream"), [("/v1/completions", COMPLETION, True), ("/v1/chat/completions", CHAT, False)]
)
def test_answers_are_those_of_one_engine_and_the_prompt_comes_from_the_store(engines, truth, path, body, is_stream):
    prefill, decode = engines
    body = unique(body, f"{is_stream} {path}") | (WITH_USAGE if is_stream else {})
    before = decode.llm.get_stats().kv_store.loaded_tokens
    [response] = ask(FrontOptions(prefill.url, (decode.url,)), ("POST", path, body))
    assert response.status_code == 200, response.text
    expected = direct(decode, path, body)
    assert response.headers["content-type"] == expected.headers["content-type"]
    assert response.text.endswith("data: [DONE]\n\n") == is_stream
    assert tokens_of(response) == tokens_of(expected)
    assert tokens_of(response)[1] == truth(body)
    usage = values_of(response)[-1]["usage"]
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert num_cached == (usage["prompt_tokens"] - 1) // 4 * 4  # all full blocks but that of the last token
    num_loaded = decode.llm.get_stats().kv_store.loaded_tokens - before
    assert num_cached - 4 <= num_loaded <= num_cached  # the pool may have the block with the role from an earlier test
    assert prefill.llm.get_stats().kv_store.loaded_tokens == 0


def test_without_a_prefill_engine_the_decode_engine_computes_the_prompt(engines, truth, caplog):
    _, decode = engines
    body = unique(COMPLETION, "no prefill")
    caplog.set_level(logging.WARNING)
    first, again = ask(FrontOptions(NOBODY, (decode.url,)), *[("POST", "/v1/completions", body)] * 2)
    assert tokens_of(first)[1] == tokens_of(again)[1] == truth(body)
    assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert [record.args[0] for record in caplog.records] == [NOBODY]  # logged once


def test_a_prefill_engine_that_does_not_answer_in_time_is_not_waited_for(engines, truth):
    _, decode = engines
    body = unique(COMPLETION, "slow prefill")
    with Flaky(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n") as broken:
        [response] = ask(FrontOptions(broken.url, (decode.url,)), ("POST", "/v1/completions", body))
    assert len(broken.requests) == 1
    assert tokens_of(response)[1] == truth(body)
    with contextlib.closing(silent_socket()) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        [response] = ask(FrontOptions(url, (decode.url,), 0.05), ("POST", "/v1/completions", body))
    assert tokens_of(response)[1] == truth(body)


def silent_socket():
    """A socket that accepts connections, and never answers."""
    return socket.create_server(("127.0.0.1", 0))


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BEFORE_THE_FIRST_BYTE = [  # the last: it loads
    b"",
    STREAM_HEAD,
    b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"id": 1',
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}",
]


def test_decode_engines_take_turns_and_one_that_fails_before_the_first_byte_is_replaced(engines, truth):
    prefill, decode = engines
    with contextlib.ExitStack() as stack:
        broken = [stack.enter_context(Flaky(answer)) for answer in BEFORE_THE_FIRST_BYTE]
        options = FrontOptions(prefill.url, (*[one.url for one in broken], NOBODY, decode.url))
        responses = ask(options, *[("POST", "/v1/completions", COMPLETION | {"stream": True})] * 2)
    assert [tokens_of(response)[1] for response in responses] == [truth(COMPLETION)] * 2
    assert [len(one.requests) for one in broken] == [1, 2, 2, 2], "the second request began with the second engine"


def test_a_response_is_asked_of_the_engine_that_stores_it(engines):
    """Two decode engines take turns, and only one of them stores a response. Oracle: the whole conversation."""
    path, options = "/v1/responses", FrontOptions(engines[0].url, tuple(engine.url for engine in reversed(engines)))
    body = {"input": "Where is it?", "max_output_tokens": 5, "temperature": 0, "ignore_eos": True}

    async def talk():
        app = make_front(options)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://front", timeout=30) as client,
        ):
            items, previous, replicas = [], {}, set()
            for turn in range(5):
                message = {"type": "message", "role": "user", "content": f"{turn}?"}
                one = (await client.post(path, json=body | {"input": [message]} | previous)).json()
                items.append(message)
                whole = (await client.post(path, json=body | {"input": items, "store": False})).json()
                assert one["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
                assert texts(one) == texts(whole)
                items += one["output"]
                previous = {"previous_response_id": one["id"]}
                replicas.add(one["id"].split("_")[1])
            assert len(replicas) == 1
            counted = (await client.post(path + "/input_tokens", json={"input": "And?", **previous})).json()
            assert counted["input_tokens"] > one["usage"]["input_tokens"]
            references = [{"type": "item_reference", "id": one["output"][0]["id"]}]
            for _ in range(2):
                by_id = await client.post(path, json=body | {"input": references})
                assert by_id.status_code == 200, by_id.text
                assert (await client.get(f"{path}/{one['id']}")).json() == one
                page = await client.get(f"{path}/{one['id']}/input_items", params={"limit": 1, "order": "asc"})
                assert [item["content"][0]["text"] for item in page.json()["data"]] == ["0?"]
            assert (await client.post(f"{path}/{one['id']}/cancel")).status_code == 400, "it has ended"
            assert (await client.delete(f"{path}/{one['id']}")).json()["deleted"]
            assert (await client.get(f"{path}/{one['id']}")).status_code == 404
            stranger = await client.post(path, json=body | {"previous_response_id": f"resp_abc_{'0' * 32}"})
            assert stranger.json()["error"]["code"] == "previous_response_not_found"

    asyncio.run(talk())


def test_responses_in_the_background_belong_to_the_decode_engine_that_generates_them(engines, monkeypatch):
    """The front polls, cancels and reads events again. Oracle: the same response in the foreground."""
    path, (prefill, decode) = "/v1/responses", engines
    options = FrontOptions(prefill.url, (NOBODY, prefill.url, decode.url))  # a GET without an id's engine would fail
    body = {"input": "Where is it?", "max_output_tokens": 60, "temperature": 0, "ignore_eos": True}
    long = body | {"background": True, "max_output_tokens": 400}

    async def talk():
        app = make_front(options)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://front", timeout=30) as client,
        ):

            async def read_to_end(name):
                while (state := (await client.get(f"{path}/{name}")).json())["status"] in ("queued", "in_progress"):
                    await asyncio.sleep(0.01)
                return state

            whole, engines_of_ids = (await client.post(path, json=body)).json(), set()
            for _ in range(2):
                queued = (await client.post(path, json=body | {"background": True})).json()
                assert (queued["status"], queued["output"]) == ("queued", [])
                ended = await read_to_end(queued["id"])
                assert (ended["status"], texts(ended)) == ("incomplete", texts(whole))
                engines_of_ids.add(queued["id"].split("_")[1])
                more = await client.post(path, json=body | {"previous_response_id": queued["id"]})
                assert more.json()["usage"]["input_tokens"] > whole["usage"]["input_tokens"]
            assert len(engines_of_ids) == 2, "they take turns"
            begun = await events_until_client_leaves(app, path, body | {"background": True, "stream": True})
            name = json.loads(begun.split("data: ")[1].split("\n")[0])["response"]["id"]
            ended = await read_to_end(name)
            assert texts(ended) == texts(whole)
            events = (await client.get(f"{path}/{name}?stream=true")).text
            assert events.startswith(begun)
            rest = (await client.get(f"{path}/{name}?stream=true&starting_after=3")).text
            assert events.endswith("\n\n" + rest)
            assert rest.count("data: ") == events.count("data: ") - 4
            for one in engines:
                slow_down(one.llm, monkeypatch)
            name = (await client.post(path, json=long)).json()["id"]
            assert (await client.post(f"{path}/{name}/cancel")).json()["status"] == "cancelled"
            assert (await client.get(f"{path}/{name}")).json()["usage"]["output_tokens"] < 400

    asyncio.run(talk())


async def events_until_client_leaves(app, path, body):
    """The first bytes of a stream, whose client then leaves."""
    begun, requests = [], [{"type": "http.request", "body": json.dumps(body).encode()}]
    has_begun = asyncio.Event()

    async def receive():
        if requests:
            return requests.pop()
        await has_begun.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body" and not has_begun.is_set():
            begun.append(message["body"])
            has_begun.set()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await asyncio.wait_for(app(scope, receive, send), 60)
    return begun[0].decode()


def texts(response):
    return [part["text"] for item in response["output"] for part in item["content"]]


def test_without_a_decode_engine_the_answer_is_503(engines):
    [response, health] = ask(
        FrontOptions(engines[0].url, (NOBODY, NOBODY)),
        ("POST", "/v1/completions", COMPLETION),
        ("GET", "/health", None),
    )
    assert response.status_code == health.status_code == 503
    assert "retry-after" in response.headers
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("service_unavailable", "unavailable", None)


def test_an_engine_that_dies_in_the_middle_of_a_stream_ends_it_with_an_error_event(engines):
    whole, half = b'data: {"choices":[{"text":"a"}]}\n\n', b'data: {"choi'
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (whole, half))
    with Flaky(STREAM_HEAD + chunks) as broken:
        options = FrontOptions(engines[0].url, (broken.url, engines[1].url))
        [response] = ask(options, ("POST", "/v1/completions", COMPLETION | {"stream": True}))
    first, error, done, end = response.text.split("\n\n")
    assert (first.encode() + b"\n\n", done, end) == (whole, "data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_died"


def test_requests_that_generate_nothing_are_those_of_a_decode_engine(engines):
    prefill, decode = engines
    pairs = [
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
    ]
    pairs += [(path, {"query": "a", "documents": ["b", "c"]}) for path in ("/rerank", "/v1/rerank", "/v2/rerank")]
    answers = ask(FrontOptions(prefill.url, (decode.url,)), *[("POST", path, body) for path, body in pairs])
    for (path, body), answer in zip(pairs, answers, strict=True):
        found, expected = answer.json(), direct(decode, path, body).json()
        for name in ("data", "results", "meta"):
            assert found.get(name) == expected.get(name), path
        assert answer.status_code == 200


def test_messages_come_from_the_store_and_fail_in_their_own_form(engines):
    prefill, decode = engines
    body = unique({key: CHAT[key] for key in ("messages", "max_tokens", "temperature", "ignore_eos")}, "message")
    path, before = "/v1/messages", decode.llm.get_stats().kv_store.loaded_tokens
    url = (decode.url,)
    answer, stream, counted, refused = ask(
        FrontOptions(prefill.url, url),
        ("POST", path, body),
        ("POST", path, body | {"stream": True}),
        ("POST", path + "/count_tokens", body),
        ("POST", path, {}),
    )
    expected = direct(decode, path, body).json()
    assert answer.json()["content"] == expected["content"]
    usage = answer.json()["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert usage["cache_read_input_tokens"] == (num_prompt - 1) // 4 * 4
    assert decode.llm.get_stats().kv_store.loaded_tokens - before >= usage["cache_read_input_tokens"] - 4
    assert counted.json() == {"input_tokens": num_prompt}
    assert stream.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert refused.json()["error"] == direct(decode, path, {}).json()["error"]
    whole, half = b'event: ping\ndata: {"type": "ping"}\n\n', b"event: content_blo"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (whole, half))
    with Flaky(STREAM_HEAD + chunks) as broken:
        (cut,) = ask(FrontOptions(prefill.url, (broken.url,)), ("POST", path, body | {"stream": True}))
    (down,) = ask(FrontOptions(prefill.url, (NOBODY,)), ("POST", path, body))
    first, error, nothing = cut.text.split("\n\n")
    assert (first.encode() + b"\n\n", nothing) == (whole, "")
    name, data = error.split("\n")
    assert (name, json.loads(data.removeprefix("data: "))["error"]["type"]) == ("event: error", "overloaded_error")
    assert (down.status_code, down.json()["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_is_cancelled_at_the_engine(engines, is_stream, monkeypatch):
    prefill, decode = engines
    slow_down(decode.llm, monkeypatch)
    body = unique(COMPLETION, "leaves") | {"max_tokens": 400, "stream": is_stream}
    num_before = num_aborted(decode)

    async def leave():
        app, is_begun = make_front(FrontOptions(prefill.url, (decode.url,))), asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive():
            if messages:
                return messages.pop()
            if is_stream:
                await is_begun.wait()
            while not decode.llm.get_stats().num_running:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.body":
                is_begun.set()

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
        async with app.router.lifespan_context(app):
            await asyncio.wait_for(app(scope, receive, send), 60)
            await asyncio.to_thread(decode.wait_until_idle)  # while the front's own connections stay open

    asyncio.run(leave())
    assert num_aborted(decode) == num_before + 1


def slow_down(llm, monkeypatch):
    """A request takes seconds, so that a client of a busy machine leaves before its end."""
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.02), step())[1])


def num_aborted(server):
    text = CLIENT.get(server.url + "/metrics").text
    return sum(float(line.split()[-1]) for line in text.splitlines() if 'finished_reason="abort"' in line)


def test_errors_and_other_routes_are_those_of_the_decode_engine(engines):
    prefill, decode = engines
    options = FrontOptions(prefill.url, (decode.url,), max_request_bytes=1000)
    path = "/v1/completions"
    bad = [{"prompt": "x", "temperature": -1}, ["x"], {"prompt": "x", "model": "other"}]
    *refused, large, unknown, models, health = ask(
        options,
        *[("POST", path, body) for body in bad],
        ("POST", path, {"prompt": "x" * 1000}),
        ("GET", "/nothing", None),
        ("GET", "/v1/models", None),
        ("GET", "/health", None),
    )
    for response, body in zip(refused, bad, strict=True):
        expected = direct(decode, path, body)
        assert (response.status_code, response.json()) == (expected.status_code, expected.json())
    assert (large.status_code, health.status_code) == (413, 200)
    assert unknown.status_code == 404
    assert "error" in unknown.json()
    assert models.json() == CLIENT.get(decode.url + "/v1/models").json()


def test_headers_are_passed_as_bytes():
    """Keys may be UTF-8. The engine's own limits for each address need the client's."""
    with Flaky(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Request-Id: abc\r\n\r\n{}") as prefill, Flaky(b"") as decode:

        async def send():
            app = make_front(FrontOptions(prefill.url, (decode.url, prefill.url)))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            headers = {b"authorization": "Bearer schlüssel".encode(), b"x-forwarded-for": b"1.2.3.4"}
            async with httpx.AsyncClient(transport=transport, base_url="http://front", headers=headers) as client:
                return await client.post("/v1/completions", json=COMPLETION)

        response = asyncio.run(send())
    assert response.headers["x-request-id"] == "abc"
    assert len(prefill.requests) == 2
    for request in (*prefill.requests, *decode.requests):
        lines = request.lower().split(b"\r\n")
        assert "authorization: bearer schlüssel".encode() in lines
        assert [line for line in lines if line.startswith(b"x-forwarded-for")][-1] == b"x-forwarded-for: 127.0.0.1"


def test_the_prefill_engine_gets_what_shapes_the_prompt():
    body = (
        CHAT
        | WITH_USAGE
        | {"n": 3, "max_completion_tokens": 9, "logprobs": True, "tools": [], "truncate_prompt_tokens": 5}
    )
    expected = {"messages": CHAT["messages"], "temperature": 0, "ignore_eos": True, "tools": []}
    expected |= {"truncate_prompt_tokens": 5, "max_tokens": 1, "n": 1, "stream": False}
    assert json.loads(asyncio.run(prefill_body(json.dumps(body).encode()))) == expected
    response = {"input": "a", "max_output_tokens": 9, "background": True, "stream": True}
    expected = {"input": "a", "max_output_tokens": 1, "background": False, "store": False, "n": 1, "stream": False}
    assert json.loads(asyncio.run(prefill_body(json.dumps(response).encode()))) == expected
    for bad in (b"", b"[1]", b"{", b"\xff\xfe", b'{"truncate_prompt_tokens": -1}'):
        assert asyncio.run(prefill_body(bad)) is None


@pytest.mark.parametrize("words", [[], ["--prefill", "x", "--decode", NOBODY], ["--prefill", NOBODY]])
def test_bad_options_are_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "nanovllm front: error:" in capsys.readouterr().err


# ---- real processes


@pytest.mark.slow
def test_no_token_differs_when_engines_are_killed(tmp_path, offline):
    """35 streams of clients, while first the prefill engine is killed, then one of two decode engines."""
    system = "You answer questions about inference engines for language models, in one sentence."

    def engine(role):
        config = ["--kv-transfer-config", json.dumps(transfer(tmp_path / "blocks", role))]
        return started("serve", "--num-kv-blocks", "512", "--device", "cpu", *config)

    bodies = [
        {"messages": [{"role": "system", "content": f"{i}. {system}"}, {"role": "user", "content": question}]}
        | {"max_tokens": 40, "temperature": 0, "return_token_ids": True, **WITH_USAGE}
        for i in range(7)
        for question in QUESTIONS
    ]
    params = SamplingParams(temperature=0, max_tokens=40)
    outputs = offline.llm.chat([body["messages"] for body in bodies], params, use_tqdm=False)
    with contextlib.ExitStack() as stack:
        roles = ("kv_producer", "kv_consumer", "kv_consumer")
        prefill, one, two = [stack.enter_context(engine(role)) for role in roles]
        front = stack.enter_context(started("front", "--prefill", prefill.url, "--decode", one.url, two.url))

        def call(number):
            if number in (15, 25):
                (prefill if number == 15 else one).process.kill()
            return CLIENT.post(front.url + "/v1/chat/completions", json=bodies[number], timeout=60)

        with ThreadPoolExecutor(8) as threads:
            responses = list(threads.map(call, range(len(bodies))))
    num_cut = 0
    for i, (response, output) in enumerate(zip(responses, outputs, strict=True)):
        assert response.status_code == 200, response.text
        if "error" in values_of(response)[-1]:
            num_cut += 1
            assert values_of(response)[-1]["error"]["code"] == "engine_died"
            continue
        assert tokens_of(response)[1] == output.outputs[0].token_ids
        if i < 6:
            assert values_of(response)[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert num_cut <= 8  # the streams that the killed engine had


@pytest.mark.parametrize("has_prefill", [True, False])
def test_the_name_of_an_adapter_is_passed_to_the_engines(with_tokenizer, tmp_path, has_prefill):
    """Its blocks come from the store. A prefill engine that lacks it leaves the prompt to the decode engine."""
    for seed, name in enumerate(("alice", "bob")):
        make_adapter(tmp_path / name, seed, with_tokenizer, scale=0.6)
    with contextlib.ExitStack() as stack:
        engines = []
        for role in ("kv_producer", "kv_consumer"):
            config = {**SMALL, "enable_lora": True, "kv_transfer_config": transfer(tmp_path / "blocks", role)}
            llm = stack.enter_context(AsyncLLM(with_tokenizer, **config))
            names = ("alice", "bob") if role == "kv_consumer" or has_prefill else ("bob",)
            adapters = tuple(LoRARequest(name, i, tmp_path / name) for i, name in enumerate(names, 1))
            engines.append(stack.enter_context(in_thread(llm, lora_modules=adapters)))
        prefill, decode = engines
        bodies = [{**COMPLETION, "model": name} for name in ("alice", "bob", "carol")]
        options = FrontOptions(prefill.url, (decode.url,))
        *answers, unknown = ask(options, *[("POST", "/v1/completions", body) for body in bodies])
        num_loaded = decode.llm.get_stats().kv_store.loaded_tokens
        expected = [direct(decode, "/v1/completions", body) for body in bodies[:2]]
        (missing,) = ask(options, ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y"}))
    assert [tokens_of(one) for one in answers] == [tokens_of(one) for one in expected]
    assert tokens_of(answers[0]) != tokens_of(answers[1])
    assert [one.json()["model"] for one in answers] == ["alice", "bob"]
    num_full = (len(answers[0].json()["choices"][0]["prompt_token_ids"]) - 1) // 4 * 4
    assert num_loaded == num_full * (2 if has_prefill else 1)
    assert unknown.status_code == missing.status_code == 404
    assert "unknown model 'carol'" in unknown.text
