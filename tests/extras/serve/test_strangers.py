"""What keeps strangers out, and what one of them may hold: time limits, sizes, proxies, the log, clients that leave.

Seen to fail when broken, each: keys compared by their first eight characters, or by their last; a path that needs a key
let in without; a rate by the connection, or by what a client says of itself; a rate that is never forgotten; a limit of
bytes, values, prompts, tokens, characters or waiting requests that is not looked at; a head or a body without a time
limit; a connection that is reset before its answer; an end that is counted by another reason.
"""

import asyncio
import contextlib
import http.client
import json
import logging
import re
import select
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm_extras.serve import access, body, bounds, streaming, workers
from nanovllm_extras.serve.bounds import BoundedTokenizer, Bounds, count_values
from nanovllm_extras.serve.prompts import are_many
from nanovllm_extras.serve.routes import server
from nanovllm_extras.serve.routes.app import make_app, set_engine
from nanovllm_extras.serve.serve_settings import PlainFormatter
from nanovllm_extras.serve.server_options import ServerOptions
from nanovllm_extras.serve.workers import ClientGone, Workers
from tests.extras.serve.conftest import Client
from tests.extras.serve.real_server import in_thread

PATH, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODY = {"prompt": "ab", "max_tokens": 1}


def post(path, content, *headers):
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


def read_all(connection):
    received = b""
    while piece := connection.recv(1 << 16):
        received += piece
    return received


