"""The recording of a server that runs, for browsers that watch: where do lines wait until each has read them?

A `Sink` of the recorder. The engine's thread appends lines, readers in event loops follow. Lines are kept in segments,
each of which begins with a header, so that who comes late can begin there. A reader who is slow skips to the newest
segment, so what is kept does not grow.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from nanovllm.serve.bell import call_in_loop

MAX_LINES = 2000
HEARTBEAT_S = 15.0


@dataclass
class Segment:
    """Lines from a header on; `next` is set when no more come."""

    lines: list[str] = field(default_factory=list)
    next: "Segment | None" = None


class LiveLines:
    """`max_lines`: so many lines are in a segment before the next begins."""

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        self._max_lines = max_lines
        self._newest = Segment()
        self._lock = threading.Lock()
        self._readers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._is_closed = False

    # ---- in the engine's thread

    @property
    def is_full(self) -> bool:
        return len(self._newest.lines) > self._max_lines

    def begin(self, line: str) -> None:
        before, self._newest = self._newest, Segment([line])
        before.next = self._newest
        self._wake()

    def write(self, line: str) -> None:
        self._newest.lines.append(line)
        self._wake()

    def close(self) -> None:
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            readers = list(self._readers.items())
        for event, loop in readers:
            call_in_loop(loop, event.set)

    # ---- in the event loop of a reader

    async def follow(self) -> AsyncGenerator[list[str], None]:
        """Lines as they come, a header first; [] when none has come for a while. Ends when the engine does.

        A header in the middle repeats the state that the lines before have led to; for who has skipped some, it is new.
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
