"""One HTTP request as an argument of a call, and its answer as parts that a generator yields.

`run` calls an ASGI application in the replica, so that the routes there are those of the server without Ray.

A message between two processes of Ray costs processor time in both, more than a step of a small model takes. So parts
are some time apart, and what the application sends meanwhile is one part. The first leaves at once.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Scope

Headers = list[tuple[bytes, bytes]]


class Call(NamedTuple):
    """What a replica needs of a request. `client`: address and port, if known."""

    method: str
    path: str
    query: bytes
    headers: Headers
    client: tuple[str, int] | None
    body: bytes

    @classmethod
    def of(cls, scope: Scope, path: str, body: bytes) -> "Call":
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        # the body is whole by now, and may be smaller than a proxy has promised
        headers = [one for one in headers if one[0] not in (b"content-length", b"transfer-encoding")]
        headers.append((b"content-length", str(len(body)).encode()))
        client = scope.get("client")
        return cls(scope["method"], path, scope["query_string"], headers, client and (client[0], client[1]), body)

    def scope(self) -> Scope:
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
    """Of an answer. `status` and `headers` are in the first part, and 0 and empty in the others."""

    status: int
    headers: Headers
    body: bytes
    is_last: bool


async def run(app: ASGIApp, call: Call, interval_s: Callable[[], float]) -> AsyncGenerator[Part, None]:
    """The answer of `app`; `interval_s()` seconds or more lie between two parts.

    When the generator is closed or cancelled, the application sees that the client has left.
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
    status, headers, body, is_last = 0, [], b"", False
    for message in messages:
        if message["type"] == "http.response.start":
            status, headers = message["status"], [(bytes(name), bytes(value)) for name, value in message["headers"]]
        else:
            body += message.get("body", b"")
            is_last = not message.get("more_body", False)
    return Part(status, headers, body, is_last)


class Outbox:
    """The two ends of a connection, as the application sees them. A slow client does not make `send` wait."""

    def __init__(self, body: bytes) -> None:
        self.messages: list[Message] = []
        self.news = asyncio.Event()
        self.has_left = asyncio.Event()
        self._body: bytes | None = body

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        self.news.set()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.has_left.wait()
        return {"type": "http.disconnect"}