def read_answer(connection):
    """(status, headers, JSON) of one answer."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.headers, json.load(response)


# ---- keys and rates


def test_all_routes_but_five_need_a_key(new_client):
    """Of each route that there is, and paths that look like an open one."""
    client = new_client(api_keys=("one",))
    paths = list(client.get("/openapi.json", headers={"Authorization": "Bearer one"}).json()["paths"])
    assert {CHAT, PATH, RESPONSES, "/tokenize", "/health"} < set(paths)
    others = [
        "/health/",
        "/health/x",
        "//health",
        "/Health",
        "/metrics/../v1/models",
        "/ui/events",
        "/openapi.json",
        "/",
    ]
    is_open = {
        path: any(client.request(method, path).status_code != 401 for method in ("GET", "POST", "HEAD", "OPTIONS"))
        for path in [*paths, *others]
    }
    without_a_key = {path for path, one in is_open.items() if one}
    assert without_a_key == {"/health", "/health/", "/ping", "/version", "/metrics", "/load"}


def test_a_refused_key_does_not_use_up_anybodys_rate(new_client):
    client = new_client(api_keys=("one",), max_requests_per_minute=1)
    for _ in range(3):
        assert client.post(PATH, BODY, headers={"Authorization": "Bearer two"}).status_code == 401
    assert client.post(PATH, BODY, headers={"Authorization": "Bearer one"}).status_code == 200
    assert client.post(PATH, BODY, headers={"Authorization": "Bearer one"}).status_code == 429


def test_what_is_refused_while_the_model_is_loaded_costs_nobodys_rate(llm):
    app = make_app(ServerOptions(model_names=("tiny",), max_requests_per_minute=2))
    client = Client(app)
    assert [client.post(PATH, BODY).status_code for _ in range(3)] == [503] * 3
    set_engine(app, llm)
    assert [client.post(PATH, BODY).status_code for _ in range(3)] == [200, 200, 429]


def test_callers_are_forgotten_after_their_minute(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(access.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(access, "MAX_ADDRESSES", 10)
    limit = access.RateLimit(1)
    for i in range(1000):
        clock[0] += 1
        limit.check(f"address {i}")
        assert len(limit._times) <= 10 + 61


@pytest.mark.parametrize(("proxies", "statuses"), [((), [200, 429, 429]), (("127.0.0.1",), [200, 200, 429])])
def test_only_a_known_proxy_may_say_where_a_request_comes_from(llm, proxies, statuses):
    with in_thread(llm, max_requests_per_minute=1, forwarded_allow_ips=proxies) as one:
        found = []
        for address in ("10.0.0.1", "10.0.0.2", "10.0.0.2"):
            with one.connect() as connection:  # a connection each: the rate is of the address
                connection.sendall(post(PATH, json.dumps(BODY).encode(), f"X-Forwarded-For: {address}"))
                found.append(read_answer(connection)[0])
    assert found == statuses


# ---- time limits, and answers that arrive


def trickle(connection, sent):
    """Send bytes, and then one after the other until the server ends the connection -> what it has sent, seconds."""
    received, start = b"", time.perf_counter()
    connection.sendall(sent)
    connection.settimeout(0.05)
    with contextlib.suppress(ConnectionError):
        while True:
            assert time.perf_counter() < start + 60, "the server does not end the connection"
            with contextlib.suppress(TimeoutError):
                piece = connection.recv(1 << 16)
                received += piece
                if not piece:
                    break
            connection.sendall(b" ")
    return received, time.perf_counter() - start


@pytest.mark.parametrize(
    "sent", [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: ", post(PATH, b"{" + b" " * 900)[:-500]]
)
def test_a_request_that_never_arrives_is_given_up(llm, monkeypatch, sent):
    """Though one byte after the other comes."""
    monkeypatch.setattr(server, "HEAD_S", 0.3)
    monkeypatch.setattr(server, "BODY_S", 0.3)
    with in_thread(llm) as one, one.connect() as connection:
        received, seconds = trickle(connection, sent)
        assert seconds > 0.25
        assert received.startswith(b"HTTP/1.1 408 ")
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_the_second_request_of_a_connection_has_a_time_limit_too(llm, monkeypatch):
    monkeypatch.setattr(server, "HEAD_S", 0.3)
    with in_thread(llm) as one, one.connect() as connection:
        for _ in range(2):
            connection.sendall(post(PATH, json.dumps(BODY).encode()))
            assert read_answer(connection)[0] == 200
        connection.sendall(b"POST /v1")
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")


def test_a_connection_that_has_sent_nothing_is_closed_without_an_answer(llm, monkeypatch):
    """A pool of connections may hold one for its next request, and would take an answer as that of this request."""
    monkeypatch.setattr(server, "HEAD_S", 0.2)
    with in_thread(llm, timeout_keep_alive_s=0.3) as one:
        start = time.perf_counter()
        with one.connect() as connection:
            assert read_all(connection) == b""
            assert time.perf_counter() - start > 0.25
        for _ in range(20):
            with one.connect() as connection:
                start = time.perf_counter()
                connection.sendall(post(PATH, json.dumps(BODY).encode()))
                try:
                    answer = read_answer(connection)
                except (http.client.HTTPException, ConnectionError):
                    continue  # this process has stood still for so long that the request came too late
                assert answer[0] == 200
                assert read_all(connection) == b"", "closed between two requests"
                assert time.perf_counter() - start > 0.25
                return
        raise AssertionError("no request has been answered")


def test_a_connection_without_a_request_is_kept_as_long_as_the_option_says(llm, monkeypatch):
    monkeypatch.setattr(server, "HEAD_S", 0.05)
    with in_thread(llm, timeout_keep_alive_s=60) as one, one.connect() as connection:
        for _ in range(2):
            time.sleep(0.15)  # longer than HEAD_S, the limit of a request that has begun
            connection.sendall(post(PATH, json.dumps(BODY).encode()))
            assert read_answer(connection)[0] == 200


def test_a_body_that_goes_on_after_its_answer_gets_no_second_one(llm, monkeypatch):
    monkeypatch.setattr(server, "BODY_S", 0.5)
    with in_thread(llm) as one, one.connect() as connection:
        received, _ = trickle(connection, post("/v1/nothing", b"{" + b" " * 900)[:-500])
        assert received.startswith(b"HTTP/1.1 404 ")
        assert received.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(("num_bytes", "is_declared"), [(200_000, False), (8 << 20, True)])
def test_a_body_that_is_too_large_gets_its_answer(llm, num_bytes, is_declared):
    """Also a client that sends all of it before it reads."""
    content = b" " * num_bytes
    with in_thread(llm, max_request_bytes=100_000) as one, one.connect() as connection:
        if is_declared:
            connection.sendall(post(PATH, content))
        else:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.sendall(head + b"%x\r\n" % num_bytes + content + b"\r\n0\r\n\r\n")
        status, head, _ = read_answer(connection)
        assert (status, head["connection"]) == (413, "close")
        assert read_all(connection) == b""


def test_a_declared_length_is_refused_before_the_body_comes(llm):
    with in_thread(llm, max_request_bytes=1000) as one, one.connect() as connection:
        connection.sendall(post(PATH, b" " * 1001)[:-1001])
        assert read_answer(connection)[0] == 413


def test_headers_have_a_limit(client):
    for num_bytes, status in ((60_000, 200), (66_000, 431)):
        headers = {f"X-{i}": "x" * 995 for i in range(num_bytes // 1000)}
        assert client.post(PATH, BODY, headers=headers).status_code == status


# ---- how much a body may hold


def count_slowly(text):
    num_values, is_inside, is_escaped = 0, False, False
    for char in text:
        if is_inside:
            is_inside = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        else:
            is_inside = char == '"'
            num_values += bounds.COSTS.get(char, 0)
    return num_values


TEXTS = st.text(st.sampled_from('a\\",[{}é😀\n'), max_size=8)
VALUES = st.recursive(
    TEXTS | st.integers(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3)
)


def test_only_many_prompts_are_long_work():
    assert are_many(["a"] * 1000)
    assert are_many([[1, 2]] * 1000)
    assert not are_many(list(range(1000))), "one prompt of token ids"


@settings(max_examples=40, deadline=None)
@given(value=VALUES, is_ascii=st.booleans(), size=st.integers(1, 12))
@example(value=['\\",[{', "\\\\", '\\\\"'], is_ascii=True, size=3)
def test_values_are_counted_outside_of_texts(value, is_ascii, size):
    """Against a reading character by character, in blocks of any size."""
    text = json.dumps(value, ensure_ascii=is_ascii)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "BLOCK", size)
        assert count_values(text.encode(), 10**6) == count_slowly(text)
        assert np.sign(count_values(text.encode(), 3) - 3) == np.sign(count_slowly(text) - 3)


def refused(client, path, param, words, code=None, **fields):
    assert client.refuse(path, fields, param, *words)["code"] == code


def test_each_bound_holds_to_the_last(new_client, llm):
    """What is just allowed is served, and one more is refused with what was given and what is allowed."""
    client = new_client(max_choices=3, max_request_values=40_000)
    vocab_size, most = llm.engine.input_processor.vocab_size, llm.engine.parts.max_model_len
    longest = max(map(len, llm.engine.tokenizer.get_vocab()))
    few = {"max_tokens": 1}
    assert client.ask(PATH, prompt=["a"] * 3, **few)
    refused(client, PATH, "prompt", ["3", "4"], prompt=["a"] * 4, **few)
    refused(client, "/v1/embeddings", "input", ["2048", "2049"], input=["a"] * 2049)
    refused(client, "/rerank", "documents", ["2048", "2049"], query="a", documents=["a"] * 2049)
    assert client.ask(PATH, prompt="a", allowed_token_ids=[5] * vocab_size, **few)
    refused(client, PATH, "allowed_token_ids", [str(vocab_size)], prompt="a", allowed_token_ids=[5] * (vocab_size + 1))
    assert client.ask("/detokenize", tokens=[5] * most)
    refused(client, "/detokenize", "tokens", [str(most), str(most + 1)], tokens=[5] * (most + 1))
    messages = [{"role": "u", "content": ""}] * (most + 1)
    too_long, code = "a" * (most * longest + 1), "context_length_exceeded"
    refused(client, CHAT, "messages", [str(most), str(most + 1)], code, messages=messages)
    for path, field in ((PATH, "prompt"), ("/tokenize", "prompt"), ("/v1/embeddings", "input")):
        refused(client, path, field, [str(most * longest), str(len(too_long))], code, **{field: too_long})
    parts = [{"type": "text", "text": too_long[: len(too_long) // 2 + 1]}] * 2
    refused(client, CHAT, "messages", [str(most * longest)], code, messages=[{"role": "u", "content": parts}])
    together = {"prompt": ["a" * (most - 1)] * 3, **few}
    refused(new_client(max_request_values=1), PATH, "prompt", [str(vocab_size + most), "tokens"], code, **together)
    refused(client, PATH, "structured_outputs", ["65536"], prompt="a", structured_outputs={"choice": ["a" * 600] * 110})
    refused(client, PATH, "logit_bias", ["1024"], prompt="a", logit_bias={str(i): "x" for i in range(1025)})
    calls = [{"function": {"name": "f", "arguments": "a" * 2**16}}]
    client.refuse(CHAT, {"messages": [{"role": "u", "content": "", "tool_calls": calls}]}, "messages")


def test_calls_of_a_conversation_are_limited_one_by_one_and_their_values_together():
    def check(*arguments):
        calls = [{"function": {"name": "f", "arguments": one}} for one in arguments]
        Bounds(5000, 10**6, 10**6, 1, 256, 1).check_messages([{"role": "u", "tool_calls": calls}])

    text = json.dumps({"code": "f(a, b)[0]; " * 5000})
    check(text, text, text)
    check(*[json.dumps([1] * 200)] * 24)
    with pytest.raises(ValueError, match="65536"):
        check(text, text + " " * 2**15)
    with pytest.raises(ValueError, match="5000 values"):
        check(*[json.dumps([1] * 200)] * 26)
    with pytest.raises(ValueError, match="5000 values"):
        check(*[json.dumps([1] * 2000)] * 3)


def test_each_bound_of_a_response_holds_to_the_last(new_client, llm):
    client, most = new_client(), llm.engine.parts.max_model_len
    chars = most * max(map(len, llm.engine.tokenizer.get_vocab()))
    item, code = {"role": "user", "content": ""}, "context_length_exceeded"
    refused(client, RESPONSES, "input", [str(most), str(most + 1)], code, input=[item] * (most + 1))
    refused(client, RESPONSES, "input", [str(chars)], code, input=[{**item, "content": "a" * (chars // 2 + 1)}] * 2)
    tool = {"type": "function", "name": "f", "description": "a" * chars}
    refused(client, RESPONSES, "tools", [str(chars)], code, input="a", tools=[tool])
    schema = {"type": "json_schema", "schema": {"enum": ["a" * 2**16]}}
    refused(client, RESPONSES, "text", ["65536"], input="a", text={"format": schema})
    few = {"input": "a", "max_output_tokens": 1}
    assert client.ask(RESPONSES, **few, metadata={"a" * 64: "b" * 512})["metadata"] == {"a" * 64: "b" * 512}
    refused(client, RESPONSES, "metadata", ["64"], **few, metadata={"a" * 65: "b"})
    refused(client, RESPONSES, "metadata", ["512"], **few, metadata={"a": "b" * 513})
    refused(client, RESPONSES, "metadata", ["16", "17"], **few, metadata={str(i): 5 for i in range(17)})


def test_a_prompt_whose_end_is_computed_may_have_as_many_tokens_as_a_request(new_client, llm):
    client, most = new_client(max_request_values=10_000), llm.engine.parts.max_model_len
    fields = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    wanted = client.ask(PATH, prompt=[5, 6, 7], **fields)["choices"][0]["text"]
    prompt = [9] * (2 * most) + [5, 6, 7]
    answer = client.ask(PATH, prompt=prompt, truncate_prompt_tokens=3, **fields)
    assert (answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]) == (wanted, 3)
    assert client.ask(PATH, prompt="a" * 9000, truncate_prompt_tokens=3, **fields)["usage"]["prompt_tokens"] == 3
    messages = [{"role": "u", "content": "a" * 9000}]
    assert client.ask(CHAT, messages=messages, truncate_prompt_tokens=3, **fields)["usage"]["prompt_tokens"] == 3
    given = {"input": "a" * 9000, "truncate_prompt_tokens": 3, "max_output_tokens": 1}
    assert client.ask(RESPONSES, **given)["usage"]["input_tokens"] == 3
    code = "context_length_exceeded"
    refused(client, PATH, "prompt", ["10000"], code, prompt="a" * 10_001, truncate_prompt_tokens=3, **fields)
    refused(client, PATH, "prompt", [str(2 * most + 3)], code, prompt=prompt, **fields)


def test_values_of_a_long_body_are_limited(new_client, llm):
    client = new_client(max_request_values=2000)
    assert client.ask(PATH, **BODY, x=[1] * 1900)
    assert client.ask(PATH, **BODY, x=",[{" * 5000), "characters of a text are no values"
    refused(client, PATH, None, ["2000", "--max-request-values"], **BODY, x=[1] * 2001)
    refused(client, PATH, None, ["2000"], **BODY, x=[{}] * 900)
    refused(client, PATH, None, ["2000"], **BODY, x={str(i): 1 for i in range(300)})


def test_a_text_is_not_encoded_to_its_end(monkeypatch):
    """A long text is refused when its first pieces have twice the tokens of the context, and when its client leaves."""
    encoded = []

    class Letters:
        def encode(self, text, add_special_tokens):
            encoded.append(len(text))
            return list(range(len(text)))

    monkeypatch.setattr(bounds, "PIECE", 10)
    limits = Bounds(10_000, 40, 40, 100, 256, 100)
    with pytest.raises(bounds.TooLong, match="more than 80 tokens"):
        BoundedTokenizer(Letters(), limits, lambda: None).encode("a" * 3000)
    assert encoded == [10] * 9

    encoded.clear()

    def check():
        if len(encoded) == 3:
            raise ClientGone

    with pytest.raises(ClientGone):
        BoundedTokenizer(Letters(), limits, check).encode("a" * 3000)
    assert encoded == [10] * 3


# ---- what waits, and who leaves


class Request(SimpleNamespace):
    """Of a client that leaves when it is told to."""

    def __init__(self, caller="a"):
        super().__init__(state=SimpleNamespace(num_bytes=10**6, caller=caller), has_left=server.asyncio.Event())

    async def receive(self):
        await self.has_left.wait()
        return {"type": "http.disconnect"}


def test_work_that_waits_is_limited_and_ends_when_its_client_leaves(monkeypatch):
    monkeypatch.setattr(workers, "MAX_WAITING", 2)
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 1)
    may_go_on, begun, checks = threading.Event(), [], []

    def work(name):
        def function(check):
            begun.append(name)
            may_go_on.wait(60)
            try:
                check()
            except ClientGone:
                checks.append(name)
                raise
            return name

        return function

    async def run():
        pool, requests = Workers(), [Request() for _ in range(3)]
        tasks = [server.asyncio.ensure_future(pool.run(one, work(i))) for i, one in enumerate(requests)]
        while not begun:
            await server.asyncio.sleep(0.01)
        with pytest.raises(workers.Busy, match="2"):
            await pool.run(Request(), work("one too many"))
        requests[0].has_left.set()
        requests[1].has_left.set()
        assert [type(one) for one in await server.asyncio.gather(*tasks[:2], return_exceptions=True)] == [
            ClientGone
        ] * 2
        may_go_on.set()
        assert await tasks[2] == 2
        assert await pool.run(Request(), work("the next")) == "the next"

    server.asyncio.run(run())
    assert (begun, checks) == ([0, 2, "the next"], [0])


@pytest.fixture
def run_in_turns(monkeypatch):
    """Names that begin with their caller are queued in one moment, on one thread -> the order in which they ran."""
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 1)

    def run(names):
        may_go_on, order = threading.Event(), []

        async def run_all():
            pool, requests = Workers(), {name: Request(name[0]) for name in names}

            def work(name):
                return lambda check: (may_go_on.wait(60), order.append(name))

            tasks = []
            for name, request in requests.items():
                tasks.append(server.asyncio.ensure_future(pool.run(request, work(name))))
                await server.asyncio.sleep(0.005)  # it waits before the next one comes
            await server.asyncio.sleep(0.01)
            may_go_on.set()
            ends = await server.asyncio.gather(*tasks, return_exceptions=True)
            assert (pool._turns._num_free, pool._turns._waiting) == (1, {})
            return {name: type(end) for name, end in zip(names, ends, strict=True) if isinstance(end, Exception)}

        return order, server.asyncio.run(run_all())

    return run


def test_callers_take_turns(run_in_turns):
    order, _ = run_in_turns(["a0", "a1", "a2", "a3", "b1", "b2", "c1", "a4"])
    assert order == ["a0", "a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_caller_with_much_work_leaves_room_for_others(run_in_turns, monkeypatch):
    """Of four places `a` has all, until others come for whom its newest work goes. None goes for the second of `b`."""
    monkeypatch.setattr(workers, "MAX_WAITING", 4)
    order, ends = run_in_turns(["a0", "a1", "a2", "a3", "a4", "a5", "b1", "c1", "b2", "d1"])
    assert ends == dict.fromkeys(["a5", "a4", "a3", "b2", "a2"], workers.Busy)
    assert order == ["a0", "a1", "b1", "c1", "d1"]


def test_answers_that_wait_to_be_written_are_never_refused(monkeypatch):
    """They take no place of those who wait to be read either: the limit of two is met by `b1` and `b2`."""
    monkeypatch.setattr(workers, "MAX_WAITING", 2)

    async def run():
        turns, order = workers.Turns(1), []

        async def take(name, is_bounded):
            await turns.take(name[0], is_bounded)
            order.append(name)
            turns.end()

        await turns.take("first")
        names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1", "a5"]
        tasks = [server.asyncio.ensure_future(take(name, name[0] != "a")) for name in names]
        await server.asyncio.sleep(0)
        turns.end()
        ends = await server.asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [type(None)] * 5 + [workers.Busy] + [type(None)] * 2
        assert order == ["a1", "b1", "c1", "a2", "a3", "a4", "a5"]
        assert (turns._num_free, turns._waiting, turns._bounded) == (1, {}, set())

    server.asyncio.run(run())


@pytest.fixture
def usual():
    """The switch interval that Python begins with, whatever other tests have left."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield 0.005
    sys.setswitchinterval(before)


