"""A request's body, from bytes to JSON values: counted first, then parsed, so that no body costs more than it may.

    AccessControl (bytes) → JSONRequest (bytes of all requests, values) → the route's pydantic model → bounds.py

`count_values` looks at the bytes alone. A value is small in bytes and large in Python (`{}` takes 2 and 64), so a body
has a limit for its values beside that for its bytes.
"""

import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from nanovllm.serve.engine_thread import EngineDeadError
from nanovllm.serve.errors import APIError, as_api_error
from nanovllm.serve.state import RETRY_LATER, Server
from nanovllm.serve.workers import Busy, ClientGone

MAX_BODIES = 8  # so many of the largest size are read at the same time; others are refused
BLOCK = 1 << 18  # bytes that are looked at together
OBJECT_COSTS = 8  # times as long as a number to be parsed and checked: it may become a pydantic model
TRIMMED = 1 << 20  # bytes of a body after which free memory goes back to the system

QUOTE, BACKSLASH = b'"', b"\\"


class JSONRoute(APIRoute):
    """A route whose request has a body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_and_handle(request: Request) -> Response:
            read = JSONRequest(request.scope, request.receive, request.app.state.server)
            try:
                return await handle(read)
            finally:
                read.forget()

        return read_and_handle


class JSONRequest(Request):
    """What FastAPI asks for a body. Raises APIError for a body that is not JSON, or too much of it."""

    def __init__(self, scope: Any, receive: Any, server: Server) -> None:
        super().__init__(scope, receive)
        self._server = server
        self._bytes = b""
        self.state.num_bytes = 0  # read by `Workers.run`

    async def body(self) -> bytes:
        with told():
            self._server.check_ready()
        chunks: list[bytes] = []
        async for chunk in self.stream():
            self.state.num_bytes += len(chunk)
            self._server.num_body_bytes += len(chunk)
            if self._server.num_body_bytes > MAX_BODIES * self._server.options.max_request_bytes:
                raise APIError(
                    503, "too many large requests are being read; try again later", code="busy", headers=RETRY_LATER
                )
            chunks.append(chunk)
        self._bytes = b"".join(chunks)
        return self._bytes

    async def json(self) -> Any:
        body, self._bytes = self._bytes, b""
        most = self._server.bounds.max_values
        if len(body) <= most:  # too short for more values, but for small objects
            return json.loads(body)
        with told():
            return await self._server.workers.run(self, lambda check: parse_long(body, most))

    def forget(self) -> None:
        """The request has been answered, or its answer has begun."""
        self._server.num_body_bytes -= self.state.num_bytes
        if self.state.num_bytes >= TRIMMED:
            self._server.workers.trim_soon()


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


def count_values(body: bytes, enough: int) -> int:
    """Values in a JSON text, at most one too few; it stops where there are more than `enough`.

    An object counts as `OBJECT_COSTS` values. Each value but the outermost stands behind a comma, or is the first of a
    list or object, so commas and opening brackets outside of strings are counted. In a text that is not JSON, the count
    is right up to the first error.
    """
    num_values, is_inside, left = 0, False, b""
    for start in range(0, len(body), BLOCK):
        block = left + body[start : start + BLOCK]
        if BACKSLASH in block:
            num_last = len(block) - len(block.rstrip(BACKSLASH))
            left = BACKSLASH * (num_last % 2)  # it escapes the first byte of the next block
            block = block[: len(block) - len(left)].replace(BACKSLASH * 2, b"").replace(BACKSLASH + QUOTE, b"")
        else:
            left = b""
        codes = np.frombuffer(block, np.uint8)  # [num_bytes], with no quotes but those of strings
        # 1 behind an odd number of quotes; overflow keeps what is odd
        num_quotes = np.cumsum(codes == ord(QUOTE), dtype=np.uint8) + np.uint8(is_inside)
        is_outside = (num_quotes & 1) == 0
        is_object = (codes == ord("{")) & is_outside
        is_other = ((codes == ord(",")) | (codes == ord("["))) & is_outside
        num_values += int(np.count_nonzero(is_other)) + OBJECT_COSTS * int(np.count_nonzero(is_object))
        is_inside = bool(num_quotes[-1] & 1) if len(codes) else is_inside
        if num_values > enough:
            break
    return num_values
