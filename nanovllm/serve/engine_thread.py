"""An engine that steps in a thread of its own, driven by commands: when does it run, and what if a step fails?

    other threads ─add, abort, call→ commands ─between two steps→ LLMEngine.step() ─→ on_outputs, on_failure

With nothing to do the thread sleeps in the queue of commands, and the next command wakes it. Forward passes run outside
of Python's lock, so other threads go on meanwhile.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from nanovllm.engine.engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.serve.new_request import NewRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

Command = Callable[[], None]


class EngineDeadError(RuntimeError):
    """The engine has been shut down, or failed in a way that it cannot recover from."""


class EngineThread:
    """`on_outputs(outputs)` and `on_failure(request_ids, error)` are called in the thread, and must not block.

    After every request that was added, either an output with `finished` or a failure comes.
    """

    def __init__(
        self,
        engine: LLMEngine,
        on_outputs: Callable[[list[RequestOutput]], None],
        on_failure: Callable[[Iterable[str], Exception], None],
    ) -> None:
        self.engine = engine
        self.dead: EngineDeadError | None = None
        self._on_outputs = on_outputs
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # nothing is posted once `dead` is set
        self._num_posted = 0  # requests that `add` has posted
        self._num_added = 0  # of these, requests that the engine has got
        self._num_left = 0  # requests that the last step has left waiting
        self._unfinished: dict[str, NewRequest] = {}
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)
        self._thread.start()

    # ---- in any thread

    def post(self, command: Command) -> None:
        """Have `command` called between two steps. Raises `EngineDeadError`."""
        with self._lock:
            self.check_health()
            self._commands.put(command)

    def add(self, requests: list[NewRequest]) -> None:
        with self._lock:
            self._num_posted += len(requests)
        self.post(lambda: self._add(requests))

    def call(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """The result of a function that the thread calls between two steps."""
        future: Future[Any] = Future()

        def execute() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    self.check_health()
                    future.set_result(function(*arguments))
                except Exception as error:
                    future.set_exception(error)

        self.post(execute)
        return future

    def abort(self, request_ids: Iterable[str]) -> None:
        """Unknown ids are ignored. What a request has so far comes as its last output."""
        ids = list(request_ids)
        self._commands.put(lambda: self._abort(ids))

    def check_health(self) -> None:
        if self.dead is not None:
            raise self.dead

    @property
    def num_queued(self) -> int:
        """Requests that the next step will not compute, as far as can be known: a burst on an idle engine is no queue.

        While the last step has left none waiting, those that have come since are queued if there are more of them than
        sequences that can join the batch.
        """
        scheduler = self.engine.scheduler
        num_waiting = self._num_posted - self._num_added + len(scheduler.waiting)
        num_free = 0 if self._num_left else scheduler.max_num_seqs - scheduler.running.num_places
        return max(0, num_waiting - num_free)

    def stop(self) -> None:
        """Fail the unfinished requests, and end the thread. A second call does nothing."""
        self._commands.put(None)
        self._thread.join()

    # ---- in the thread itself

    def _run(self) -> None:
        try:
            while self._execute_commands(wait=not self.engine.has_unfinished_requests()):
                if self.engine.has_unfinished_requests():
                    self._step()
            self._die(EngineDeadError("the engine has been shut down"))
        except BaseException as error:
            logger.exception("the engine is dead")
            dead = EngineDeadError(f"the engine is dead: {error!r}")
            dead.__cause__ = error
            self._die(dead)

    def _execute_commands(self, wait: bool) -> bool:
        """Execute what was posted; with `wait` sleep until there is something. False: the thread shall end."""
        while wait or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
            wait = False
        return True

    def _step(self) -> None:
        try:
            outputs = self.engine.step().outputs
        except Exception as error:
            logger.exception("a step failed, and its requests with it")
            self._recover(error)
        else:
            self._hand_over(outputs)
        self._num_left = len(self.engine.scheduler.waiting)

    def _recover(self, error: Exception) -> None:
        """The requests that were computed fail with `error`; the others are queued once more, in an engine as new."""
        failed, self._unfinished = self._unfinished, {}
        try:
            outputs = [self.engine.abort_request(request_id) for request_id in failed]
            self.engine.recover()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # raises if the device is lost: then the engine is dead
            waiting = [one.request_id for one in outputs if one is not None and one.metrics.scheduled_time is None]
            if len(waiting) < len(failed):  # else the step has failed at one of those that wait
                self._queue([failed.pop(request_id) for request_id in waiting])
        finally:
            self._on_failure(failed, error)

    def _hand_over(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                self._unfinished.pop(output.request_id, None)
        self._on_outputs(outputs)

    def _add(self, requests: list[NewRequest]) -> None:
        self._queue(requests)
        self._num_added += len(requests)

    def _queue(self, requests: list[NewRequest]) -> None:
        for request in requests:
            try:
                self.check_health()
                self.engine.add_request(*request)
                self._unfinished[request.request_id] = request
            except Exception as error:
                self._on_failure([request.request_id], error)

    def _abort(self, request_ids: list[str]) -> None:
        if self.dead is None:
            outputs = [self.engine.abort_request(request_id) for request_id in request_ids]
            self._num_left = min(self._num_left, len(self.engine.scheduler.waiting))
            self._hand_over([output for output in outputs if output is not None])

    def _die(self, error: EngineDeadError) -> None:
        with self._lock:
            self.dead = error
        while not self._commands.empty():  # what was posted before fails, so that nobody waits for it
            command = self._commands.get()
            if command is not None:
                command()
        self._on_failure(self._unfinished, error)


def in_passing_thread(function: Callable[..., T], *arguments: Any) -> T:
    """The function's result, from a thread that ends: what loads an engine leaves no OpenMP threads behind.

    Where libgomp has more threads than there are cores, those that wait for each other go to sleep at once. Beside a
    second pool of threads, waking the engine's took a fifth of a decode step (Qwen3-0.6B, 32 sequences, two cores).
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *arguments).result()
