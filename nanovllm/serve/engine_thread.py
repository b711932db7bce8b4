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
        self._unfinished: set[str] = set()
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
        """Requests that wait to be computed."""
        return self._num_posted - self._num_added + len(self.engine.scheduler.waiting)

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

    def _recover(self, error: Exception) -> None:
        """All requests that the engine has got fail with `error`; those that come later find the engine as new."""
        failed, self._unfinished = self._unfinished, set()
        try:
            for request_id in failed:
                self.engine.abort_request(request_id)
            self.engine.recover()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # raises if the device is lost: then the engine is dead
        finally:
            self._on_failure(failed, error)

    def _hand_over(self, outputs: list[RequestOutput]) -> None:
        self._unfinished.difference_update([output.request_id for output in outputs if output.finished])
        self._on_outputs(outputs)

    def _add(self, requests: list[NewRequest]) -> None:
        for request in requests:
            try:
                self.check_health()
                self.engine.add_request(*request)
                self._unfinished.add(request.request_id)
            except Exception as error:
                self._on_failure([request.request_id], error)
        self._num_added += len(requests)

    def _abort(self, request_ids: list[str]) -> None:
        if self.dead is None:
            outputs = [self.engine.abort_request(request_id) for request_id in request_ids]
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
