"""Where does a consumer in an event loop find the outputs that the engine's thread has made?

Outputs that the consumer has not read yet merge, so an inbox holds at most one output of each request.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

from nanovllm.outputs import RequestOutput


class Inbox:
    """The unread outputs of the requests of one call. Made in the consumer's event loop; `put` and `fail` may be called
    in any thread, and return whether `wake` must be called in the loop's thread.
    """

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.loop = asyncio.get_running_loop()
        self.unfinished = set(request_ids)
        """Requests whose last output has not been read."""
        self._lock = threading.Lock()
        self._unread: dict[str, RequestOutput] = {}
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> bool:
        with self._lock:
            is_first = not self._unread and self._error is None
            self._unread[output.request_id] = output  # an output holds all that the one before it holds
            return is_first

    def fail(self, error: BaseException) -> bool:
        with self._lock:
            is_first = not self._unread and self._error is None
            self._error = self._error or error
            return is_first

    def wake(self) -> None:
        self._has_news.set()

    async def take(self) -> list[RequestOutput]:
        """Wait for outputs; those read since the last call, one of each request. Raises the error of a failure."""
        await self._has_news.wait()
        with self._lock:
            self._has_news.clear()
            outputs = list(self._unread.values())
            self._unread.clear()
            if self._error is not None and not outputs:
                raise self._error
            if self._error is not None:
                self._has_news.set()  # the next call raises it
        self.unfinished -= {output.request_id for output in outputs if output.finished}
        return outputs


def wake_all(inboxes: Iterable[Inbox]) -> None:
    for inbox in inboxes:
        inbox.wake()


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: Any) -> None:
    """Have `function` called in the thread of `loop`, if the loop is not closed: then nobody waits there any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
