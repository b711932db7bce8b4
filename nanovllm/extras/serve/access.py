"""Decides from its headers and its size whether a request is let in, before any route sees it.

Middleware wraps the application: `app(scope, receive, send)` with the same signature (https://asgi.readthedocs.io).
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

from nanovllm.extras.serve.errors import APIError
from nanovllm.extras.serve.state import Server

OPEN_PATHS = ("/health", "/ping", "/version", "/metrics", "/ui")  # need no key: read by monitors; `/ui` holds no data
MAX_ADDRESSES = 10_000
MAX_HEADER_BYTES = 64 * 2**10
LINGER_S = 5  # a client that is refused may go on sending for this long


class AccessControl:
    """Answers 400, 401, 413, 429 or 431 itself, or passes a request on."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        options = server.options
        self._app = app
        self._server = server
        self._max_bytes = options.max_request_bytes
        self._root_path = options.root_path
        self._keys = [key.encode() for key in options.api_keys]
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
                is_loading = self._server.is_loading  # what is refused for it costs nobody's rate
                if self._rate is not None and scope["method"] == "POST" and not is_loading:
                    self._rate.check(caller)
        except APIError as error:
            await error.response()(scope, receive, lingering(receive, send))
            return
        await self._app(scope, limited(receive, self._max_bytes), lingering(receive, send))

    def _authenticate(self, headers: Headers) -> str | None:
        """The caller's key, or None if the server has none. Each key takes the same time to compare."""
        if not self._keys:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(key, given.strip().encode()) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
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


def network_of(address: str) -> str:
    """The caller of an address: the address itself; for IPv6 its /64, because one client usually owns all of it."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a proxy may name its client by another word
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:  # IPv4, on a socket that listens to both
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))


def limited(receive: Receive, max_bytes: int) -> Receive:
    """`receive`, which raises APIError 413 when a body without a Content-Length grows beyond `max_bytes`."""
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
    """`send`, which reads the rest of the request before it ends an answer that closes the connection.

    To close a connection on which bytes arrive resets it, and the client may lose the answer.
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
    while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
        pass


def too_large(max_bytes: int) -> APIError:
    # the rest of the body is not read, so the connection cannot be used again
    return APIError(413, f"the request's body is larger than {max_bytes} bytes", headers={"Connection": "close"})


class RateLimit:
    """At most `max_per_minute` requests of each caller in any 60 seconds.

    By hand, because the memory storage of `limits` 5.8 never forgets a caller, and starts a thread at a request.
    """

    def __init__(self, max_per_minute: int) -> None:
        self._most = max_per_minute
        self._next_clean_up = 0.0
        self._times: dict[str, deque[float]] = {}  # by caller: when its requests of the last minute came

    def check(self, caller: str) -> None:
        """Count a request; raises APIError 429, which says how long to wait, if it is one too many."""
        now = time.monotonic()
        if len(self._times) > MAX_ADDRESSES and now >= self._next_clean_up:
            self._times = {caller: times for caller, times in self._times.items() if times[-1] > now - 60}
            self._next_clean_up = now + 1
        times = self._times.setdefault(caller, deque())
        while times and times[0] <= now - 60:
            times.popleft()
        if len(times) >= self._most:
            wait = math.ceil(times[0] + 60 - now)
            message = f"at most {self._most} requests a minute are allowed; wait {wait} s"
            raise APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(wait)})
        times.append(now)