def test_threads_take_short_turns_only_while_one_works(usual):
    """Also when the work fails. A step of the engine would wait for 5 ms at each of its kernels."""
    during, after = [], []

    def work(check):
        during.append(sys.getswitchinterval())
        if len(during) == 2:
            raise ValueError("one fails")

    async def run():
        pool = Workers()
        for num_works in (1, 1, 3):
            works = [pool.write(f"caller {i}", work) for i in range(num_works)]
            await asyncio.gather(*works, return_exceptions=True)
            give_up = time.monotonic() + 60
            while sys.getswitchinterval() < usual / 2 and time.monotonic() < give_up:
                await asyncio.sleep(0.01)  # the loop is notified of the end
            after.append(sys.getswitchinterval())

    asyncio.run(run())
    assert during == pytest.approx([workers.SHORT_TURN_S] * 5)
    assert after == pytest.approx([usual] * 3)
    assert usual > workers.SHORT_TURN_S


def test_a_turn_that_comes_as_its_client_leaves_goes_to_the_next():
    async def run():
        turns = workers.Turns(1)
        await turns.take("a")
        waiting = [server.asyncio.ensure_future(turns.take(caller)) for caller in "ab"]
        await server.asyncio.sleep(0)
        turns.end()
        waiting[0].cancel()
        await server.asyncio.wait_for(waiting[1], 60)
        turns.end()
        assert turns._num_free == 1

    server.asyncio.run(run())


