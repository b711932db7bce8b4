"""Run long work in a few threads, so that the event loop stays responsive. Stop it if the client leaves.

The work for a body of more than `LONG_BODY` bytes runs in a thread; for shorter bodies it runs directly in the event
loop. The threads share Python's global interpreter lock with the event loop and the engine. So the work is either
limited first (`bounds.py`), or done by a library without the lock: the tokenizer, the grammar compiler, NumPy.

Callers take turns, so a caller with much waiting work delays each turn of another caller by only one piece of work.

    waiting   A: a1 a2 a3 a4    B: b1        started in the order a1 b1 a2 a3 a4
"""

import asyncio
import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive

from nanovllm_extras.serve.inbox import call_in_loop

T = TypeVar("T")
Check = Callable[[], None]
"""A function to call between two pieces of work. It raises ClientGone if the client no longer waits for the result."""

LONG_BODY = 4096  # bytes
MAX_WAITING = 512  # requests that wait for a thread; a burst of many clients must fit
TRIM_S = 0.1
SHORT_TURN_S = 0.0005
"""The interpreter's switch interval in seconds while a worker thread is busy. A step acquires the interpreter lock
after each of about 30 kernels: with Python's default of 5 ms, a step of 2 ms took 150 ms next to a busy thread."""


class ClientGone(Exception):
    """Raised when the client has closed the connection."""


class Busy(RuntimeError):
    """Raised when `MAX_WAITING` requests are already waiting."""


class Workers:
    """The threads of one server."""

    def __init__(self) -> None:
        num_threads = max(1, (os.cpu_count() or 1) // 4)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="nanovllm-serve")
        self._turns = Turns(num_threads)
        self._is_trim_due = False
        self._num_working = 0
        self._usual_turn_s = sys.getswitchinterval()

    def trim_soon(self) -> None:
        """Return free memory to the system soon, once for all calls until then. glibc keeps memory of large texts."""
        if not self._is_trim_due:
            self._is_trim_due = True
            asyncio.get_running_loop().call_later(TRIM_S, self._pool.submit, self._trim)

    async def run(self, request: Request, function: Callable[[Check], T], is_long: bool | None = None) -> T:
        """Return `function(check)`, computed in a thread if it is long. Raises Busy, ClientGone.

        is_long: by default, whether the body is long.
        """
        if request.state.num_bytes <= LONG_BODY if is_long is None else not is_long:
            return function(lambda: None)
        return await unless_client_leaves(request.receive, self._in_thread(request.state.caller, function))

    async def run_long(self, request: Request, function: Callable[[], T]) -> T:
        """Return `function()`, computed in a thread. Raises Busy, ClientGone."""
        return await self.run(request, lambda check: function(), is_long=True)

    async def write(self, caller: str, function: Callable[[Check], T]) -> T:
        """Return `function(check)`, computed in a thread, to write an answer. It is never refused for too much work."""
        return await self._in_thread(caller, function, is_bounded=False)

    def _end(self) -> None:
        self._count_working(-1)
        self._turns.end()

    def _count_working(self, difference: int) -> None:
        """Count busy threads, and shorten the interpreter's switch interval while there is one.

        A short interval all the time would reduce throughput.
        """
        self._num_working += difference
        sys.setswitchinterval(SHORT_TURN_S if self._num_working else self._usual_turn_s)

    def _trim(self) -> None:
        self._is_trim_due = False
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)

    async def _in_thread(self, caller: str, function: Callable[[Check], T], is_bounded: bool = True) -> T:
        has_left, loop = threading.Event(), asyncio.get_running_loop()

        def check() -> None:
            if has_left.is_set():
                raise ClientGone

        await self._turns.take(caller, is_bounded)
        self._count_working(1)
        working = self._pool.submit(function, check)
        # the turn ends when the thread has finished, which may be some time after the client has left
        working.add_done_callback(lambda _: call_in_loop(loop, self._end))
        try:
            return await asyncio.wrap_future(working)
        finally:
            has_left.set()


class Turns:
    """Limits the work to `num_places` pieces at a time, which callers start in rotation. Use it from one event loop."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, the next one first; no empty deques
        self._bounded: set[asyncio.Future[None]] = set()  # the waiting turns that count for MAX_WAITING

    async def take(self, caller: str, is_bounded: bool = True) -> None:
        """Wait for a turn; call `end` to end it.

        If too many turns are waiting, one of the busiest caller is refused: the newest `take` of that caller raises
        Busy. If no other caller has more waiting turns, this call raises Busy. Turns that are not bounded are not
        counted and never refused.
        """
        if self._num_free:
            self._num_free -= 1
            return
        if is_bounded and len(self._bounded) >= MAX_WAITING:
            self._make_room(caller)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turns = self._waiting.setdefault(caller, deque())
        turns.append(turn)
        if is_bounded:
            self._bounded.add(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in turns:
                self._remove(caller, turn)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:  # its turn had just begun
                self.end()
            raise

    def end(self) -> None:
        """End a turn, and give it to the next caller."""
        while self._waiting:
            caller = next(iter(self._waiting))
            turns = self._waiting[caller]
            turn = turns[0]
            self._remove(caller, turn)
            if turns:
                self._waiting[caller] = self._waiting.pop(caller)  # to the end of the rotation
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def _make_room(self, caller: str) -> None:
        bounded = {one: [turn for turn in turns if turn in self._bounded] for one, turns in self._waiting.items()}
        busiest = max(bounded, key=lambda one: len(bounded[one]))
        busy = Busy(f"{MAX_WAITING} long requests are already waiting to be read; try again later")
        if len(bounded[busiest]) <= len(bounded.get(caller, ())) + 1:
            raise busy
        newest = bounded[busiest][-1]
        self._remove(busiest, newest)
        if not newest.done():
            newest.set_exception(busy)

    def _remove(self, caller: str, turn: "asyncio.Future[None]") -> None:
        self._waiting[caller].remove(turn)
        self._bounded.discard(turn)
        if not self._waiting[caller]:
            del self._waiting[caller]


async def unless_client_leaves(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientGone."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_for_leave(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working


async def wait_for_leave(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
