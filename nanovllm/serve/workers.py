"""What takes long is done in threads beside the event loop: few at a time, few waiting, none for clients that left.

What a body of more than `LONG_BODY` bytes asks for is done here, and for shorter ones at once, in the event loop. The
threads share Python's lock with the loop and the engine, so what runs here is bounded first (`bounds.py`), or is a
library's work outside of the lock: the tokenizer's, the grammar compiler's, NumPy's.
"""

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

T = TypeVar("T")
Check = Callable[[], None]
"""Called between two pieces of work; raises ClientGone when nobody waits for the result any more."""

LONG_BODY = 4096  # bytes
MAX_WAITING = 512  # requests that wait for a thread: many clients may come at once
TRIM_S = 0.1


class ClientGone(Exception):
    """The client has closed the connection."""


class Busy(RuntimeError):
    """`MAX_WAITING` requests wait already."""


class Workers:
    """One for each server."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4), thread_name_prefix="nanovllm-serve")
        self._num_waiting = 0
        self._is_trim_due = False

    def trim_soon(self) -> None:
        """Give free memory back to the system: glibc keeps what large texts took. Calls meanwhile do it once."""
        if not self._is_trim_due:
            self._is_trim_due = True
            asyncio.get_running_loop().call_later(TRIM_S, self._pool.submit, self._trim)

    async def run(self, request: Request, function: Callable[[Check], T], is_long: bool | None = None) -> T:
        """`function(check)`: in a thread if it is long; by default, if the body is. Raises Busy, ClientGone."""
        if request.state.num_bytes <= LONG_BODY if is_long is None else not is_long:
            return function(lambda: None)
        result: T = await unless_client_leaves(request.receive, self._in_thread(function))
        return result

    def _trim(self) -> None:
        self._is_trim_due = False
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)

    async def _in_thread(self, function: Callable[[Check], T]) -> T:
        if self._num_waiting >= MAX_WAITING:
            raise Busy(f"{MAX_WAITING} long requests wait to be read already; try again later")
        has_left, box = threading.Event(), [function]
        del function  # the pool's queue keeps what was cancelled until its turn; the body is only in the box

        def check() -> None:
            if has_left.is_set():
                raise ClientGone

        def work() -> T:
            return box.pop()(check)

        self._num_waiting += 1
        try:  # when this is cancelled, work that has not begun never does
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            box.clear()
            has_left.set()
            self._num_waiting -= 1


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
