"""Answers that take time: sent whole, or event by event, and aborted when the client goes away.

Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html. Each event is `data: JSON` and a
blank line; the last is `data: [DONE]`. Starlette's `StreamingResponse` sends them. `sse-starlette` 3.7 is not used: a
write takes 1.5 times the processor time, and it takes over `uvicorn`'s signals.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from nanovllm.extras.serve.errors import as_api_error
from nanovllm.extras.serve.generation import Generation
from nanovllm.extras.serve.workers import Check, ClientGone, unless_client_leaves

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
LONG_ANSWER = 4096  # tokens and log-probabilities, or values of JSON in events; more are written in a thread
PIECE = 1000  # values of JSON that are written together


@dataclass(frozen=True, slots=True)
class Written:
    """A value whose JSON is there already, in ASCII. `encode` knows it only if it is given a `check`."""

    json: bytes


def go_on() -> None:
    """A check that lets all work be done."""


async def answer_whole(request: Request, generation: Generation, make_answer: Callable[[], dict[str, Any]]) -> Response:
    """Wait for a generation, then send what `make_answer` makes of it."""

    async def finish_and_write() -> bytes:
        await generation.finish()
        generation.close()
        if generation.take_num_new() <= LONG_ANSWER:
            return encode(make_answer(), go_on if generation.shows_logprobs else None)
        return await generation.workers.write(request.state.caller, lambda check: encode(make_answer(), check))

    try:
        body = await unless_client_leaves(request.receive, finish_and_write())
    finally:
        generation.close()
    return Response(body, media_type="application/json")


class JSON(Response):
    """In pure ASCII, so that any text can be sent."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


class EventStream(StreamingResponse):
    """Sends the events that `chunks` yields, several JSON values at a time, while the client is there.

    A generator makes its values from the new tokens, in a thread if those are many. Where events repeat what earlier
    ones have told, a few tokens may make long ones: they are made in the event loop, and written in a thread.

    A slow client makes Starlette's `send` wait; outputs that come meanwhile merge in the generation's inbox.
    """

    media_type = "text/event-stream"
    repeats = False

    def __init__(self, generation: Generation, chunks: AsyncIterator[Iterable[dict[str, Any]]]) -> None:
        super().__init__(self._events(chunks), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generation = generation
        self._caller = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._caller = scope["state"]["caller"]
        try:  # by itself, StreamingResponse may notice only at its next write that the client has gone
            await unless_client_leaves(receive, self.stream_response(send))
        except ClientGone:
            pass
        finally:
            self._generation.close()

    def encode(self, value: dict[str, Any], check: Check | None = None) -> bytes:
        return to_event(value, check)

    def encode_end(self, error: Exception | None) -> bytes:
        """The end of the stream; an error after its status has been sent is an event."""
        return (b"" if error is None else to_event(as_api_error(error).body())) + DONE

    async def _events(self, chunks: AsyncIterator[Iterable[dict[str, Any]]]) -> AsyncIterator[bytes]:
        body, failure = b"", None
        try:
            async for values in chunks:
                body += await self._write(values)
                if body and not self._generation.is_read:  # the last events leave with the end: a write costs the most
                    yield body
                    body = b""
        except Exception as error:
            logger.exception("%s failed", self._generation.request_id)
            failure = error
        yield body + self.encode_end(failure)

    async def _write(self, values: Iterable[dict[str, Any]]) -> bytes:
        is_long = self._generation.take_num_new() > LONG_ANSWER
        if not is_long and (not self.repeats or is_short(values := list(values), LONG_ANSWER)):
            return self._encode_all(values, go_on if self._generation.shows_logprobs else None)
        return await self._generation.workers.write(self._caller, partial(self._encode_all, values))

    def _encode_all(self, values: Iterable[dict[str, Any]], check: Check | None) -> bytes:
        return b"".join([self.encode(value, check) for value in values])


def to_event(value: Any, check: Check | None = None) -> bytes:
    return b"data: " + encode(value, check) + b"\n\n"


ENCODER = json.JSONEncoder(separators=(",", ":"))  # `json.dumps` would make one for each chunk


def encode(value: Any, check: Check | None = None) -> bytes:
    """JSON. With `check` it is written in pieces, since the encoder does not let other threads in."""
    return ENCODER.encode(value).encode("ascii") if check is None else b"".join(pieces_of(value, check))


def pieces_of(value: Any, check: Check) -> Iterator[bytes]:
    """The JSON of `value`, at most `PIECE` values at a time."""
    check()
    if isinstance(value, Written):
        yield value.json
    elif is_short(value, PIECE, is_plain=True):
        yield encode(value)
    elif isinstance(value, dict):
        for i, (key, one) in enumerate(value.items()):
            yield (b"," if i else b"{") + encode(key) + b":"
            yield from pieces_of(one, check)
        yield b"}"
    else:
        for i, one in enumerate(value):
            yield b"," if i else b"["
            yield from pieces_of(one, check)
        yield b"]"


def is_short(value: Any, most: int, is_plain: bool = False) -> bool:
    """Whether it holds at most `most` values; with `is_plain`, none of which is `Written`."""
    left, num_values = [value], 0
    while left and num_values < most:
        one, num_values = left.pop(), num_values + 1
        if is_plain and isinstance(one, Written):
            return False
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return not left
