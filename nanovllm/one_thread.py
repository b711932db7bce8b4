"""`OneThread`: refuse calls that an engine cannot serve now, because they come from a second thread, or from a step.

An engine changes its queues and blocks in many small steps, so two calls at the same time would compute wrong tokens
without any error. The refusal does not wait: a lock would hang behind a stream that its consumer has paused.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

THREADS = (
    "one thread at a time can use an LLM or an engine. For several threads or tasks use AsyncLLM or the server of "
    "nanovllm_extras, which compute their requests together"
)


class InUseError(RuntimeError):
    """The engine cannot be called now, or not by this thread, or not in this process. Nothing has changed."""


class OneThread:
    """The thread that uses an engine now, and the streams that wait for their consumers."""

    def __init__(self) -> None:
        self.is_stepping = False
        self._process = os.getpid()
        self._lock = threading.RLock()  # held for a few lines, in which garbage collection may close a stream
        self._thread: int | None = None
        self._paused: dict[object, int] = {}  # stream -> the thread that has read its last output

    @contextmanager
    def use(self, stream: object = None, during_step: bool = False) -> Iterator[None]:
        """Use the engine in the block. Raises InUseError if another thread uses it, or has an unfinished stream.

        stream: identifies a stream, to be used again until `end`. Any thread may go on with it if nobody else is busy.
        during_step: whether the block may run within a step of the same thread, such as in a logits processor.
        """
        before = self._begin(stream, during_step)
        try:
            yield
        finally:
            if stream is not None:
                self._paused[stream] = threading.get_ident()  # first, so that no other thread comes between
            self._thread, self.is_stepping = before

    def restore(self, before: tuple[int | None, bool]) -> None:
        """Set what `state` was before a block that ended. An interrupt may have kept `use` from doing so."""
        if self._thread == threading.get_ident():
            self._thread, self.is_stepping = before

    @property
    def state(self) -> tuple[int | None, bool]:
        """Return the thread that uses the engine, and whether it computes a step."""
        return self._thread, self.is_stepping

    @contextmanager
    def step(self) -> Iterator[None]:
        """Use the engine for a step, in which the same thread cannot use it again."""
        with self.use():
            self.is_stepping = True  # `use` sets it back
            yield

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the one that made the engine: it has no other thread to wait for."""
        return self._process != os.getpid()

    def end(self, stream: object) -> None:
        """Forget a stream that is finished or closed."""
        self._paused.pop(stream, None)

    def _begin(self, stream: object, during_step: bool) -> tuple[int | None, bool]:
        """Return the state to be restored."""
        if self.is_forked:  # first, because another thread may have held the lock during the fork
            raise InUseError(
                f"this process was forked from process {self._process}, where the engine was made, and it does not "
                f"work here: use multiprocessing.get_context('spawn'), or make the engine after the fork"
            )
        this = threading.get_ident()
        with self._lock:
            if self._thread not in (None, this):
                raise InUseError(f"another thread uses this engine now: {THREADS}")
            is_new = self._thread is None and stream not in self._paused
            if is_new and any(thread != this for thread in list(self._paused.values())):
                raise InUseError(f"another thread has not finished or closed its stream: {THREADS}")
            if self.is_stepping and not during_step:
                raise InUseError(
                    "the engine computes a step, and this call comes from within it, such as from a logits processor: "
                    "call the engine between two steps"
                )
            before = self.state
            self._thread = this
            return before
