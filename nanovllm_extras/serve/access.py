"""Check the headers and the size of each request before a route gets it: the API key, the rate, the number of bytes.

This is middleware. It wraps the application and has the same signature, `app(scope, receive, send)`
(https://asgi.readthedocs.io).
"""

import asyncio
import hmac
import ipaddress
import math
import time
from collections import deque
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm_extras.serve.errors import APIError
from nanovllm_extras.serve.pace import Pace
from nanovllm_extras.serve.state import Server

OPEN_PATHS = (
    "/health",
    "/ping",
    "/version",
    "/load",
    "/metrics",
    "/ui",
)  # no key: monitors read them; `/ui` contains no data
MAX_ADDRESSES = 10_000
MAX_HEADER_BYTES = 64 * 2**10
LINGER_S = 5  # after a refusal, the server reads what the client still sends for this long


class AccessControl:
    """Answers a request with 400, 401, 413, 429 or 431, or passes it on to the application."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        options = server.options
        self._app = app
        self._server = server
        self._max_bytes = options.max_request_bytes
        self._root_path = options.root_path
        self._keys = [key.encode() for key in options.api_keys]
        self._pace = Pace()  # of requests that are read, checked and encoded in the event loop
        self._rate = RateLimit(options.max_requests_per_minute) if options.max_requests_per_minute else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._check_size(headers)
            if scope["path"].removeprefix(self._root_path) not in OPEN_PATHS:
                caller = self._authenticate(headers) or network_of(str((scope.get("client") or ("", 0))[0]))
                scope.setdefault("state", {})["caller"] = caller
                is_loading = self._server.is_loading  # requests refused during loading do not count
                if self._rate is not None and scope["method"] == "POST" and not is_loading:
                    self._rate.check(caller)
                if scope["method"] == "POST":
                    await self._pace.take()
        except APIError as error:
            await error.response(scope)(scope, receive, lingering(receive, send))
            return
        await self._app(scope, limited(receive, self._max_bytes), lingering(receive, send))

    def _authenticate(self, headers: Headers) -> str | None:
        """Return the name of the caller's key, None if the server has no keys. Keys are compared in constant time.

        The key is that of `Authorization`, or of `x-api-key`, as Anthropic's clients send it. A request may have both.
        """
        if not self._keys:
            return None
        compared = [[hmac.compare_digest(key, given) for key in self._keys] for given in sent_keys(headers)]
        matches = [any(of_key) for of_key in zip(*compared, strict=True)]
        if not any(matches):
            raise APIError(
                401, "the API key is missing or wrong", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        return f"key {matches.index(True)}"

    def _check_size(self, headers: Headers) -> None:
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
            raise APIError(431, f"the request's headers are larger than {MAX_HEADER_BYTES} bytes")
        length = headers.get("content-length")
        if length is not None and "transfer-encoding" in headers:  # RFC 9112, 6.1: may be an attack
            raise APIError(
                400, "Content-Length and Transfer-Encoding exclude each other", headers={"Connection": "close"}
            )
        if length is not None and int(length) > self._max_bytes:
            raise too_large(self._max_bytes)


def sent_keys(headers: Headers) -> list[bytes]:
    """Return the keys of a request, at least one, which may be empty.

    They are bytes: Starlette would decode a key as Latin-1, but it is UTF-8.
    """
    sent = dict(reversed(headers.raw))  # the first header of each name
    scheme, _, given = sent.get(b"authorization", b"").partition(b" ")
    keys = [given.strip()] if scheme.lower() == b"bearer" else []
    if b"x-api-key" in sent:
        keys.append(sent[b"x-api-key"].strip())
    return keys or [b""]


def network_of(address: str) -> str:
    """Return the network that identifies a caller: its address, or for IPv6 its /64, which one client usually owns."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a proxy may send something other than an address
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:  # an IPv4 client of a socket that also accepts IPv6
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))


def limited(receive: Receive, max_bytes: int) -> Receive:
    """Return a `receive` that raises APIError 413 if the body grows beyond `max_bytes`.

    It limits bodies without a Content-Length.
    """
    num_bytes = 0

    async def receive_some() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        return message

    return receive_some


def lingering(receive: Receive, send: Send) -> Send:
    """Return a `send` that reads the rest of the request before it ends an answer that closes the connection.

    If the connection were closed while bytes arrive, it would be reset, and the client could lose the answer.
    """
    closes = False

    async def send_some(message: Message) -> None:
        nonlocal closes
        if message["type"] == "http.response.start":
            closes = (b"connection", b"close") in message["headers"]
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not (closes and is_last):
            await send(message)
            return
        await send({**message, "more_body": True})
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(read_to_end(receive), LINGER_S)
        await send({"type": "http.response.body", "body": b""})

    return send_some


async def read_to_end(receive: Receive) -> None:
    """Read the rest of a request and discard it."""
    while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
        pass


def too_large(max_bytes: int) -> APIError:
    """Return the error for a body that has more than `max_bytes`."""
    # the rest of the body is not read, so the connection cannot be used again
    return APIError(413, f"the request's body is larger than {max_bytes} bytes", headers={"Connection": "close"})


class RateLimit:
    """Allows each caller at most `max_per_minute` requests in any period of 60 seconds.

    The package `limits` (5.8) is not used: its storage in memory never forgets a caller, and starts a thread.
    """

    def __init__(self, max_per_minute: int) -> None:
        self._most = max_per_minute
        self._next_clean_up = 0.0
        self._times: dict[str, deque[float]] = {}  # caller -> arrival times of its requests in the last minute

    def check(self, caller: str) -> None:
        """Count a request. Raises APIError 429, with the time to wait, if the caller has reached the limit."""
        now = time.monotonic()
        if len(self._times) > MAX_ADDRESSES and now >= self._next_clean_up:
            self._times = {caller: times for caller, times in self._times.items() if times[-1] > now - 60}
            self._next_clean_up = now + 1
        times = self._times.setdefault(caller, deque())
        while times and times[0] <= now - 60:
            times.popleft()
        if len(times) >= self._most:
            wait = math.ceil(times[0] + 60 - now)
            message = f"at most {self._most} requests per minute are allowed; wait {wait} s"
            raise APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(wait)})
        times.append(now)
