"""A request's body, from bytes to JSON values: counted first, then parsed, so that no body costs more than it may.

    AccessControl (bytes) → JSONRequest (bytes of all requests, values) → the route's pydantic model → bounds.py

`count_values` looks at the bytes alone. A value is small in bytes and large in Python (`{}` takes 2 and 64), so a body
has a limit for its values beside that for its bytes.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from nanovllm.extras.serve.bounds import count_values
from nanovllm.extras.serve.engine_thread import EngineDeadError
from nanovllm.extras.serve.errors import APIError, answer, as_api_error
from nanovllm.extras.serve.state import RETRY_LATER, Server
from nanovllm.extras.serve.workers import Busy, ClientGone

MAX_BODIES = 8  # so many of the largest size are read at the same time; other large ones are refused
SHORT_BODY = 1 << 17  # bytes; parsed in the event loop
LARGE_BODY = 1 << 20  # bytes; larger ones are counted together, and give their free memory back to the system
MAX_BODIES_OF_CALLER = 4
MIN_PACE = 1 << 16  # bytes a second, of a large body
STALL_S = 5.0  # seconds by which a large body may fall behind MIN_PACE


class JSONRoute(APIRoute):
    """A route whose request has a body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_and_handle(request: Request) -> Response:
            read = JSONRequest(request.scope, request.receive, request.app.state.server)
            try:
                return await handle(read)
            except Exception as error:  # outside of the middleware Starlette would answer, and raise it once more
                return await answer(request, error)
            finally:
                read.forget()

        return read_and_handle


class JSONRequest(Request):
    """What FastAPI asks for a body. Raises APIError for a body that is not JSON, or too much of it."""

    def __init__(self, scope: Any, receive: Any, server: Server) -> None:
        super().__init__(scope, receive)
        self._server = server
        self._bytes = b""
        self._num_counted = 0
        self.state.num_bytes = 0  # read by `Workers.run`

    async def body(self) -> bytes:
        """The first byte, if there is one: FastAPI keeps it until the answer. The rest is for `json`."""
        with told():
            self._server.check_ready()
        chunks: list[bytes] = []
        stream, now, give_up = self.stream(), asyncio.get_running_loop().time, None
        while chunk := await in_time(anext(stream, b""), None if give_up is None else give_up - now()):
            self.state.num_bytes += len(chunk)
            if self.state.num_bytes > LARGE_BODY:
                self._count()
                latest = now() + STALL_S
                give_up = latest if give_up is None else min(latest, give_up + len(chunk) / MIN_PACE)
            chunks.append(chunk)
        self._bytes = b"".join(chunks)
        return self._bytes[:1]

    async def json(self) -> Any:
        body, self._bytes = self._bytes, b""
        most = self._server.bounds.max_values
        try:
            if len(body) <= min(most, SHORT_BODY):  # too short for more values, but for small objects
                return json.loads(body)
            with told():
                return await self._server.workers.run(self, lambda check: parse_long(body, most))
        finally:
            self._stop_counting()

    def forget(self) -> None:
        """The request has been answered, or its answer has begun."""
        self._stop_counting()
        if self.state.num_bytes >= LARGE_BODY:
            self._server.workers.trim_soon()

    def _count(self) -> None:
        """All bytes so far. Raises APIError 503 if those of all large bodies are too many."""
        counts, largest = self._server.body_bytes, self._server.options.max_request_bytes
        counts[self.state.caller] += self.state.num_bytes - self._num_counted
        self._num_counted = self.state.num_bytes
        if counts.total() > MAX_BODIES * largest or counts[self.state.caller] > MAX_BODIES_OF_CALLER * largest:
            raise APIError(
                503, "too many large requests are being read; try again later", code="busy", headers=RETRY_LATER
            )

    def _stop_counting(self) -> None:
        if self._num_counted:
            self._server.body_bytes -= Counter({self.state.caller: self._num_counted})  # keeps no zeros
            self._num_counted = 0


async def in_time(awaitable: Awaitable[bytes], seconds: float | None) -> bytes:
    """The next bytes of a body; APIError 408 if they do not come."""
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except asyncio.TimeoutError:
        message = f"a body of more than {LARGE_BODY} bytes must come at {MIN_PACE} bytes a second"
        # the rest of the body is not read, so the connection cannot be used again
        raise APIError(408, message, code="request_timeout", headers={"Connection": "close"}) from None


@contextmanager
def told() -> Iterator[None]:
    """FastAPI answers any other error of a body with its own 400."""
    try:
        yield
    except (EngineDeadError, Busy, ClientGone) as error:
        raise as_api_error(error) from error


def parse_long(body: bytes, max_values: int) -> Any:
    """The JSON value of `body`; APIError 400 if there is none, or if it holds more than `max_values`.

    Not by `json`, which takes four times the memory for a text with one emoji. This parser refuses a body with half of
    a surrogate pair as a whole, where `protocol.py` would name its field.
    """
    if count_values(body, max_values) > max_values:
        message = f"the body holds more than {max_values} numbers, texts, lists and objects (--max-request-values)"
        raise APIError(400, message)
    try:
        return from_json(body)
    except ValueError as error:
        raise APIError(400, f"the body is not valid JSON: {error}") from error
