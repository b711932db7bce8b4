"""Send the answers of generations, whole or event by event. Abort a generation if its client disconnects.

Streams are server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html. Each event is
`data: JSON` and a blank line; the last event is `data: [DONE]`. Starlette's `StreamingResponse` sends them.
`sse-starlette` 3.7 is not used: it takes 1.5 times the processor time, and replaces uvicorn's signal handlers.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from nanovllm_extras.serve.anthropic_errors import is_messages_path
from nanovllm_extras.serve.errors import APIError, as_api_error
from nanovllm_extras.serve.event_log import EventLog
from nanovllm_extras.serve.generation import Generation
from nanovllm_extras.serve.workers import Check, ClientGone, unless_client_leaves

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
LONG_ANSWER = 4096  # tokens and log-probabilities, or JSON values of events; longer answers are encoded in a thread
PIECE = 1000  # JSON values that are encoded at a time


@dataclass(frozen=True, slots=True)
class Written:
    """A value that is already encoded as JSON in ASCII. `encode` accepts it only with a `check`."""

    json: bytes


def go_on() -> None:
    """Do nothing: a check that never stops the work."""


async def answer_whole(
    request: Request, generation: Generation, make_answer: Callable[[], dict[str, object]]
) -> Response:
    """Wait for a generation, then return the response with the JSON of `make_answer()`."""

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
    """A response with JSON in pure ASCII, so that any text can be sent."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Return the JSON of `content`."""
        return encode(content)


class EventStream(StreamingResponse):
    """Sends the JSON values of `chunks` as events, until the client disconnects.

    Each item of `chunks` is an iterable of JSON values. If there are many new tokens, it is iterated and encoded in a
    thread. If events repeat earlier ones (`repeats`), a few new tokens may give long events: then the values are made
    in the event loop, and encoded in a thread.

    A slow client makes Starlette's `send` wait. The outputs that arrive meanwhile merge in the generation's inbox.
    """

    media_type = "text/event-stream"
    repeats = False
    """Whether events may repeat the contents of earlier events."""

    def __init__(self, generation: Generation, chunks: AsyncIterator[Iterable[dict[str, object]]]) -> None:
        self._parts = self._events(chunks)
        super().__init__(self._parts, headers=EVENT_HEADERS)
        self._generation = generation
        self._caller = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._caller = scope["state"]["caller"]
        try:  # StreamingResponse itself may notice only at its next write that the client has gone
            await unless_client_leaves(receive, self.stream_response(send))
        except ClientGone:
            pass
        finally:
            self._generation.close()

    def parts(self, caller: str) -> AsyncIterator[bytes]:
        """Return the encoded events, for a reader that is not a client. Work in threads counts as that of `caller`."""
        self._caller = caller
        return self._parts

    def encode(self, value: dict[str, object], check: Check | None = None) -> bytes:
        """Return the event with a JSON value."""
        return to_event(value, check)

    def encode_end(self, error: Exception | None) -> bytes:
        """Return the end of the stream. An error is sent as an event, because the status has already been sent."""
        return (b"" if error is None else to_event(as_api_error(error).body())) + DONE

    async def _events(self, chunks: AsyncIterator[Iterable[dict[str, object]]]) -> AsyncIterator[bytes]:
        body, failure = b"", None
        try:
            async for values in chunks:
                body += await self._write(values)
                if body and not self._generation.is_read:  # send the last events with the end: writes are expensive
                    yield body
                    body = b""
        except Exception as error:
            logger.exception("%s failed", self._generation.request_id)
            failure = error
        yield body + self.encode_end(failure)

    async def _write(self, values: Iterable[dict[str, object]]) -> bytes:
        is_long = self._generation.take_num_new() > LONG_ANSWER
        if not is_long and (not self.repeats or is_short(values := list(values), LONG_ANSWER)):
            return self._encode_all(values, go_on if self._generation.shows_logprobs else None)
        return await self._generation.workers.write(self._caller, partial(self._encode_all, values))

    def _encode_all(self, values: Iterable[dict[str, object]], check: Check | None) -> bytes:
        return b"".join([self.encode(value, check) for value in values])


def read_log(log: EventLog, start: int = 0) -> Response:
    """Return the response with the events of a log from number `start` on. The generation goes on without a client."""
    return StreamingResponse(log.read(start), headers=EVENT_HEADERS, media_type=EventStream.media_type)


def to_event(value: object, check: Check | None = None) -> bytes:
    """Return the server-sent event with the JSON of `value`."""
    return b"data: " + encode(value, check) + b"\n\n"


def named_event(name: str, value: object, check: Check | None = None) -> bytes:
    """Return the server-sent event with a name and the JSON of `value`."""
    return b"event: " + name.encode() + b"\n" + to_event(value, check)


def error_events(error: APIError, path: str, num_events: int, request_id: str | None) -> bytes:
    """Return the events that end a stream with an error, in the form of the path's API.

    num_events: the number of the stream's earlier events. request_id: the name that Anthropic's form has
    """
    if is_messages_path(path):
        return named_event("error", error.anthropic_body(request_id))
    body = error.body()
    if "/responses" not in path:
        return to_event(body) + DONE
    fields = {name: body["error"][name] for name in ("code", "message", "param")}
    return named_event("error", {"type": "error", **fields, "sequence_number": num_events})


ENCODER = json.JSONEncoder(separators=(",", ":"))  # `json.dumps` would create one for each chunk


def encode(value: object, check: Check | None = None) -> bytes:
    """Return the JSON of `value`. With `check` it is encoded in pieces, since the encoder blocks other threads."""
    return ENCODER.encode(value).encode("ascii") if check is None else b"".join(pieces_of(value, check))


def pieces_of(value: object, check: Check) -> Iterator[bytes]:
    """Yield the JSON of `value`, at most `PIECE` values at a time."""
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
        assert isinstance(value, list)
        for i, one in enumerate(value):
            yield b"," if i else b"["
            yield from pieces_of(one, check)
        yield b"]"


def is_short(value: object, most: int, is_plain: bool = False) -> bool:
    """Return whether `value` contains at most `most` JSON values and, with `is_plain`, no `Written`."""
    left, num_values = [value], 0
    while left and num_values < most:
        one, num_values = left.pop(), num_values + 1
        if is_plain and isinstance(one, Written):
            return False
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return not left
