"""What takes long is done in threads beside the event loop: few at a time, few waiting, none for clients that left.

What a body of more than `LONG_BODY` bytes asks for is done here, and for shorter ones at once, in the event loop. The
threads share Python's lock with the loop and the engine, so what runs here is bounded first (`bounds.py`), or is a
library's work outside of the lock: the tokenizer's, the grammar compiler's, NumPy's.

Callers take turns: one that has much work waiting delays each turn of another by one piece of work.

    waiting   A: a1 a2 a3 a4    B: b1        begun in the order a1 b1 a2 a3 a4
"""

import asyncio
import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from nanovllm.extras.serve.inbox import call_in_loop

T = TypeVar("T")
Check = Callable[[], None]
"""Called between two pieces of work; raises ClientGone when nobody waits for the result any more."""

LONG_BODY = 4096  # bytes
MAX_WAITING = 512  # requests that wait for a thread: many clients may come at once
TRIM_S = 0.1
SHORT_TURN_S = 0.0005
"""While there is work here: how long a thread may compute in Python when another waits to. A step asks for Python's
lock after each of some 30 kernels: beside a thread that computes, Python's own 5 ms made a step of 2 ms take 150."""


class ClientGone(Exception):
    """The client has closed the connection."""


class Busy(RuntimeError):
    """`MAX_WAITING` requests wait already."""


class Workers:
    """One for each server."""

    def __init__(self) -> None:
        num_threads = max(1, (os.cpu_count() or 1) // 4)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="nanovllm-serve")
        self._turns = Turns(num_threads)
        self._is_trim_due = False
        self._num_working = 0
        self._usual_turn_s = sys.getswitchinterval()

    def trim_soon(self) -> None:
        """Give free memory back to the system: glibc keeps what large texts took. Calls meanwhile do it once."""
        if not self._is_trim_due:
            self._is_trim_due = True
            asyncio.get_running_loop().call_later(TRIM_S, self._pool.submit, self._trim)

    async def run(self, request: Request, function: Callable[[Check], T], is_long: bool | None = None) -> T:
        """`function(check)`: in a thread if it is long; by default, if the body is. Raises Busy, ClientGone."""
        if request.state.num_bytes <= LONG_BODY if is_long is None else not is_long:
            return function(lambda: None)
        result: T = await unless_client_leaves(request.receive, self._in_thread(request.state.caller, function))
        return result

    async def run_long(self, request: Request, function: Callable[[], T]) -> T:
        """`function()` in a thread, as `run` does."""
        return await self.run(request, lambda check: function(), is_long=True)

    async def write(self, caller: str, function: Callable[[Check], T]) -> T:
        """`function(check)` in a thread, for an answer: what has been computed is never refused."""
        return await self._in_thread(caller, function, is_bounded=False)

    def _end(self) -> None:
        self._count_working(-1)
        self._turns.end()

    def _count_working(self, difference: int) -> None:
        """Turns are short only while a thread works: many switches cost a busy server throughput."""
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
        # the turn ends with the thread's work, which goes on for a while when the client leaves
        working.add_done_callback(lambda _: call_in_loop(loop, self._end))
        try:
            return await asyncio.wrap_future(working)
        finally:
            has_left.set()


class Turns:
    """`num_places` pieces of work at a time, begun in the rotation of their callers. For one event loop."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, the next one first; no deque is empty
        self._bounded: set[asyncio.Future[None]] = set()  # of those that wait; only they are counted and refused

    async def take(self, caller: str, is_bounded: bool = True) -> None:
        """Wait for a turn, which `end` ends. Raises Busy if too many wait, and no other caller has more of them.

        A caller that has more gives a place up: its newest `take` raises Busy. One that is not bounded never does.
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
            elif turn.done() and not turn.cancelled() and turn.exception() is None:  # its turn came at the same moment
                self.end()
            raise

    def end(self) -> None:
        """Give the turn to the next caller."""
        while self._waiting:
            caller = next(iter(self._waiting))
            turns = self._waiting[caller]
            turn = turns[0]
            self._remove(caller, turn)
            if turns:
                self._waiting[caller] = self._waiting.pop(caller)  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def _make_room(self, caller: str) -> None:
        bounded = {one: [turn for turn in turns if turn in self._bounded] for one, turns in self._waiting.items()}
        busiest = max(bounded, key=lambda one: len(bounded[one]))
        busy = Busy(f"{MAX_WAITING} long requests wait to be read already; try again later")
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


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`. If the client goes away first, `work` is cancelled and ClientGone raised."""
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
    while (await receive())["type"] != "http.disconnect":
        pass