def test_work_goes_by_the_caller_whose_rate_is_counted(new_client, monkeypatch):
    client, callers = new_client(api_keys=("one", "two")), []
    take = client.server.workers._turns.take
    monkeypatch.setattr(client.server.workers._turns, "take", lambda one, *others: (callers.append(one), take(one))[1])
    for key in ("one", "two", "one"):
        client.post(PATH, {**BODY, "x": "a" * 2**17}, headers={"Authorization": f"Bearer {key}"})
    num_turns = len(callers) // 3
    one, two = callers[0], callers[num_turns]
    assert callers == [one] * num_turns + [two] * num_turns + [one] * num_turns
    assert one != two


def test_bodies_of_all_requests_together_are_limited(new_client, monkeypatch):
    """Of large ones: a small body passes. What is parsed counts no more."""
    monkeypatch.setattr(body, "MAX_BODIES", 2)
    monkeypatch.setattr(body, "LARGE_BODY", 100)
    client, large, counted = new_client(max_request_bytes=1000), {**BODY, "x": "a" * 200}, []
    client.server.body_bytes["another"] = 1990
    response = client.post(PATH, large)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "busy")
    assert client.ask(PATH, **BODY)
    assert client.server.body_bytes == {"another": 1990}

    check_model, count = client.server.check_model, body.JSONRequest._count
    monkeypatch.setattr(body.JSONRequest, "_count", lambda one: (count(one), counted.append("read")))
    monkeypatch.setattr(
        client.server, "check_model", lambda name: (counted.append(client.server.body_bytes.total()), check_model(name))
    )
    client.server.body_bytes.clear()
    client.ask(PATH, **large)
    assert (counted[0], counted[-1]) == ("read", 0)
    for path in (PATH, "/v1/nothing"):
        client.post(path, large)
        client.post(path, {"prompt": 5, "x": "a" * 200})
        client.post(path, large, headers={"Content-Type": "text/plain"})
    assert not client.server.body_bytes


