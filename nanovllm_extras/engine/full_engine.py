"""The engine with everything: options that choose extras, times of each part of a step, requests of other kinds.

The loop is the core's. A step that fails is rolled back: its requests keep their tokens, wait, and are computed again.
`faults` may go further (`isolation.py`). `input_processor.py` makes requests, `full_request.py` makes outputs.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm import engine
from nanovllm.batch import Batch
from nanovllm.block_manager import BlockManager
from nanovllm.loader import read_json
from nanovllm.prompts import Prompt
from nanovllm.scheduler import Scheduler, Step
from nanovllm.sequence import Sequence
from nanovllm_extras.engine import assembly
from nanovllm_extras.engine.cache_salt import salt
from nanovllm_extras.engine.engine_stats import EngineStats, make_stats
from nanovllm_extras.engine.faults import FaultHandler, Raised
from nanovllm_extras.engine.input_processor import Params
from nanovllm_extras.engine.no_token import end_without_token
from nanovllm_extras.engine.observations import Observations
from nanovllm_extras.engine.plain_parts import is_plain
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.execution.parts import Parts
from nanovllm_extras.lora.lora_request import LoRARequest
from nanovllm_extras.machine.forks import check_process
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.chat_options import set_chat_template
from nanovllm_extras.options.option_checks import LazyMethod
from nanovllm_extras.records.full_observer import Observer, SchedulingStats
from nanovllm_extras.records.full_sequence import own_chunks, own_sequences
from nanovllm_extras.records.loaded_adapter import LoadedAdapter
from nanovllm_extras.requests.full_request import Request, note_scheduled
from nanovllm_extras.requests.lazy_outputs import StepOutput
from nanovllm_extras.sampling.processed_batch import build_batch
from nanovllm_extras.sampling.runner_hooks import NO_TOKEN, ArrivingTokens, LapClock, StepTokens, plain_defaults
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache, roll_back
from nanovllm_extras.weights.checkpoint import load_tokenizer, read_default_sampling_params, resolve_model
from nanovllm_extras.weights.end_tokens import read_end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanovllm_extras.lora.registry import AdapterRegistry

logger = logging.getLogger(__name__)

MakeRunner = Callable[[Config, Path], ModelRunner]


class LLMEngine(engine.LLMEngine):
    """Add requests, and call `step()` while `has_unfinished_requests()`.

    `parts` holds what the engine is made of, and what was found out when it started. `observer` is notified of what
    scheduler and block manager decide. `faults` decide what happens if a request makes a step fail. `runner_class`
    replaces the choice of a runner by the options. ValueError or TypeError if the model cannot be loaded as the config
    says.
    """

    from_engine_args = LazyMethod("vllm.engine_args", of_class=True)
    config: Config
    runner: ModelRunner
    requests: dict[str, Any]
    stats: SchedulingStats

    def __init__(
        self,
        config: Config,
        observer: Observer | None = None,
        faults: FaultHandler | None = None,
        runner_class: MakeRunner | None = None,
    ) -> None:
        self._watcher = observer
        self._runner_class = runner_class
        self.faults: FaultHandler = Raised() if faults is None else faults
        self.observed = Observations()
        self._aborted_meanwhile: list[Request] = []  # by a logits processor, during a step
        with plain_defaults():
            super().__init__(config)
        # LoRA adapters by name and number; None if the options ask for none
        self.adapters = assembly.make_registry(self.parts, self.runner, lambda: self.requests)
        self._checks = assembly.make_checks(self.config)
        self.input_processor = assembly.make_input_processor(self.parts, self.scheduler.block_manager.capacity)

    def reset(self) -> None:
        """Drop all requests, and start an empty scheduler."""
        with self.one_thread.use(during_step=True):
            super().reset()
            self._clocks: deque[LapClock] = deque()  # of the steps in flight
            self._aborted_meanwhile.clear()
            self._has_failed = False  # the last step
            # a step that was launched before the one before it has run
            self._ahead: tuple[Step, ArrivingTokens] | None = None

    # ---- the loop

    def step(self) -> StepOutput:
        """Advance the unfinished requests by one forward pass, and return the outputs of those that advanced.

        If a step fails, its requests keep their tokens, wait, and are computed again. Requests that had ended before
        the failure are returned by the next step.
        """
        check_process()
        with self.one_thread.use():
            try:
                if late := self._take_late():
                    return StepOutput(self.deliver(late, time.monotonic()))
                with plain_defaults():
                    outputs = super().step()
                for check in self._checks:
                    check(self)
                return outputs if isinstance(outputs, StepOutput) else StepOutput()  # there was nothing to do
            finally:
                self._end_step()

    def launch(self) -> tuple[Step, ArrivingTokens] | None:
        """Return the step to wait for: the next one, or one that was launched ahead of it.

        With overlap, the step after it is launched, too, if it needs no token of this one.
        """
        if self._is_plain:
            return self.launch_one()
        step, self._ahead = self._ahead, None
        scheduler: Any = self.scheduler
        if step is None or step[0] not in scheduler.pending.steps:  # an interrupted reset may have left an old one
            step = self.launch_one()
        if step is not None and self._can_launch_ahead():
            self._ahead = self.launch_one()
        return step

    def launch_one(self) -> tuple[Step, ArrivingTokens] | None:
        """Start a step, and time it."""
        self._clock = LapClock()
        launched = super().launch()
        if launched is not None:
            self._clock.lap("run_time_s")
            self._clocks.append(self._clock)
        return launched

    def _can_launch_ahead(self) -> bool:
        scheduler: Any = self.scheduler
        return self.parts.enable_overlap and scheduler.can_schedule_ahead()

    def compute(self, step: Step) -> ArrivingTokens:
        clock = self._clock
        clock.lap("schedule_time_s")
        note_scheduled(self.requests, self.stats.take_admitted(), own_sequences(step.preempted), clock.now)
        is_built = False
        try:
            batch = self.build(step)
            clock.lap("build_time_s")
            is_built = True
            return self.runner.run(batch)
        except Exception as error:
            return self.faults.compute_again(self, step, is_built, error)

    def build(self, step: Step) -> Batch:
        """Return the tensors of a step."""
        return build_batch(step, self.scheduler.block_manager.block_size, self.runner.make_metadata)

    def complete(self, step: Step, tokens: ArrivingTokens) -> StepOutput:
        """Wait for the tokens, append them to their sequences, and give them to their requests."""
        clock = self._clocks.popleft()
        clock.resume()  # with overlap, another step has been launched since
        arrived = tokens.wait()
        clock.lap("run_time_s")
        advanced = self.scheduler.update(step, arrived.token_ids)
        if NO_TOKEN in arrived.token_ids:
            self.faults.end_without_token(self, end_without_token(self.scheduler, advanced))
        clock.lap("update_time_s")
        self.stats.count_step(step, len(advanced), sum(clock.seconds.values()))
        outputs = self.read_outputs(step, advanced, arrived, clock.now)
        clock.lap("output_time_s")
        self.observer.on_step_end(step, clock.seconds)
        return StepOutput(
            outputs,
            num_scheduled_tokens=step.num_scheduled_tokens,
            num_prefill_tokens=step.num_scheduled_tokens - step.num_decodes,
            num_decode_tokens=step.num_decodes,
            num_seqs=len({seq for seq, _, _ in step.chunks}),
            num_preempted=len(step.preempted),
            **clock.seconds,
        )

    def read_outputs(
        self, step: Step, advanced: list[tuple[int, Sequence]], tokens: StepTokens, now: float
    ) -> list[Any]:
        """Give a step's results to readers and requests, and return the outputs of the requests that advanced."""
        for reading in tokens.readings:
            try:
                reading.deliver(step)
            except Exception as error:
                self.faults.end(self, [seq.request_id for seq, _, _ in own_chunks(step.chunks) if seq.readers], error)
        requests: dict[str, Request] = {}
        for row, seq in advanced:
            request = self.requests.get(seq.request_id)
            if request is not None:  # else it was aborted during this step
                requests[seq.request_id] = request
                try:
                    request.read_token(seq, tokens, row)
                except Exception as error:
                    self.faults.end(self, [seq.request_id], error)
                    del requests[seq.request_id]
        for request in [*requests.values()]:
            try:
                request.finish_step(self.scheduler, now)
            except Exception as error:
                self.faults.end(self, [request.request_id], error)
                del requests[request.request_id]
        return self.deliver(requests.values(), now)

    def on_failure(self) -> None:
        self._clocks.clear()
        self._ahead = None
        roll_back(self.scheduler)
        self._has_failed = True

    def has_unfinished_requests(self) -> bool:
        """Return whether there is something to `step()` for."""
        return bool(self.requests) or self._has_unfinished_steps()

    def settle(self) -> None:
        """Finish the steps in flight if no request is left."""
        if not self.requests and self._has_unfinished_steps():
            self.step()

    def _has_unfinished_steps(self) -> bool:
        """Return whether sequences run or wait, or a step is in flight though all sequences have ended."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting or self._clocks)

    # ---- requests come and go

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: Params | None = None,
        priority: int = 0,
        stream: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Check and queue one request. With `stream=False` its only output is the last one.

        `priority` is for scheduling policies; first come, first served does not use it. `lora_request` is the request's
        LoRA adapter, which is loaded if this is the first request that has it. Raises ValueError or TypeError
        before anything changes. During a step (a logits processor may call this) the request waits for the next one.
        """
        check_process()
        with self.one_thread.use(during_step=True):  # it waits for the next step
            self._check_request_id(request_id)
            number = self.stats.num_requests
            with plain_defaults():
                request = self.input_processor.make_request(
                    request_id, prompt, sampling_params, priority, stream, number
                )
            adapter = None if lora_request is None else self.find_adapter(lora_request)
            cache_salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
            for seq in request.seqs:
                salt(seq, cache_salt, adapter)
            request.queue(self.scheduler, self.config.max_num_seqs)
            self.requests[request_id] = request

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter before the first request has it, and return True. ValueError if it cannot be loaded."""
        with self.one_thread.use(during_step=True):
            self.find_adapter(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget a LoRA adapter, and return whether there is one with this number.

        Unfinished requests keep it. Its memory is free when the last of them has ended.
        """
        with self.one_thread.use(during_step=True):
            return self._registry().remove(lora_id)

    def retire_lora(self, lora_id: int) -> None:
        """Free the name of a LoRA adapter before it is removed: only requests that know its number still get it."""
        with self.one_thread.use(during_step=True):
            self._registry().retire(lora_id)

    def list_loras(self) -> set[int]:
        """Return the numbers of the LoRA adapters that are loaded."""
        return {*self._registry().known}

    def find_adapter(self, lora_request: LoRARequest) -> LoadedAdapter:
        """Return the adapter of a request, loaded. Raises ValueError, and changes nothing, if it cannot be."""
        return self._registry().find(lora_request)

    def _registry(self) -> "AdapterRegistry":
        if self.adapters is None:
            raise ValueError("lora_request needs enable_lora=True, which this engine does not have")
        return self.adapters

    def abort_request(self, request_id: str | list[str]) -> Any:
        """End a request and free its blocks. Returns its output so far, or None if it is unknown or finished.

        During a step (a logits processor may call this) the request ends when the step does. A list of ids, as in vLLM,
        gives a list of outputs.
        """
        if isinstance(request_id, list | tuple | set):
            return [self.abort_request(one) for one in request_id]
        with self.one_thread.use(during_step=True):
            request = self.requests.pop(request_id, None)
            if request is None:
                return None
            if self.one_thread.is_stepping:
                self._aborted_meanwhile.append(request)
            else:
                request.abort(self.scheduler)
                self._sweep_adapters()
            return request.make_output()

    def recover(self) -> None:
        """After an interrupt, which can come between any two lines: if no request is left, make a new scheduler."""
        if not self.requests:
            self.reset()

    def get_stats(self) -> EngineStats:
        return make_stats(self.stats, self.scheduler, self.parts.kv_store)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as before a fair measurement. Running requests are not affected."""
        with self.one_thread.use():
            reset_prefix_cache(self.scheduler)
            if self.parts.kv_store is not None:
                self.parts.kv_store.forget_all()

    def deliver(self, requests: Iterable[Request], now: float) -> list[Any]:
        """Return the outputs of requests that have read their tokens, and remove finished requests."""
        outputs = []
        for request in requests:
            if is_finished := request.is_finished:
                request.finished_time = now
                self.stats.num_finished += 1
                self.observed.observe_request(request)
            try:
                if request.stream or is_finished:
                    outputs.append(request.make_output())
            except Exception as error:
                self.faults.end(self, [request.request_id], error)
            finally:
                if is_finished:
                    self.requests.pop(request.request_id, None)
        return outputs

    def _check_request_id(self, request_id: str) -> None:
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {request_id!r}")
        if request_id in self.requests or any(one.request_id == request_id for one in self._aborted_meanwhile):
            raise ValueError(f"request_id {request_id!r} belongs to an unfinished request; choose another")

    def _take_late(self) -> list[Request]:
        """Return requests that ended in a step which failed afterwards."""
        has_failed, self._has_failed = self._has_failed, False
        return [request for request in self.requests.values() if request.is_finished] if has_failed else []

    def _end_step(self) -> None:
        """End the requests that were aborted during the step."""
        for request in self._aborted_meanwhile:
            request.abort(self.scheduler)
        self._aborted_meanwhile.clear()
        self._sweep_adapters()

    def _sweep_adapters(self) -> None:
        """Unload LoRA adapters that are not needed since a request has ended. No step is computed now."""
        if self.adapters is not None and self.adapters.needs_sweep:
            self.adapters.sweep()

    # ---- the parts

    def check_config(self, config: engine.Config) -> Config:
        """Return the options, also if they are of the class of `nanovllm`."""
        if type(config) is engine.Config:
            config = Config(**vars(config))
        if not isinstance(config, Config):
            raise TypeError(f"config must be a Config, got {config!r}")
        engine.check_parts(config)
        return config

    def find_folder(self) -> Path:
        config = self.config
        folder = resolve_model(config.model, config.load_format != "dummy", config.revision)
        read_json(folder / "config.json")  # a file that is broken is reported before the tokenizer reads it
        return folder

    def load_tokenizer(self, folder: Path) -> "PreTrainedTokenizerBase | None":
        config = self.config
        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config, folder)
        if config.chat_template is not None:
            set_chat_template(tokenizer, config.chat_template)
        # here, so that bad ones show before weights are loaded
        self._default_sampling_params = read_default_sampling_params(config, folder)
        return tokenizer

    def make_runner(self, folder: Path) -> ModelRunner:
        check_process()
        self._is_plain = self._runner_class is None and is_plain(self.config, folder)
        if self._is_plain:
            runner = ModelRunner(self.config, folder)
        elif self._runner_class is not None:
            runner = self._runner_class(self.config, folder)
        else:
            runner, self.config = assembly.start_runner(self.config, folder)
        seconds = runner.clock.seconds
        logger.info("started in " + ", ".join(f"{part} {spent:.2f} s" for part, spent in seconds.items()))
        return runner

    def read_eos_token_ids(self, folder: Path) -> frozenset[int]:
        config = self.config
        options = (config.hf_overrides, config.override_generation_config, config.generation_config != "auto")
        if self._is_plain and not any(options):
            return super().read_eos_token_ids(folder)
        return read_end_tokens(config, folder, self.tokenizer, self.runner.shape.vocab_size)

    def make_stats(self) -> SchedulingStats:
        defaults = self._default_sampling_params
        self.parts = Parts(self.config, self.runner, self.tokenizer, self.eos_token_ids, defaults)
        self.description = self.parts.description
        if self.config.has_kv_store:
            self.parts.kv_store = assembly.make_store(self.runner)
        stats = SchedulingStats()
        self.observer: Any = stats
        if self._watcher is not None or self.config.explain_prefix_misses:
            self.observer = assembly.make_observers(stats, self._watcher, self.config.explain_prefix_misses)
        return stats

    def make_block_manager(self) -> BlockManager:
        if self._is_plain:
            sizes = self.parts.num_kv_blocks, self.parts.block_size
            return BlockManager(*sizes, self.config.enable_prefix_caching, self.observer)
        return assembly.make_block_manager(self.parts, self.observer)

    def make_scheduler(self, block_manager: BlockManager) -> Scheduler:
        self.observer.on_start(block_manager)
        if self._is_plain:
            return super().make_scheduler(block_manager)
        return assembly.make_scheduler(self.parts, block_manager, self.requests)
