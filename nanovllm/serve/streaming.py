"""Answers that take time: sent whole, or event by event, and aborted when the client goes away.

Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html. Each event is `data: JSON` and a
blank line; the last is `data: [DONE]`. Starlette's `StreamingResponse` sends them. `sse-starlette` 3.7 is not used: a
write takes 1.5 times the processor time, and it takes over `uvicorn`'s signals.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from nanovllm.serve.errors import as_api_error
from nanovllm.serve.generation import Generation
from nanovllm.serve.workers import ClientGone, unless_client_leaves

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


async def answer_whole(request: Request, generation: Generation, make_answer: Callable[[], dict[str, Any]]) -> Response:
    """Wait for a generation, then send what `make_answer` makes of it."""
    try:
        await unless_client_leaves(request.receive, generation.finish())
    finally:
        generation.close()
    return JSON(make_answer())


class JSON(Response):
    """In pure ASCII, so that any text can be sent."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


class EventStream(StreamingResponse):
    """Sends the events that `chunks` yields, lists of JSON values, while the client is there.

    A slow client makes Starlette's `send` wait; outputs that come meanwhile merge in the generation's inbox.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, chunks: AsyncIterator[list[dict[str, Any]]]) -> None:
        super().__init__(self._events(chunks), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:  # by itself, StreamingResponse may notice only at its next write that the client has gone
            await unless_client_leaves(receive, self.stream_response(send))
        except ClientGone:
            pass
        finally:
            self._generation.close()

    def encode(self, value: dict[str, Any]) -> bytes:
        return to_event(value)

    def encode_end(self, error: Exception | None) -> bytes:
        """The end of the stream; an error after its status has been sent is an event."""
        return (b"" if error is None else to_event(as_api_error(error).body())) + DONE

    async def _events(self, chunks: AsyncIterator[list[dict[str, Any]]]) -> AsyncIterator[bytes]:
        body, failure = b"", None
        try:
            async for values in chunks:
                body += b"".join([self.encode(value) for value in values])
                if body and not self._generation.is_read:  # the last events leave with the end: a write costs the most
                    yield body
                    body = b""
        except Exception as error:
            logger.exception("%s failed", self._generation.request_id)
            failure = error
        yield body + self.encode_end(failure)


def to_event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


ENCODER = json.JSONEncoder(separators=(",", ":"))  # `json.dumps` would make one for each chunk


def encode(value: Any) -> bytes:
    return ENCODER.encode(value).encode("ascii")