def test_one_caller_holds_a_share_of_the_bodies_that_are_read(llm, monkeypatch):
    """Of two bodies that stand still, the second has no place left. Another caller's has, and each goes its way."""
    monkeypatch.setattr(body, "MAX_BODIES", 3)
    monkeypatch.setattr(body, "MAX_BODIES_OF_CALLER", 1.5)
    monkeypatch.setattr(body, "LARGE_BODY", 100)
    content = json.dumps({**BODY, "x": "a" * 900}).encode()
    with in_thread(llm, api_keys=("one", "two"), max_request_bytes=1000) as served, contextlib.ExitStack() as opened:
        held = [opened.enter_context(served.connect()) for _ in range(3)]

        def send(number, key):
            held[number].sendall(post(PATH, content, f"Authorization: Bearer {key}")[:-100])

        send(0, "one")
        until_bytes_count(served, len(content) - 100)
        send(1, "one")
        assert read_answer(held[1])[2]["error"]["code"] == "busy"
        send(2, "two")
        until_bytes_count(served, 2 * (len(content) - 100))
        for connection in (held[0], held[2]):
            connection.sendall(content[-100:])
            assert read_answer(connection)[0] == 200


def until_bytes_count(served, num_bytes):
    """The bodies that are being read have this many bytes."""
    give_up = time.monotonic() + 60
    while (found := served.state.body_bytes.total()) != num_bytes:
        assert time.monotonic() < give_up, found
        time.sleep(0.005)


