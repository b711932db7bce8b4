"""`EngineThread`: an engine that steps in a thread of its own, driven by commands; what happens when a step fails.

    other threads ─add, abort, call→ commands ─between two steps→ LLMEngine.step() ─→ on_outputs, on_failure

With nothing to do the thread sleeps in the queue of commands, and the next command wakes it. Forward passes run outside
of Python's lock, so other threads go on meanwhile. Aborts are executed before the commands that wait, and remove the
requests among them: a client that leaves costs one step at most, however many requests it has sent.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from nanovllm.prompts import Prompt
from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.engine.input_processor import Params
from nanovllm_extras.lora.lora_request import LoRARequest
from nanovllm_extras.machine.dead import EngineDeadError
from nanovllm_extras.machine.forks import check_process
from nanovllm_extras.requests.lazy_outputs import RequestOutput
from nanovllm_extras.scheduling.scheduler import count_places

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

Command = Callable[[], None]

NAP_S = 0.002
COMMANDS_S = 0.02  # commands are executed for this long between two steps, or until the one that is begun ends


class NewRequest(NamedTuple):
    """The arguments of `LLMEngine.add_request`; without `stream`, the only output is the last one."""

    request_id: str
    prompt: Prompt
    sampling_params: Params | None = None
    priority: int = 0
    stream: bool = True
    lora_request: LoRARequest | None = None


class EngineThread:
    """The thread makes the engine, and steps it. Construction waits for the engine, and raises what `make_engine` does.

    PyTorch may keep memory for each thread that a CUDA graph writes to, so graphs are recorded in the thread that
    replays them. And the threads of OpenMP that load the model are those that compute steps: with more threads than
    cores, waking them took a fifth of a decode step (Qwen3-0.6B, 32 sequences, two cores).

    `on_outputs(outputs)` and `on_failure(request_ids, error)` are called in the thread, and must not block. Every
    request that was added ends with an output that is `finished`, or with a failure.
    """

    engine: LLMEngine

    def __init__(
        self,
        make_engine: Callable[[], LLMEngine],
        on_outputs: Callable[[list[RequestOutput]], None],
        on_failure: Callable[[Iterable[str], Exception], None],
    ) -> None:
        self.dead: EngineDeadError | None = None
        self._on_outputs = on_outputs
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()  # nothing is posted once `dead` is set
        self._posted: dict[str, NewRequest] = {}  # requests that the engine has not received yet
        self._aborts: queue.SimpleQueue[tuple[list[str], bool]] = queue.SimpleQueue()
        self._must_end = False
        self._num_left = 0  # requests that the last step has left waiting
        self._unfinished: dict[str, NewRequest] = {}
        made: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_engine, made), name="nanovllm-engine", daemon=True)
        self._thread.start()
        try:
            made.result()
        except BaseException:  # an interrupt can end the wait before
            self.stop()
            del made  # else the error, whose frames hold it, would keep a half-made engine
            raise
        self.engine.runner.ranks.tell_failure(self._lose)  # one can end while nothing runs

    # ---- in any thread

    def post(self, command: Command) -> None:
        """Have `command` called between two steps. Raises `EngineDeadError`."""
        check_process()  # before the lock, which another thread may have held during a fork
        with self._lock:
            self.check_health()
            self._commands.put(command)

    def add(self, requests: list[NewRequest]) -> None:
        """Queue requests. Each is a command, so that steps come between many."""
        check_process()
        with self._lock:
            self.check_health()
            for request in requests:
                self._posted[request.request_id] = request
                self._commands.put(partial(self._add, request.request_id))

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The result of a function that the thread calls between two steps."""
        future: Future[T] = Future()

        def execute() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    self.check_health()
                    future.set_result(function(*args, **kwargs))
                except Exception as error:
                    future.set_exception(error)

        self.post(execute)
        return future

    def abort(self, request_ids: Iterable[str], is_read: bool = True) -> None:
        """End requests before the next step. Unknown ids are ignored.

        is_read: whether a consumer waits for the last output of each, which holds what it has so far.
        """
        self._aborts.put((list(request_ids), is_read))
        self._commands.put(lambda: None)  # wakes the thread

    def check_health(self) -> None:
        check_process()
        if self.dead is not None:
            raise self.dead

    @property
    def num_queued(self) -> int:
        """Requests that wait, less those that the next step can start: these do not count as queued.

        The next step starts as many as the batch has places free, or none if the last step has left some waiting.
        """
        scheduler = self.engine.scheduler
        num_waiting = len(self._posted) + len(scheduler.waiting)
        num_free = 0 if self._num_left else scheduler.max_num_seqs - count_places(scheduler.running)
        return max(0, num_waiting - num_free)

    def stop(self) -> None:
        """Fail the unfinished requests, and end the thread. A second call does nothing."""
        self._must_end = True
        self._commands.put(lambda: None)  # wakes the thread
        self._thread.join()

    def _lose(self, error: EngineDeadError) -> None:
        """A rank has ended: wake the thread, which then ends too."""

        def die() -> None:
            if self.dead is None:  # else a step has found out first
                raise error

        self._commands.put(die)

    # ---- in the thread itself

    def _run(self, make_engine: Callable[[], LLMEngine], made: Future[None]) -> None:
        try:
            self.engine = make_engine()
        except BaseException as error:
            made.set_exception(error)
            del made, make_engine
            return
        made.set_result(None)
        try:
            while self._execute_commands(wait=not self.engine.has_unfinished_requests()):
                if self.engine.has_unfinished_requests():
                    self._step()
            self._die(EngineDeadError("the engine has been shut down"))
        except EngineDeadError as error:
            logger.error(str(error))
            self._die(error)
        except BaseException as error:
            logger.exception("the engine is dead")
            dead = EngineDeadError(f"the engine is dead: {error!r}")
            dead.__cause__ = error
            self._die(dead)

    def _execute_commands(self, wait: bool) -> bool:
        """Execute posted commands in their order; with `wait` sleep until there is one. False if the thread must end.

        Those that are left after `COMMANDS_S` are executed after a step, which other requests wait for. Aborts come
        first, and all of them.
        """
        give_up = math.inf
        while (wait or not self._commands.empty()) and time.monotonic() < give_up:
            command = self._commands.get()
            give_up = min(give_up, time.monotonic() + COMMANDS_S)
            self._execute_aborts()
            if self._must_end:
                return False
            command()
            wait = False
        self._execute_aborts()
        return True

    def _execute_aborts(self) -> None:
        while not self._aborts.empty():
            self._abort(*self._aborts.get())

    def _step(self) -> None:
        try:
            step = self.engine.step()
            outputs = step.outputs
            if not outputs and not step.num_scheduled_tokens:  # a scheduler of one's own may wait for the clock
                time.sleep(NAP_S)
        except EngineDeadError:
            raise
        except Exception as error:
            logger.exception("a step failed, and its requests with it")
            self._recover(error)
        else:
            self._hand_over(outputs)
            for request_id, failure in self.engine.faults.take_failures().items():
                if request_id in self._unfinished:  # else the step has failed all the same, and all with it
                    del self._unfinished[request_id]
                    self._on_failure([request_id], failure)
        self._num_left = len(self.engine.scheduler.waiting)

    def _recover(self, error: Exception) -> None:
        """Requests that were computed fail with `error`. Requests that only waited are queued in the empty engine."""
        failed, self._unfinished = self._unfinished, {}
        try:
            outputs = [self.engine.abort_request(request_id) for request_id in failed]
            self.engine.recover()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # raises if the device is lost: then the engine is dead
            waiting = [one.request_id for one in outputs if one is not None and one.metrics.scheduled_time is None]
            if len(waiting) < len(failed):  # else one of the waiting requests has made the step fail
                self._queue([failed.pop(request_id) for request_id in waiting])
        finally:
            self._on_failure(failed, error)

    def _hand_over(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                self._unfinished.pop(output.request_id, None)
        self._on_outputs(outputs)

    def _add(self, request_id: str) -> None:
        request = self._posted.pop(request_id, None)
        if request is not None:  # else it was aborted before
            self._queue([request])

    def _queue(self, requests: list[NewRequest]) -> None:
        for request in requests:
            try:
                self.check_health()
                self.engine.add_request(*request)
                self._unfinished[request.request_id] = request
            except Exception as error:
                self._on_failure([request.request_id], error)

    def _abort(self, request_ids: list[str], is_read: bool) -> None:
        posted = [request_id for request_id in request_ids if request_id in self._posted]
        if is_read:
            for request_id in posted:  # its output says that it was aborted
                self._add(request_id)
        else:
            for request_id in posted:
                del self._posted[request_id]
            self._on_failure(posted, RuntimeError("the consumer has closed this request"))
        outputs = [self.engine.abort_request(request_id) for request_id in request_ids]
        self._num_left = min(self._num_left, len(self.engine.scheduler.waiting))
        self._hand_over([output for output in outputs if output is not None])

    def _die(self, error: EngineDeadError) -> None:
        with self._lock:
            self.dead = error
        while not self._commands.empty():  # commands posted before fail, so no caller waits for ever
            self._commands.get()()
        self._on_failure(self._unfinished, error)
