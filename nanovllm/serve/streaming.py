"""Answers that take time: sent whole, or event by event, and given up when the client goes away.

Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html. Each event is `data: JSON` and a
blank line; the last is `data: [DONE]`.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from nanovllm.serve.errors import as_api_error
from nanovllm.serve.generation import Generation

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has closed the connection."""


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, which is cancelled when the client goes away: then ClientGone is raised."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_for_leave(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working


async def wait_for_leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer_whole(request: Request, generation: Generation, make_answer: Callable[[], dict[str, Any]]) -> Response:
    """Wait for a generation, then send what `make_answer` makes of it."""
    try:
        await unless_client_leaves(request.receive, generation.finish())
    except ClientGone:
        return Response(status_code=499)  # nobody reads it
    finally:
        generation.close()
    return JSON(make_answer())


class JSON(Response):
    """In pure ASCII, so that any text can be sent."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


class EventStream(Response):
    """Sends the events that `chunks` yields, lists of JSON values, as long as the client reads them.

    A client that reads slowly makes `send` wait; the outputs that come meanwhile merge in the generation's inbox.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, chunks: AsyncIterator[list[dict[str, Any]]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            self._generation.close()

    async def _send_all(self, send: Callable[[Any], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = b""
        try:
            async for chunks in self._chunks:
                body += b"".join([to_event(chunk) for chunk in chunks])
                if body and not self._generation.is_read:  # what comes last leaves together: a write costs the most
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    body = b""
        except Exception as error:  # the status has been sent: what is left is an event that says so
            logger.exception("%s failed", self._generation.request_id)
            body += to_event(as_api_error(error).body())
        await send({"type": "http.response.body", "body": body + DONE, "more_body": False})


def to_event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


ENCODER = json.JSONEncoder(separators=(",", ":"))  # `json.dumps` would make one for each chunk


def encode(value: Any) -> bytes:
    return ENCODER.encode(value).encode("ascii")
