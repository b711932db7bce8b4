"""The engine: the loop that turns requests into tokens. Start reading at `LLMEngine.step()`.

    prompt ─encode→ Sequence ─schedule()→ SchedulerOutput ─build_batch()→ Batch
       ─model(…, kv_cache)→ logits ─sample()→ token ids ─update()→ advanced sequences ─make_output()→ RequestOutput

One call for each arrow, forward only. This file joins the parts and reads the clock at the arrows; it decides nothing
about memory or order. `LLM` drives it, or your own loop over `add_request` and `step`. `assembly.py` makes the
parts, `intake.py` makes requests, `request.py` makes outputs.
"""

import time
from typing import NamedTuple

from nanovllm.config import Config
from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.engine.assembly import assemble, make_scheduler
from nanovllm.engine.intake import Params, Prompt
from nanovllm.engine.request import Request, note_admitted, read_tokens
from nanovllm.engine.stats import Counters, StepClock, make_stats
from nanovllm.execution.batch import build_batch
from nanovllm.execution.model_runner import ArrivingTokens, StepTokens
from nanovllm.outputs import EngineStats, RequestOutput, StepOutput
from nanovllm.sampling_params import BeamSearchParams
from nanovllm.scheduling.observer import SchedulingStats
from nanovllm.scheduling.overlap import can_schedule_ahead
from nanovllm.scheduling.rollback import roll_back
from nanovllm.scheduling.sequence import Sequence
from nanovllm.scheduling.step import SchedulerOutput


class StepInFlight(NamedTuple):
    """A step that the device computes, or will compute next."""

    scheduled: SchedulerOutput
    tokens: ArrivingTokens
    clock: StepClock