def test_a_large_body_has_a_pace(llm, monkeypatch):
    """One that trickles ends when it is late; one that keeps the pace is served, though it takes longer.

    On a busy machine a client may fall behind, so it has several turns to keep the pace.
    """
    monkeypatch.setattr(body, "LARGE_BODY", 100)
    monkeypatch.setattr(body, "STALL_S", 0.1)
    monkeypatch.setattr(body, "MIN_PACE", 2000)
    content = json.dumps({**BODY, "x": "a" * 800}).encode()

    def status_of(served, num_bytes):
        """Of a body that comes in pieces of this size, 20 pieces per second."""
        with served.connect() as connection:
            start = time.perf_counter()
            connection.sendall(post(PATH, content)[: -len(content)])
            for first in range(0, len(content), num_bytes):
                with contextlib.suppress(ConnectionError):
                    connection.sendall(content[first : first + num_bytes])
                time.sleep(0.05)
                if select.select([connection], [], [], 0)[0]:
                    break
            status = read_answer(connection)[0]
            assert time.perf_counter() - start > body.STALL_S
            return status

    with in_thread(llm) as served:
        assert 200 in (status_of(served, 200) for _ in range(20))
        assert status_of(served, 20) == 408


@pytest.mark.parametrize(("path", "stream"), [(PATH, True), (CHAT, False), (RESPONSES, True)])
def test_long_answers_are_written_in_a_thread_and_are_the_same(new_client, monkeypatch, path, stream):
    """As the event loop writes them, but for names and times."""
    client, written_in = new_client(), set()
    fields = {"temperature": 0, "ignore_eos": True, "stream": stream}
    if path == RESPONSES:
        fields |= {"input": "ab", "max_output_tokens": 30, "top_logprobs": 3}
        fields |= {"include": ["message.output_text.logprobs"]}
    elif path == CHAT:
        fields |= {"messages": [{"role": "u", "content": "ab"}], "max_tokens": 30, "logprobs": True, "top_logprobs": 3}
    else:
        fields |= {"prompt": "ab" * 30, "max_tokens": 30, "logprobs": 3, "echo": True}
    encode = streaming.encode

    def noted(*arguments):
        written_in.add(threading.current_thread() is threading.main_thread())
        return encode(*arguments)

    def told(text):
        values = re.findall(r"^data: (\{.*)$", text, re.MULTILINE) if stream else [text]
        return [without_names(json.loads(one)) for one in values]

    _, whole = client.post(path, fields), client.post(path, fields)  # both find the prompt in the prefix cache
    monkeypatch.setattr(streaming, "LONG_ANSWER", 0)
    monkeypatch.setattr(streaming, "PIECE", 3)
    monkeypatch.setattr(streaming, "encode", noted)
    in_pieces = client.post(path, fields)
    assert (whole.status_code, in_pieces.status_code) == (200, 200)
    assert False in written_in
    if stream:  # how many tokens an event has depends on the clock
        assert joined(told(in_pieces.text)) == joined(told(whole.text))
    else:
        assert told(in_pieces.text) == told(whole.text)


