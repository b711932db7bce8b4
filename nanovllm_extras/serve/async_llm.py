"""`AsyncLLM`: many consumers in an event loop share one engine, which steps in a thread of its own.

    consumer ─submit→ EngineThread ─outputs→ the consumer's Inbox ─take→ consumer

Consumers never touch the engine: `engine_thread.py` executes their commands between two steps. The engine never waits
for a consumer: outputs merge in inboxes (`inbox.py`) until they are read.
"""

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sized
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch

from nanovllm.checks import check_int
from nanovllm.prompts import Prompt
from nanovllm_extras.embedding.pooling_params import PoolingParams
from nanovllm_extras.engine.engine_stats import EngineStats
from nanovllm_extras.engine.full_engine import LLMEngine
from nanovllm_extras.engine.input_processor import TakenParams
from nanovllm_extras.engine.isolation import Isolation
from nanovllm_extras.lora.lora_request import LoRARequest
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.requests.lazy_outputs import RequestOutput
from nanovllm_extras.serve.engine_thread import EngineDeadError, EngineThread, NewRequest
from nanovllm_extras.serve.inbox import Inbox, ReadingTask, Waker, gives_deltas
from nanovllm_extras.trace.recorder import start_engine
from nanovllm_extras.trace.recording import Sink

T = TypeVar("T")
P = ParamSpec("P")

LONG = 4096  # characters or token ids; longer ones are encoded and checked in a thread


class RunLong(Protocol):
    """Calls a function that takes long, not in the event loop."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


class QueueFullError(RuntimeError):
    """`max_queued_requests` requests wait already."""


class AsyncLLM:
    """`AsyncLLM(model, **options)`: the options are the fields of `Config`. Construction waits for the model.

    max_queued_requests: refuse a request with `QueueFullError` when this many wait to be computed; None refuses none.
    trace: a file in which the run is recorded, or a `Sink` (docs/trace.md).

    >>> async for output in llm.generate("What is a block table?", SamplingParams(max_tokens=20)):
    ...     print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path,
        max_queued_requests: int | None = None,
        trace: str | Path | Sink | None = None,
        **options: Any,
    ) -> None:
        check_int("max_queued_requests", max_queued_requests, 1, optional=True)
        self.max_queued_requests = max_queued_requests
        self._request_ids = itertools.count()
        self._lock = threading.Lock()
        self._inboxes: dict[str, Inbox] = {}  # of all unfinished requests; changed under the lock
        self._on_shutdown = ExitStack()
        self._wakers: WeakValueDictionary[asyncio.AbstractEventLoop, Waker] = WeakValueDictionary()
        config = Config.from_options(model, options)
        make_engine = partial(start_engine, LLMEngine, config, trace, self._on_shutdown, Isolation())
        self._thread: EngineThread | None = EngineThread(make_engine, self._hand_over, self._fail)
        self._on_shutdown.callback(self.engine.runner.ranks.stop)

    @classmethod
    def from_engine_args(cls, engine_args: Config, **others: Any) -> "AsyncLLM":
        """`AsyncLLM` with the options of a record."""
        options = {field.name: getattr(engine_args, field.name) for field in fields(Config)}
        return cls(**options, **others)

    # ---- in the consumer's event loop

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the request's output whenever it has grown, `finished` on the last.

        A consumer that is slower than the engine gets fewer outputs, each of them up to date. Cancelling or closing the
        iterator aborts the request before the next step, and so does the end of the task that reads it, by cancellation
        or an exception. Raises ValueError or TypeError for what cannot be served,
        `QueueFullError`, `EngineDeadError`, or the exception of a step that failed.
        """
        request_id = request_id or self.new_id()
        return self.generate_many([NewRequest(request_id, prompt, sampling_params, priority, True, lora_request)])

    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Yields the prompt's `EmbeddingRequestOutput`, as `generate` does outputs."""
        request_id = request_id or self.new_id()
        return self.generate_many([NewRequest(request_id, prompt, pooling_params, priority, True, lora_request)])

    async def generate_many(self, requests: list[NewRequest]) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, for several requests whose outputs are read together; if one is refused, all are."""
        inbox = await self.submit(requests)
        reading = ReadingTask(partial(self.close, inbox))
        try:
            reading.note(asyncio.current_task())
            while inbox.unfinished:
                for output in await inbox.take():
                    yield output
                    reading.note(asyncio.current_task())
        finally:
            reading.note(None)
            self.close(inbox)

    async def submit(self, requests: list[NewRequest], run_long: RunLong = asyncio.to_thread) -> Inbox:
        """Check all requests, queue them, and return the inbox of their outputs; `close` it in the end.

        run_long: calls a function that takes long, not in the event loop.
        """
        self.thread.check_health()
        checked = await check_requests(self.engine, requests, run_long)
        ids = [request.request_id for request in checked]
        deltas = [request.request_id for request in requests if gives_deltas(request.sampling_params)]
        with self._lock:
            waker = self._wakers.setdefault(asyncio.get_running_loop(), Waker())
            inbox = Inbox(ids, deltas, waker)
            num_queued, most = self.thread.num_queued, self.max_queued_requests
            if most is not None and num_queued + len(ids) > most:
                raise QueueFullError(f"{num_queued} requests wait already, and at most {most} may; try again later")
            times = Counter(ids)  # there may be thousands
            if taken := [i for i in ids if i in self._inboxes or times[i] > 1]:
                raise ValueError(f"request_id {taken[0]!r} belongs to an unfinished request; choose another")
            self._inboxes.update(dict.fromkeys(ids, inbox))
        try:
            self.thread.add(checked)
        except EngineDeadError as error:
            self._fail(ids, error)
            raise
        return inbox

    def close(self, inbox: Inbox) -> None:
        """Abort the inbox's unfinished requests: their blocks are free before the next step."""
        if inbox.unfinished and self._thread is not None:
            self._thread.abort(inbox.unfinished, is_read=False)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; consumers get the output so far, with `finish_reason="abort"`. Unknown ids are ignored."""
        self.thread.abort([request_id] if isinstance(request_id, str) else request_id)

    async def abort_all(self) -> None:
        with self._lock:
            self.thread.abort(self._inboxes)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function that the engine's thread calls between two steps."""
        return await asyncio.wrap_future(self.thread.call(function, *args, **kwargs))

    def new_id(self) -> str:
        return f"request-{next(self._request_ids)}"

    # ---- in any thread

    @property
    def thread(self) -> EngineThread:
        if self._thread is None:
            raise EngineDeadError("this AsyncLLM has been shut down; make a new one")
        return self._thread

    @property
    def engine(self) -> LLMEngine:  # only its thread may change it
        return self.thread.engine

    def get_stats(self) -> EngineStats:
        return self.engine.get_stats()

    async def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine is dead or shut down."""
        self.thread.check_health()

    def shutdown(self) -> None:
        """Fail the unfinished requests, end the thread, release the model. A second call does nothing."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
            self._on_shutdown.close()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ---- in the engine's thread

    def _hand_over(self, outputs: list[RequestOutput]) -> None:
        inboxes = [self._inboxes[output.request_id] for output in outputs]
        with self._lock:
            for output in outputs:
                if output.finished:
                    del self._inboxes[output.request_id]
        self._wake([inbox for inbox, output in zip(inboxes, outputs, strict=True) if inbox.put(output)])

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        with self._lock:
            inboxes = [self._inboxes.pop(request_id) for request_id in request_ids]
        self._wake([inbox for inbox in inboxes if inbox.fail(error)])

    def _wake(self, inboxes: list[Inbox]) -> None:
        for waker in {inbox.waker for inbox in inboxes}:
            waker.wake_soon([inbox for inbox in inboxes if inbox.waker is waker])


