"""Requests that no client should send, as bytes on a real connection: each is answered with a clean 4xx, nothing of our
own shows, and the next request works.

Seen to fail when broken: a number that JSON does not have taken as one; text that has no UTF-8 answered with a 500;
JSON so deep that its reader gives up answered with a 500; a body read beyond its limit.
"""

import contextlib
import json
import re

import pytest

from nanovllm import TINY_QWEN3
from nanovllm_extras.serve.async_llm import AsyncLLM
from tests.extras.serve.real_server import in_thread

MAX_BYTES = 4 * 2**20
GOOD = {"model": "tiny-qwen3", "prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def server():
    with (
        AsyncLLM(TINY_QWEN3, device="cpu", num_kv_blocks=128, max_model_len=64) as llm,
        in_thread(llm, max_request_bytes=MAX_BYTES) as server,
    ):
        yield server


def post(body, *headers, path="/v1/completions", method="POST"):
    """Return a whole request; `headers` replace the Content-Length."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += headers or [f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def with_field(name, text, path="/v1/completions"):
    """A good request but for one field, whose JSON is given as it is."""
    good = {**GOOD, "messages": [{"role": "user", "content": "a"}]} if "chat" in path else dict(GOOD)
    good.pop(name, None)
    return post((json.dumps(good)[:-1] + f', "{name}": {text}}}').encode(), path=path)


def answer(server, content):
    """(status, headers, body) of the answer to these bytes."""
    with server.connect() as connection:
        with contextlib.suppress(ConnectionError):  # refused before all was sent: the answer may be there
            connection.sendall(content)
        received = b""
        while b"\r\n\r\n" not in received or len(received) < whole_length(received):
            piece = connection.recv(1 << 20)
            if not piece:
                break
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    status, *headers = head.decode().split("\r\n")
    return int(status.split()[1]), "\n".join(headers).lower(), body


def whole_length(received):
    head, _, _ = received.partition(b"\r\n\r\n")
    lengths = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return len(head) + 4 + (lengths[0] if lengths else 0)


CHUNKED = "Transfer-Encoding: chunked"
GOOD_BYTES = json.dumps(GOOD).encode()
CASES = {
    "both lengths": (post(b"5\r\nhello\r\n0\r\n\r\n", CHUNKED, "Content-Length: 5"), {400}),
    "two lengths": (post(GOOD_BYTES, "Content-Length: 5", f"Content-Length: {len(GOOD_BYTES)}"), {400}),
    "a length below zero": (post(GOOD_BYTES, "Content-Length: -5"), {400}),
    "a length that is no number": (post(GOOD_BYTES, "Content-Length: many"), {400}),
    "a length beyond all": (post(GOOD_BYTES, "Content-Length: 1" + "0" * 18), {400, 413}),
    "a bad chunk": (post(b"what?\r\n", CHUNKED), {400}),
    "a huge header": (post(GOOD_BYTES, f"Content-Length: {len(GOOD_BYTES)}", "X: " + "x" * 2**20), {400, 431}),
    "many headers": (post(GOOD_BYTES, *[f"X-{i}: {'x' * 90}" for i in range(10_000)]), {400, 431}),
    "no HTTP": (b"\x16\x03\x01 hello?\r\n\r\n", {400}),
    "too large": (post(b" " * (MAX_BYTES + 1)), {413}),
    "too large in chunks": (post(b"500001\r\n" + b" " * 0x500001 + b"\r\n0\r\n\r\n", CHUNKED), {413}),
    "empty": (post(b""), {400}),
    "no JSON": (post(b"prompt=a"), {400}),
    "half of JSON": (post(GOOD_BYTES[:-1]), {400}),
    "no object": (post(b"[1]"), {400}),
    "deep lists": (post(b"[" * 10_000 + b"]" * 10_000), {400}),
    "deep lists in a field": (with_field("prompt", "[" * 10_000 + "]" * 10_000), {400}),
    "deep objects": (with_field("logit_bias", '{"a":' * 10_000 + "1" + "}" * 10_000), {400}),
    "deep messages": (with_field("messages", "[" * 10_000 + "]" * 10_000, "/v1/chat/completions"), {400}),
    "a million stop strings": (with_field("stop", json.dumps(["a"] * 10**6, separators=(",", ":"))), {400, 413}),
    "NaN": (with_field("temperature", "NaN"), {400}),
    "Infinity": (with_field("top_p", "Infinity"), {400}),
    "minus Infinity": (with_field("presence_penalty", "-Infinity"), {400}),
    "a number beyond floats": (with_field("temperature", "1e999"), {400}),
    "a whole number beyond all": (with_field("seed", "1" * 4000), {400}),
    "a whole number beyond Python's": (with_field("seed", "1" * 5000), {400}),
    "NaN as a bias": (with_field("logit_bias", '{"5": NaN}'), {400}),
    "invalid UTF-8": (post(b'{"model": "tiny-qwen3", "prompt": "\xff\xfe"}'), {400}),
    "half of a surrogate pair": (with_field("prompt", r'"\ud800"'), {400}),
    "the other half": (with_field("stop", r'["\udc00"]'), {400}),
    "half a pair in a message": (
        with_field("messages", r'[{"role": "user", "content": "a\ud83d"}]', "/v1/chat/completions"), {400}),
    "half a pair as the model": (with_field("model", r'"\ud800"'), {400, 404}),
    "a token that there is not": (with_field("prompt", "[1, 99999999]"), {400}),
    "a token below zero": (with_field("prompt", "[1, -1]"), {400}),
    "a token that is true": (with_field("prompt", "[true]"), {400}),
    "text for a number": (with_field("max_tokens", '"five"'), {400}),
    "an unknown path": (post(GOOD_BYTES, path="/v1/nothing"), {404}),
    "another method": (post(b"", method="DELETE"), {405}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_is_refused_and_the_next_one_works(server, case):
    content, allowed = CASES[case]
    status, headers, body = answer(server, content)
    assert status in allowed, body[:500]
    assert b"Traceback" not in body
    assert b"nanovllm/" not in body
    assert "content-type: application/json" in headers
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 1000
    status, _, body = answer(server, post(GOOD_BYTES))
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 2)


def test_nothing_is_said_in_the_midst_of_an_answer(server):
    """After a request for a stream come bytes that are not a request: one error follows the stream."""
    stream = post(json.dumps({**GOOD, "max_tokens": 50, "ignore_eos": True, "stream": True}).encode())
    with server.connect() as connection:
        connection.sendall(stream)
        received = connection.recv(1000)
        while b"data: " not in received:
            received += connection.recv(1000)
        connection.sendall(b"no request\r\n\r\n" * 2)
        while piece := connection.recv(1 << 20):
            received += piece
    _, answer, *errors = re.split(rb"HTTP/1.1 (?=\d)", received)
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") or not errors
    assert [error[:4] for error in errors] in ([], [b"400 "])
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("field", "text"),
    [("temperature", "NaN"), ("max_tokens", '"five"'), ("stop", r'["\udc00"]'), ("prompt", "[1, -1]")],
)
def test_an_error_names_its_field(server, field, text):
    _, _, body = answer(server, with_field(field, text))
    assert json.loads(body)["error"]["param"] == field
