"""Represent an HTTP request as an argument of a remote call, and its answer as parts that a generator yields.

`run` calls an ASGI application in the replica, so the replica has the same routes as the server without Ray.

A message between two processes of Ray costs processor time in both processes: more than a step of a small model. So
there is a minimum time between two parts, and the data that the application sends meanwhile is combined to one part.
The first part is sent immediately.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Scope

Headers = list[tuple[bytes, bytes]]


class Call(NamedTuple):
    """An HTTP request that is sent to a replica. `client`: address and port, if known."""

    method: str
    path: str
    query: bytes
    headers: Headers
    client: tuple[str, int] | None
    body: bytes

    @classmethod
    def of(cls, scope: Scope, path: str, body: bytes) -> "Call":
        """Create a call from a request's ASGI scope and its whole body."""
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        # the body is complete now, and may be smaller than a proxy has announced
        headers = [one for one in headers if one[0] not in (b"content-length", b"transfer-encoding")]
        headers.append((b"content-length", str(len(body)).encode()))
        client = scope.get("client")
        return cls(scope["method"], path, scope["query_string"], headers, client and (client[0], client[1]), body)

    def scope(self) -> Scope:
        """Return the ASGI scope of the request."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
            "state": {},
        }


class Part(NamedTuple):
    """A part of an answer. The first part has the `status` and the `headers`; in other parts they are 0 and empty."""

    status: int
    headers: Headers
    body: bytes
    is_last: bool


async def run(app: ASGIApp, call: Call, interval_s: Callable[[], float]) -> AsyncGenerator[Part, None]:
    """Yield the answer of `app` in parts, at least `interval_s()` seconds apart.

    If the generator is closed or cancelled, the application sees that the client has disconnected.
    """
    outbox = Outbox(call.body)
    working = asyncio.ensure_future(app(call.scope(), outbox.receive, outbox.send))
    working.add_done_callback(lambda _: outbox.news.set())
    loop = asyncio.get_running_loop()
    next_part = 0.0
    try:
        while not working.done() or outbox.messages:
            await outbox.news.wait()
            if not working.done() and loop.time() < next_part:
                await asyncio.wait((working,), timeout=next_part - loop.time())
            outbox.news.clear()
            messages, outbox.messages = outbox.messages, []
            if messages:
                next_part = loop.time() + interval_s()
                yield merge(messages)
        working.result()
    finally:
        outbox.has_left.set()
        working.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


def merge(messages: list[Message]) -> Part:
    """Combine ASGI messages of an answer to one part."""
    status, headers, body, is_last = 0, [], b"", False
    for message in messages:
        if message["type"] == "http.response.start":
            status, headers = message["status"], [(bytes(name), bytes(value)) for name, value in message["headers"]]
        else:
            body += message.get("body", b"")
            is_last = not message.get("more_body", False)
    return Part(status, headers, body, is_last)


class Outbox:
    """The `receive` and `send` of an ASGI application. A slow client does not make `send` wait."""

    def __init__(self, body: bytes) -> None:
        self.messages: list[Message] = []
        self.news = asyncio.Event()
        self.has_left = asyncio.Event()
        self._body: bytes | None = body

    async def send(self, message: Message) -> None:
        """Store a message of the answer."""
        self.messages.append(message)
        self.news.set()

    async def receive(self) -> Message:
        """Return the request's body, then wait until the client has disconnected."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.has_left.wait()
        return {"type": "http.disconnect"}
