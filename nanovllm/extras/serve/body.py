"""Read a request's body and parse its JSON. Its values are counted before it is parsed, to limit memory and time.

    AccessControl (bytes) → JSONRequest (bytes of all requests, values) → the route's pydantic model → bounds.py

`count_values` counts the values from the bytes, without parsing. A value is small in JSON but large in Python (`{}`
takes 2 bytes in JSON and 64 in Python), so the number of values is limited in addition to the number of bytes.
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

MAX_BODIES = 8  # large bodies being read may have together this many times `max_request_bytes`
SHORT_BODY = 1 << 17  # bytes; bodies up to this size are parsed in the event loop
LARGE_BODY = 1 << 20  # bytes; the limits below apply to larger bodies, and their memory is returned to the system
MAX_BODIES_OF_CALLER = 4  # as MAX_BODIES, for one caller
MIN_PACE = 1 << 16  # bytes per second, of a large body
STALL_S = 5.0  # seconds by which a large body may fall behind MIN_PACE


class JSONRoute(APIRoute):
    """A route whose request has a JSON body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_and_handle(request: Request) -> Response:
            read = JSONRequest(request.scope, request.receive, request.app.state.server)
            try:
                return await handle(read)
            except Exception as error:  # otherwise Starlette answers outside the middleware, and raises it again
                return await answer(request, error)
            finally:
                read.forget()

        return read_and_handle


class JSONRequest(Request):
    """A request whose body FastAPI reads. Raises APIError if the body is not JSON or exceeds a limit."""

    def __init__(self, scope: Any, receive: Any, server: Server) -> None:
        super().__init__(scope, receive)
        self._server = server
        self._bytes = b""
        self._num_counted = 0
        self.state.num_bytes = 0  # read by `Workers.run`

    async def body(self) -> bytes:
        """Read the body for `json`. Return only its first byte, because FastAPI keeps the result until the answer."""
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
        """Return the JSON value of the body. A long body is parsed in a thread."""
        body, self._bytes = self._bytes, b""
        most = self._server.bounds.max_values
        try:
            if len(body) <= min(most, SHORT_BODY):  # at most `most` values: each takes at least one byte
                return json.loads(body)
            with told():
                return await self._server.workers.run(self, lambda check: parse_long(body, most))
        finally:
            self._stop_counting()

    def forget(self) -> None:
        """Release the memory of the body. Called when the request has been answered, or its answer has begun."""
        self._stop_counting()
        if self.state.num_bytes >= LARGE_BODY:
            self._server.workers.trim_soon()

    def _count(self) -> None:
        """Count the bytes read so far. Raises APIError 503 if the large bodies together have too many bytes."""
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
    """Return the next bytes of a body. Raises APIError 408 if they do not arrive within `seconds`."""
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except asyncio.TimeoutError:
        message = f"a body of more than {LARGE_BODY} bytes must arrive at {MIN_PACE} bytes per second or faster"
        # the rest of the body is not read, so the connection cannot be used again
        raise APIError(408, message, code="request_timeout", headers={"Connection": "close"}) from None


@contextmanager
def told() -> Iterator[None]:
    """Convert these exceptions to an APIError. FastAPI answers other exceptions of a body with its own 400."""
    try:
        yield
    except (EngineDeadError, Busy, ClientGone) as error:
        raise as_api_error(error) from error


def parse_long(body: bytes, max_values: int) -> Any:
    """Return the JSON value of `body`. Raises APIError 400 if it is not JSON, or has more than `max_values` values.

    This uses pydantic's parser: the module `json` takes four times the memory for a text with one emoji. pydantic's
    parser refuses the whole body if a text has a lone surrogate; for short bodies `protocol.py` names the field.
    """
    if count_values(body, max_values) > max_values:
        message = f"the body has more than {max_values} numbers, texts, lists and objects (--max-request-values)"
        raise APIError(400, message)
    try:
        return from_json(body)
    except ValueError as error:
        raise APIError(400, f"the body is not valid JSON: {error}") from error