async def check_requests(engine: LLMEngine, requests: list[NewRequest], run_long: RunLong) -> list[NewRequest]:
    """The requests with prompts encoded and parameters taken; ValueError or TypeError if one cannot be served.

    Called in the consumer's event loop, so it reads nothing that the engine's steps change. What may take long is done
    by `run_long`, and the loop goes on: long texts are encoded there, grammars compiled. The requests hold these.
    """
    processor, checked = engine.input_processor, []
    taken: dict[int, TakenParams] = {}
    for request in requests:
        given, prompt = request.sampling_params, request.prompt
        if id(given) not in taken:
            take = partial(processor.take_params, given)
            taken[id(given)] = await run_long(take) if are_long(given) else take()
        own = taken[id(given)]
        encode = partial(processor.encode, prompt, own.params)
        text, token_ids = await run_long(encode) if is_long(prompt) else encode()
        encoded = {**(prompt if isinstance(prompt, Mapping) else {}), "prompt": text, "prompt_token_ids": token_ids}
        checked.append(request._replace(sampling_params=own, prompt=encoded))
        if len(requests) > 1:
            await asyncio.sleep(0)  # other consumers come between
    return checked


def are_long(params: object) -> bool:
    """Whether parameters take long to check, or to make something of."""
    has_many = len(getattr(params, "allowed_token_ids", None) or ()) > LONG
    return has_many or bool(getattr(params, "bad_words", None) or getattr(params, "structured_outputs", None))


def is_long(prompt: object) -> bool:
    """Whether a prompt takes long to encode, or to check."""
    given = prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
    return isinstance(given, Sized) and len(given) > LONG


AsyncLLMEngine = AsyncLLM  # vLLM's older name
