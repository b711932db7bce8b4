"""Serve the page of `nanovllm serve --ui`: it shows the steps of the running server, and has a chat box.

    engine's thread ─Recorder→ LiveLines ─follow→ /ui/events → the page, in any number of browsers

The page contains no data, so it needs no key. If the server has keys, the stream of events needs one: the page reads
the stream with `fetch`, which can send the key, and sends chats as any client does.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse, StreamingResponse

from nanovllm_extras.serve.inbox import call_in_loop
from nanovllm_extras.serve.state import ReadyServer
from nanovllm_extras.trace.page import make_page

MAX_LINES = 2000
HEARTBEAT_S = 15.0
HEARTBEAT = b": still here\n\n"


@dataclass
class Segment:
    """A header of the recording, and the lines after it. `next` is set when the segment is complete."""

    lines: list[str] = field(default_factory=list)
    next: "Segment | None" = None


class LiveLines:
    """A `Sink` of the recorder that keeps the newest lines of the recording for the browsers.

    Lines are kept in segments of about `max_lines`. Each segment begins with a header, so a new reader begins at the
    newest segment. A slow reader skips to it too, so that old segments can be freed and the memory is bounded.
    """

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        self._max_lines = max_lines
        self._newest = Segment()
        self._lock = threading.Lock()
        self._readers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._is_closed = False

    # ---- in the engine's thread

    @property
    def is_full(self) -> bool:
        """Whether the recorder should begin a new segment."""
        return len(self._newest.lines) > self._max_lines

    def begin(self, line: str) -> None:
        """Start a new segment with a header line."""
        before, self._newest = self._newest, Segment([line])
        before.next = self._newest
        self._wake()

    def write(self, line: str) -> None:
        """Append a line to the newest segment."""
        self._newest.lines.append(line)
        self._wake()

    def close(self) -> None:
        """End the streams of all readers."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            readers = list(self._readers.items())
        for event, loop in readers:
            call_in_loop(loop, event.set)

    # ---- in the event loop of a reader

    async def follow(self) -> AsyncGenerator[list[str], None]:
        """Yield lines as they arrive, a header first; yield [] if no line has arrived for a while.

        A later header repeats the state so far. Readers that skipped lines restart from it. The iterator ends when the
        engine ends.
        """
        event = asyncio.Event()
        with self._lock:
            self._readers[event] = asyncio.get_running_loop()
        segment, num_read = self._newest, 0
        try:
            while True:
                event.clear()
                lines = segment.lines[num_read:]
                num_read += len(lines)
                if lines:
                    yield lines
                elif segment.next is not None:
                    segment, num_read = (segment.next if segment.next.next is None else self._newest), 0
                elif self._is_closed:
                    return
                else:
                    try:
                        await asyncio.wait_for(event.wait(), HEARTBEAT_S)
                    except asyncio.TimeoutError:
                        yield []
        finally:
            with self._lock:
                del self._readers[event]


def make_router(live: LiveLines) -> APIRouter:
    """Return the routes of the page. live: the lines that the engine's recorder writes."""
    router = APIRouter(include_in_schema=False)
    page = make_page([], is_live=True)

    @router.get("/ui")
    @router.head("/ui")
    async def show_page() -> Response:
        return HTMLResponse(page)

    @router.get("/ui/events")
    async def follow(server: ReadyServer) -> Response:
        """Stream the lines of the recording as server-sent events, beginning with the newest header."""
        return StreamingResponse(stream(live), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    return router


async def stream(live: LiveLines) -> AsyncIterator[bytes]:
    """Yield the lines as server-sent events, and a comment if no line has arrived for a while."""
    async for lines in live.follow():
        yield b"".join(f"data: {line}\n\n".encode() for line in lines) or HEARTBEAT