class LLMEngine:
    """Add requests, call `step()` while `has_unfinished_requests()`. Errors of construction are those of `assemble`."""

    def __init__(self, config: Config, decided: SchedulingStats | None = None) -> None:
        self.config = config
        self._parts = parts = assemble(config)
        self.folder, self.model_config = parts.folder, parts.model_config
        self.max_model_len, self.max_num_batched_tokens = parts.max_model_len, parts.max_num_batched_tokens
        self.startup, self.runner, self.description = parts.startup, parts.startup.runner, parts.startup.description
        self.num_kv_blocks, self.num_swap_blocks = parts.startup.num_kv_blocks, parts.startup.num_swap_blocks
        self.block_size, self.enable_overlap = self.runner.backend.block_size, parts.enable_overlap
        self.intake, self.limits, self.tokenizer = parts.intake, parts.intake.limits, parts.intake.tokenizer
        self.default_sampling_params = parts.intake.default_sampling_params
        self._decided = decided or SchedulingStats()
        self.scheduler = make_scheduler(config, parts, self._decided)
        self.counters = Counters()
        self._requests: dict[str, Request] = {}
        self._ahead: StepInFlight | None = None  # launched while the step before it was in flight
        self._is_stepping = False
        self._aborted_meanwhile: list[Request] = []  # by a logits processor, during a step
        self._undelivered: list[Request] = []  # ended by a step that failed afterwards

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLMEngine":
        return cls(engine_args.create_engine_config())

    # ---- the loop

    def step(self) -> StepOutput:
        """Advance the unfinished requests by one forward pass, and return the outputs of those that advanced.

        If a step fails, all steps in flight are taken back: their requests wait, and are computed anew. Requests that
        had ended before the failure are returned by the next step.
        """
        if self._undelivered:
            return self._deliver_late()
        self._is_stepping = True
        try:
            return self._step_overlapped() if self.enable_overlap else self._step()
        except BaseException:
            self._ahead = None
            roll_back(self.scheduler)
            self._undelivered = [request for request in self._requests.values() if request.is_finished]
            raise
        finally:
            self._end_step()

    def _step(self) -> StepOutput:
        """One step after the other: the host waits while the device computes."""
        clock = StepClock()
        with clock.part("schedule_time_s"):
            scheduled = self.scheduler.schedule()
        if not scheduled.chunks:
            return StepOutput()
        note_admitted(self._requests, scheduled, clock.now)
        with clock.part("build_time_s"):
            batch = build_batch(scheduled, self.scheduler.block_manager.block_tables)
        with clock.part("run_time_s"):
            tokens = self.runner.run(batch).wait()
        with clock.part("update_time_s"):
            advanced = self.scheduler.update(scheduled, tokens.token_ids)
        return self._finish_step(scheduled, advanced, tokens, clock)

    def _step_overlapped(self) -> StepOutput:
        """The next step is launched before the tokens of this one are awaited, so that the device is never idle."""
        step = self._ahead or self._launch()
        self._ahead = self._launch() if step and can_schedule_ahead(self.scheduler) else None
        if step is None:
            return StepOutput()
        scheduled, arriving, clock = step
        with clock.part("run_time_s"):
            tokens = arriving.wait()
        with clock.part("update_time_s"):
            advanced = self.scheduler.update(scheduled, tokens.token_ids)
        return self._finish_step(scheduled, advanced, tokens, clock)

    def _launch(self) -> StepInFlight | None:
        """The first half of a step, up to the forward pass; None if there is nothing to do."""
        clock = StepClock()
        with clock.part("schedule_time_s"):
            scheduled = self.scheduler.schedule()
        if not scheduled.chunks:
            return None
        note_admitted(self._requests, scheduled, clock.now)
        with clock.part("build_time_s"):
            batch = build_batch(scheduled, self.scheduler.block_manager.block_tables)
        with clock.part("run_time_s"):
            arriving = self.runner.run(batch)
        return StepInFlight(scheduled, arriving, clock)

    def _finish_step(
        self, scheduled: SchedulerOutput, advanced: list[tuple[int, Sequence]], tokens: StepTokens, clock: StepClock
    ) -> StepOutput:
        """Requests get their tokens, and the step's counts and times are noted."""
        self.counters.count_step(scheduled, len(advanced), sum(clock.seconds.values()))
        with clock.part("output_time_s"):
            requests = read_tokens(self._requests, scheduled, advanced, tokens)
            for request in requests:
                request.end_step(self.scheduler, clock.now)
            outputs = self._deliver(requests, clock.now)
        self._decided.on_step_end(scheduled, clock.seconds)
        return StepOutput(
            outputs=outputs,
            num_scheduled_tokens=scheduled.num_scheduled_tokens,
            num_prefill_tokens=scheduled.num_prefill_tokens,
            num_decode_tokens=scheduled.num_decodes,
            num_seqs=len(scheduled.chunks),
            num_preempted=len(scheduled.preempted),
            **clock.seconds,
        )

    def has_unfinished_requests(self) -> bool:
        """Whether there is something to `step()` for: a request, or a step in flight whose requests are all gone."""
        return bool(self._requests) or self._ahead is not None

    def settle(self) -> None:
        """If no request is left, wait for the step in flight."""
        if self._ahead is not None and not self._requests:
            self.step()

    # ---- requests come, and go

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: Params | None = None,
        priority: int = 0,
        stream: bool = True,
    ) -> None:
        """Check and queue one request. With `stream=False` steps return its output only when it has finished.

        `priority` is kept with the sequence for scheduling policies; first come, first served does not look at it.
        Raises ValueError or TypeError before anything changes.
        """
        number = self.counters.num_requests
        self._check_request_id(request_id)
        self._queue(self.intake.make_request(request_id, prompt, sampling_params, priority, stream, number))
        self.counters.num_requests += 1

    def add_beam_search(self, request_id: str, prompt: Prompt, params: BeamSearchParams) -> None:
        """Check and queue one beam search; a step returns its `BeamSearchOutput` when it has finished."""
        self._check_request_id(request_id)
        self._queue(self.intake.make_beam_search(request_id, prompt, params))

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at once and free its blocks; returns its output so far, or None if it is unknown or over."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self._undelivered = [other for other in self._undelivered if other is not request]
        if self._is_stepping:  # the scheduler is at work: `_end_step` ends the request
            self._aborted_meanwhile.append(request)
        else:
            request.abort(self.scheduler, time.monotonic())
        return request.make_output()

    def recover(self) -> None:
        """After an interrupt, which can come between any two lines: if no request is left, make a new scheduler."""
        if not self._requests:
            self.scheduler = make_scheduler(self.config, self._parts, self._decided)
            self._ahead = None
            self._is_stepping = False
            self._aborted_meanwhile.clear()
            self._undelivered.clear()

    def get_stats(self) -> EngineStats:
        return make_stats(self.counters, self._decided, self.scheduler)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as before a fair measurement. Requests that run are not disturbed."""
        self.scheduler.block_manager.prefix_cache.reset()

    # ---- inside

    def _check_request_id(self, request_id: str) -> None:
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {request_id!r}")
        if request_id in self._requests or any(one.request_id == request_id for one in self._aborted_meanwhile):
            raise ValueError(f"request_id {request_id!r} belongs to an unfinished request; choose another")

    def _queue(self, request: Request) -> None:
        self.scheduler.add(request.seqs[0])
        self._requests[request.request_id] = request
        self.counters.prompt_tokens += len(request.prompt_token_ids)

    def _deliver(self, requests: list[Request], now: float) -> list[RequestOutput]:
        """Outputs of requests that have read their tokens; finished requests are removed."""
        outputs = []
        for request in requests:
            if is_finished := request.is_finished:
                request.finished_time = now
                self.counters.count_finished(request)
                del self._requests[request.request_id]
            if request.stream or is_finished:
                outputs.append(request.make_output())
        return outputs

    def _deliver_late(self) -> StepOutput:
        """Outputs of requests that ended in a step which failed afterwards."""
        for request in self._undelivered:
            request.read_rest()
        outputs = self._deliver(self._undelivered, time.monotonic())
        self._undelivered = []
        return StepOutput(outputs=outputs)

    def _end_step(self) -> None:
        """Requests that were aborted during the step end now."""
        self._is_stepping = False
        for request in self._aborted_meanwhile:
            request.abort(self.scheduler, time.monotonic())
        self._aborted_meanwhile.clear()
