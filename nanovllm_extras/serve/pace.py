"""`Pace`: begin waiting work in small slices, one in each turn of the event loop, so that a burst holds nobody up.

An event loop calls everything that is ready before it looks at its sockets again. If a thousand requests arrive, or a
step finishes hundreds, each with a millisecond of work, then `/health` would wait for a second in each of its turns.

    turn of the loop     r1    sockets    r2 r3    sockets    r4 r5 r6 r7    sockets    r8 r9    …
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

TURN_S = 0.005  # of processor time; if a turn takes longer, the next slice is smaller


class Pace:
    """Work that waits in event loops, in the order of its arrival. Each loop has a queue of its own."""

    def __init__(self) -> None:
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, Queue] = WeakKeyDictionary()

    def begin_soon(self, begin: Callable[[], None]) -> None:
        """Have `begin` called in one of the next turns. What it makes ready counts for the length of the turn."""
        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        if queue is None:
            queue = self._queues[loop] = Queue()
        queue.append(begin, loop)

    async def take(self) -> None:
        """Wait for a turn."""
        turn = asyncio.get_running_loop().create_future()
        self.begin_soon(lambda: None if turn.done() else turn.set_result(None))
        await turn


class Queue:
    """The work that waits in one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._size = 1  # of the next slice
        self._turn_began = 0.0

    def append(self, begin: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            self._turn_began = time.thread_time()
            loop.call_soon(self._begin_slice)
        self._waiting.append(begin)

    def _begin_slice(self) -> None:
        waiting = self._waiting
        now = time.thread_time()  # not `loop.time()`: a wait for the engine, for Python's lock, is no work
        self._size = max(1, self._size // 2) if now - self._turn_began > TURN_S else 2 * self._size
        self._size = min(self._size, len(waiting))
        for _ in range(self._size):
            waiting[0]()
            waiting.popleft()  # not before: `append` would schedule another slice
        if waiting:
            self._turn_began = now
            asyncio.get_running_loop().call_soon(self._begin_slice)
