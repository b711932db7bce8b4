"""Where outputs wait for a consumer in an event loop, and how the consumers of a loop are woken.

    engine's thread ─put→ Inbox ─take→ consumer
           └─ wake_soon → Waker ─wake┘

Outputs that the consumer has not read merge, so an inbox holds at most one output of each request.

To wake one consumer, and to send what it reads, takes the loop about 50 µs: for hundreds of streams as long as a step
of a small model. Python computes in one thread at a time, so a loop that is woken after every step would halve the
engine's speed. A `Waker` therefore wakes all consumers that have news together, and then pauses for `PAUSE_S` for each
of them: 2 ms for 10 streams, 40 ms for 200. Outputs merge meanwhile.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from nanovllm_extras.options.request_params import RequestOutputKind, SamplingParams
from nanovllm_extras.requests.lazy_outputs import RequestOutput
from nanovllm_extras.serve.pace import Pace

PAUSE_S = 200e-6  # for each consumer that was woken


class Wakeable(Protocol):
    def wake(self) -> None: ...


class Waker:
    """One for each event loop, and made in it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[Wakeable] = []
        self._last_woken = 0.0
        self._pace = Pace()  # what consumers do with their outputs takes the loop longer than to wake them

    def wake_soon(self, consumers: list[Wakeable]) -> None:
        """Have `wake` of each called in the loop's thread: at once, or after the pause. May be called in any thread."""
        with self._lock:
            is_scheduled = bool(self._waiting)
            self._waiting += consumers
        if not is_scheduled:
            call_in_loop(self._loop, self._pause)

    def _pause(self) -> None:
        rest = self._last_woken + PAUSE_S * len(self._waiting) - self._loop.time()
        if rest > 0:
            self._loop.call_later(rest, self._wake_all)
        else:
            self._wake_all()

    def _wake_all(self) -> None:
        with self._lock:
            consumers, self._waiting = self._waiting, []
        self._last_woken = self._loop.time()
        for consumer in consumers:
            self._pace.begin_soon(consumer.wake)


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Have `function` called in the thread of `loop`. A closed loop has no consumers left: then nothing is done."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


class Inbox:
    """The unread outputs of the requests of one call. Made in the consumer's event loop.

    `put` and `fail` may be called in any thread. They return whether the consumer must be woken.
    """

    def __init__(self, request_ids: Iterable[str], delta_ids: Iterable[str], waker: Waker) -> None:
        self.waker = waker
        """Of the consumer's event loop."""
        self.unfinished = set(request_ids)
        """Requests whose last output has not been read."""
        self._delta_ids = frozenset(delta_ids)
        self._lock = threading.Lock()
        self._unread: dict[str, RequestOutput] = {}
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> bool:
        with self._lock:
            is_first = not self._unread and self._error is None
            unread = self._unread.get(output.request_id)
            if unread is not None and output.request_id in self._delta_ids:
                output = merge_deltas(unread, output)
            self._unread[output.request_id] = output  # unless a delta, it holds all of the one before it
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


class ReadingTask:
    """Calls `on_end` when the task that has read last is cancelled or fails, although it may do something else then.

    Python closes an asynchronous generator only when it is collected, and the traceback of such a task keeps it alive.
    A task that returns has not left: another task may go on, as for each output with `asyncio.wait_for`.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._task: asyncio.Task[object] | None = None

    def note(self, task: asyncio.Task[object] | None) -> None:
        """Watch `task` instead of the task before; None watches no task."""
        if task is self._task:
            return
        if self._task is not None:
            self._task.remove_done_callback(self._note_end)
        if task is not None:
            task.add_done_callback(self._note_end)
        self._task = task

    def _note_end(self, task: asyncio.Task[object]) -> None:
        if task.cancelled() or task.get_stack(limit=1):  # `exception()` would suppress asyncio's own message
            self._on_end()


def gives_deltas(params: object) -> bool:
    return isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA


def merge_deltas(old: RequestOutput, new: RequestOutput) -> RequestOutput:
    """One delta with the news of both. A completion without news is in neither."""
    completions = {completion.index: completion for completion in old.outputs}
    for completion in new.outputs:
        before = completions.get(completion.index)
        if before is not None:
            logprobs = None if completion.logprobs is None else [*(before.logprobs or []), *completion.logprobs]
            text, token_ids = before.text + completion.text, before.token_ids + completion.token_ids
            completion = replace(completion, text=text, token_ids=token_ids, logprobs=logprobs)
        completions[completion.index] = completion
    outputs = [completions[index] for index in sorted(completions)]
    return replace(new, outputs=outputs, prompt_logprobs=old.prompt_logprobs or new.prompt_logprobs)
