"""An OpenAI-compatible server that says what it was told, when it was told, and notes when it did."""

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import dataclass, field


@dataclass
class Served:
    """One request, as the server saw it; times in seconds of `time.perf_counter()`."""

    path: str
    headers: dict
    body: dict
    received: float
    written: list = field(default_factory=list)
    """When each chunk with a token was."""
    is_gone: bool = False
    """The client has closed the connection before the end."""


@dataclass
class ScriptedServer:
    """`texts` are the tokens of an answer: `ttft` seconds to the first, `gap` between two. Change them at any time."""

    texts: list = field(default_factory=lambda: ["One ", "two ", "three."])
    reasoning: list = field(default_factory=list)
    ttft: float = 0.0
    gap: float = 0.0
    status: int = 200
    usage: dict | None = None
    """Beside the counts of tokens."""
    has_usage: bool = True
    line_end: str = "\n"
    break_after: int | None = None
    """Close the connection after this number of chunks."""
    error_after: int | None = None
    """Send an error after this number of chunks."""
    metrics: str = ""
    served: list = field(default_factory=list)
    peak: int = 0
    """Most answers under way at a time."""
    url: str = ""
    _now: int = 0

    async def serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                method, path, _ = lines[0].split()
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self.respond(method, path, headers, body, writer)
        writer.close()

    async def respond(self, method, path, headers, body, writer):
        served = Served(path, headers, json.loads(body) if body else {}, time.perf_counter())
        self.served.append(served)
        if method == "GET":
            content = {"/v1/models": json.dumps({"data": [{"id": "scripted"}]}), "/metrics": self.metrics}.get(path)
            self.send(writer, 200 if content is not None else 404, (content or "{}").encode())
        elif self.status != 200:
            self.send(writer, self.status, json.dumps({"error": {"message": "as it was told"}}).encode())
        else:
            self._now += 1
            self.peak = max(self.peak, self._now)
            try:
                await self.stream(served, writer)
            except ConnectionError:
                served.is_gone = True
                raise
            finally:
                self._now -= 1
        await writer.drain()

    def send(self, writer, status, content):
        writer.write(b"HTTP/1.1 %d Told\r\nContent-Length: %d\r\n\r\n%s" % (status, len(content), content))

    async def stream(self, served, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        is_chat = served.path.endswith("chat/completions")
        if is_chat:
            await self.event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(self.ttft)
        tokens = [("reasoning", text) for text in self.reasoning] + [("content", text) for text in self.texts]
        for i, (kind, text) in enumerate(tokens):
            if i:
                await asyncio.sleep(self.gap)
            if i == self.break_after:
                writer.close()
                raise asyncio.IncompleteReadError(b"", 1)
            if i == self.error_after:
                await self.event(writer, {"error": {"message": "no more"}})
            choice = {"index": 0, "delta": {kind: text}} if is_chat else {"index": 0, "text": text}
            served.written.append(time.perf_counter())
            await self.event(writer, {"choices": [{**choice, "finish_reason": None}]})
        end = {"index": 0, "delta": {}} if is_chat else {"index": 0, "text": ""}
        await self.event(writer, {"choices": [{**end, "finish_reason": "stop"}]})
        if self.has_usage:
            counts = {"prompt_tokens": 7, "completion_tokens": len(tokens), **(self.usage or {})}
            await self.event(writer, {"choices": [], "usage": counts})
        await self.event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    async def event(self, writer, data):
        text = data if isinstance(data, str) else json.dumps(data)
        content = f"data: {text}{self.line_end}{self.line_end}".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(content), content))
        await writer.drain()


@contextlib.contextmanager
def running(server):
    """In a thread of its own, on a free port."""
    loop = asyncio.new_event_loop()

    async def start():
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