def without_names(value):
    if isinstance(value, dict):
        return {key: without_names(one) for key, one in value.items() if not re.search("^(.*id|created.*|usage)$", key)}
    return [without_names(one) for one in value] if isinstance(value, list) else value


def joined(events):
    """All texts of a stream by their keys, one after the other."""
    texts = {}

    def look(value, key):
        if isinstance(value, dict):
            for name, one in value.items():
                look(one, name)
        elif isinstance(value, list):
            for one in value:
                look(one, key)
        elif key in ("text", "content", "delta", "token", "logprob", "bytes"):
            texts[key] = [*texts.get(key, []), value]

    look([one for one in events if one.get("type") != "response.completed"], "")
    return {key: "".join(map(str, found)) for key, found in texts.items()}


@settings(max_examples=15, deadline=None)
@given(
    value=st.recursive(
        TEXTS | st.integers() | st.none() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    ),
    most=st.integers(1, 5),
)
def test_pieces_of_an_answer_are_its_json(value, most):
    checks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "PIECE", most)
        pieces = list(streaming.pieces_of(value, lambda: checks.append(1)))
    assert json.loads(b"".join(pieces)) == value
    whole_values = [json.loads(one) for one in pieces if one not in (b"[", b",", b"]", b"}") and one[-1:] != b":"]
    assert all(num_values(one) <= most for one in whole_values)
    assert len(checks) >= len(whole_values)


def num_values(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(num_values, inner))


# ---- the log and the counters


def test_no_escape_code_reaches_the_log(client, caplog):
    caplog.set_level(logging.INFO)
    client.get("/v1/%1b[2Jmodels%0d%0a2026 INFO all is well%9b%E2%80%AE")
    client.post(PATH, {"model": "\x1b]0;title\x07", "prompt": "a"})
    formatter = PlainFormatter("%(message)s")
    with pytest.raises(ValueError, match="red") as error:
        raise ValueError("\x1b[31mred\r")
    failed = logging.LogRecord("x", logging.ERROR, "x", 1, "%s", ("\x1b",), (error.type, error.value, error.tb))
    lines = [formatter.format(record) for record in [*caplog.records, failed]]
    assert any("models" in line for line in lines)
    assert all(char.isprintable() or char == "\n" for line in lines for char in line)
    assert not any("\n" in line for line in lines[:-1])
