"""Read a request's body and parse its JSON. Its values are counted before it is parsed, to limit memory and time.

    AccessControl (bytes) → JSONRequest (bytes of all requests, values) → the route's pydantic model → bounds.py

`count_values` counts the values from the bytes, without parsing. A value is small in JSON but large in Python (`{}`
takes 2 bytes in JSON and 64 in Python), so the number of values is limited in addition to the number of bytes.
"""

import asyncio
import codecs
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.types import Receive, Scope

from nanovllm_extras.options.surrogates import text_with_surrogate
from nanovllm_extras.serve.bounds import COSTS, count_values
from nanovllm_extras.serve.engine_thread import EngineDeadError
from nanovllm_extras.serve.errors import APIError, answer, as_api_error
from nanovllm_extras.serve.state import RETRY_LATER, Server
from nanovllm_extras.serve.workers import Busy, ClientGone

ENCODINGS = ("ascii", "utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
CHARSET = re.compile(r"charset\s*=\s*[\"']?([^\"';\s]*)", re.IGNORECASE)
MAX_COST = max(COSTS.values())  # values that a byte may count as
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
        model = None if self.body_field is None else self.body_field.field_info.annotation

        async def read_and_handle(request: Request) -> Response:
            read = JSONRequest(request.scope, request.receive, request.app.state.server, model)
            try:
                return await handle(read)
            except Exception as error:  # otherwise Starlette answers outside the middleware, and raises it again
                return await answer(request, error)
            finally:
                read.forget()

        return read_and_handle


class JSONRequest(Request):
    """A request whose body FastAPI reads. Raises APIError if the body is not JSON or exceeds a limit.

    model: the pydantic model of the body; None if only `body` is called.
    """

    def __init__(self, scope: Scope, receive: Receive, server: Server, model: object = None) -> None:
        super().__init__(scope, receive)
        self._server = server
        self._model = model
        self._bytes = b""
        self._num_counted = 0
        self.state.num_bytes = 0  # read by `Workers.run`

    async def body(self) -> bytes:
        """Read the body for `json`. Return only its first byte, because FastAPI keeps the result until the answer."""
        with told():
            self._server.check_ready()
        self._check_headers()
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
        """Return the JSON value of the body. A long body is parsed in a thread, in the same way as a short one.

        The names of fields that have no effect are logged.
        """
        body, self._bytes = self._bytes, b""
        most = self._server.bounds.max_values
        try:
            if len(body) <= SHORT_BODY:
                value = parse(body, most)
            else:
                with told():
                    value = await self._server.workers.run(self, lambda check: parse(body, most))
        finally:
            self._stop_counting()
        if isinstance(self._model, type) and issubclass(self._model, BaseModel):
            self._server.ignored_fields.note(self.url.path, self._model, value)
        return value

    def forget(self) -> None:
        """Release the memory of the body. Called when the request has been answered, or its answer has begun."""
        self._stop_counting()
        if self.state.num_bytes >= LARGE_BODY:
            self._server.workers.trim_soon()

    def _check_headers(self) -> None:
        """Raise APIError 415 if the body is compressed, 400 if its declared encoding is not one of JSON."""
        coding = ", ".join(self.headers.getlist("content-encoding")).strip()
        if coding.lower() not in ("", "identity"):
            message = f"the body must not be compressed, got Content-Encoding: {coding}"
            # the body is not read, so the connection cannot be used again
            raise APIError(415, message, headers={"Accept-Encoding": "identity", "Connection": "close"})
        declared = CHARSET.search(self.headers.get("content-type", ""))
        if declared is not None and not is_encoding_of_json(declared[1]):
            message = f"the body must be JSON in UTF-8, UTF-16 or UTF-32, got charset={declared[1]} in Content-Type"
            raise APIError(400, message, headers={"Connection": "close"})

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


def is_encoding_of_json(name: str) -> bool:
    """Return whether `name` is a name of UTF-8, UTF-16, UTF-32, or of ASCII, which is a part of UTF-8."""
    try:
        return codecs.lookup(name).name.replace("_", "-") in ENCODINGS
    except (LookupError, ValueError):
        return False


def parse(body: bytes, max_values: int) -> object:
    """Return the JSON value of `body`. Raises APIError 400 if it is not JSON, or has more than `max_values` values.

    This uses pydantic's parser: the module `json` takes four times the memory for a text with one emoji. pydantic's
    parser refuses lone surrogates.
    """
    body = to_utf8(body)
    if len(body) * MAX_COST > max_values and count_values(body, max_values) > max_values:
        message = f"the body has more than {max_values} numbers, texts, lists and objects (--max-request-values)"
        raise APIError(400, message)
    try:
        return from_json(body)
    except ValueError as error:
        if "surrogate" in str(error) or "hex escape" in str(error):
            refuse_surrogates(body)
        raise APIError(400, f"the body is not valid JSON: {error}") from error


def to_utf8(body: bytes) -> bytes:
    """Return JSON in UTF-8 without a byte order mark. The first bytes show the encoding (RFC 4627, section 3).

    Raises APIError 400 if the bytes are not text in UTF-8, UTF-16 or UTF-32.
    """
    encoding = json.detect_encoding(body)
    try:
        text = body.decode(encoding)  # this also finds surrogates that are encoded as if they were characters
    except UnicodeDecodeError as error:
        name = encoding.upper().removesuffix("-SIG")
        message = f"the body is not {name}: {error.reason} (byte 0x{body[error.start]:02x} at {error.start})"
        if name == "UTF-8":
            message += "; it may be Latin-1 or another encoding, but JSON must be in UTF-8, UTF-16 or UTF-32"
        raise APIError(400, message) from error
    return body if encoding == "utf-8" else text.encode()


def refuse_surrogates(body: bytes) -> None:
    """Raise APIError 400 with the field whose text has a lone surrogate. Does nothing if no field has one."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):  # something else is wrong, too
        return
    fields = value.items() if isinstance(value, dict) else ()
    for name, one in fields:
        if text_with_surrogate([name, one]) is not None:
            field = name if text_with_surrogate(name) is None else None
            told = field or "the body"
            raise APIError(400, f"{told}: a text has half of a surrogate pair, which UTF-8 cannot encode", field)
