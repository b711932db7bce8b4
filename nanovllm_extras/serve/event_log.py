"""Keep the events of a response that is generated in the background, so that clients can read them at any time."""

import asyncio
from collections.abc import AsyncIterator

END = b"\n\n"
"""The end of an event. JSON contains no line feeds."""


class EventLog:
    """The encoded events of one response, numbered from 0. Use it in one event loop."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._is_complete = False
        self._has_news = asyncio.Event()

    def add(self, events: bytes) -> None:
        """Append events."""
        self._events += [event + END for event in events.split(END)[:-1]]
        self.num_bytes += len(events)
        self._wake()

    def end(self) -> None:
        """Note that there are no more events."""
        self._is_complete = True
        self._wake()

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """Yield the events from number `start` on, and wait for later ones."""
        while True:
            has_news = self._has_news
            if start < len(self._events):
                events = b"".join(self._events[start:])
                start = len(self._events)
                yield events
            elif self._is_complete:
                return
            else:
                await has_news.wait()

    def _wake(self) -> None:
        self._has_news.set()
        self._has_news = asyncio.Event()
