"""The engine: the loop that turns requests into tokens. Start reading at `LLMEngine.step()`.

    prompt ─encode→ Sequence ─schedule()→ SchedulerOutput ─build_batch()→ Batch
       ─model(…, kv_cache)→ logits ─sample()→ token ids ─update()→ advanced sequences ─make_output()→ RequestOutput

One call for each arrow, forward only. This file joins the parts and reads the clock at the arrows; it decides nothing
about memory or order. `LLM` drives it, or your own loop over `add_request` and `step`. `assembly.py` makes the parts,
`input_processor.py` makes requests, `request.py` makes outputs.
"""

import time
from typing import NamedTuple

from nanovllm.assembly import assemble, make_scheduler, watched_by
from nanovllm.batch import build_batch
from nanovllm.checks import OfExtra
from nanovllm.config import Config
from nanovllm.input_processor import InputProcessor, Params, Prompt
from nanovllm.model_runner import ArrivingTokens, StepTokens
from nanovllm.observer import Observer, SchedulingStats
from nanovllm.outputs import EngineStats, RequestOutput, StepOutput
from nanovllm.request import Request, note_admitted, read_tokens
from nanovllm.sequence import Sequence
from nanovllm.stats import LapClock, Observations, make_stats
from nanovllm.step import SchedulerOutput


class LaunchedStep(NamedTuple):
    """A step that the device computes, and the tokens that will come of it."""

    scheduled: SchedulerOutput
    tokens: ArrivingTokens
    clock: LapClock


class LLMEngine:
    """Add requests, call `step()` while `has_unfinished_requests()`. Errors of construction are those of `assemble`.

    `parts` holds what the engine is made of, and what was found out when it started.
    """

    from_engine_args = OfExtra("vllm/engine_args")

    def __init__(self, config: Config, observer: Observer | None = None) -> None:
        self.config = config
        self.parts = assemble(config)
        self.runner = self.parts.runner
        self.tokenizer = self.parts.tokenizer
        self.description = self.parts.description  # what computes, and why that was chosen
        self.observer = SchedulingStats() if observer is None else watched_by(observer)
        self.observed = Observations()
        self._begin()
        self.input_processor = InputProcessor(self.parts, self.scheduler.block_manager.capacity)

    def _begin(self) -> None:
        """With no request and an empty scheduler."""
        # `_next_step` is a function of the engine: `_launch` itself, or overlap's `Ahead`, which calls it. (A bound
        # method would be a circle of references, and keep the model's memory until Python looks for circles.)
        self.scheduler, self._next_step = make_scheduler(self.parts, self.observer, LLMEngine._launch)
        self._requests: dict[str, Request] = {}
        self._is_stepping = False
        self._aborted_meanwhile: list[Request] = []  # by a logits processor, during a step
        self._has_failed = False  # the last step

    # ---- the loop

    def step(self) -> StepOutput:
        """Advance the unfinished requests by one forward pass, and return the outputs of those that advanced.

        If a step fails, its requests keep their tokens, wait, and are computed anew. Requests that had ended before the
        failure are returned by the next step.
        """
        self._is_stepping = True
        try:
            if late := self._take_late():
                return StepOutput(self._deliver(late, time.monotonic()))
            step = self._next_step(self)
            return StepOutput() if step is None else self._complete(step)
        except BaseException:
            self.scheduler.roll_back()
            self._has_failed = True
            raise
        finally:
            self._end_step()

    def _launch(self) -> LaunchedStep | None:
        """The first half of a step, up to the forward pass; None if there is nothing to do."""
        clock = LapClock()
        scheduled = self.scheduler.schedule()
        clock.lap("schedule_time_s")
        if not scheduled.chunks:
            return None
        note_admitted(self._requests, scheduled, clock.now)
        return self._run(scheduled, clock)

    def _run(self, scheduled: SchedulerOutput, clock: LapClock) -> LaunchedStep:
        batch = build_batch(scheduled, self.scheduler.block_manager.block_tables)
        clock.lap("build_time_s")
        tokens = self.runner.run(batch)
        clock.lap("run_time_s")
        return LaunchedStep(scheduled, tokens, clock)

    def _complete(self, step: LaunchedStep) -> StepOutput:
        """The second half: wait for the tokens, append them to their sequences, and give them to their requests."""
        scheduled, arriving, clock = step
        clock.resume()  # with overlap, another step has been launched since
        tokens = arriving.wait()
        clock.lap("run_time_s")
        advanced = self.scheduler.update(scheduled, tokens.token_ids)
        clock.lap("update_time_s")
        self.observer.count_step(scheduled, len(advanced), sum(clock.seconds.values()))
        outputs = self._make_outputs(scheduled, advanced, tokens, clock.now)
        clock.lap("output_time_s")
        self.observer.on_step_end(scheduled, clock.seconds)
        return StepOutput(
            outputs=outputs,
            num_scheduled_tokens=scheduled.num_scheduled_tokens,
            num_prefill_tokens=scheduled.num_prefill_tokens,
            num_decode_tokens=scheduled.num_decodes,
            num_seqs=len({seq for seq, _, _ in scheduled.chunks}),
            num_preempted=len(scheduled.preempted),
            **clock.seconds,
        )

    def _make_outputs(
        self, scheduled: SchedulerOutput, advanced: list[tuple[int, Sequence]], tokens: StepTokens, now: float
    ) -> list[RequestOutput]:
        requests = read_tokens(self._requests, scheduled, advanced, tokens)
        for request in requests:
            request.end_step(self.scheduler, now)
        return self._deliver(requests, now)

    def has_unfinished_requests(self) -> bool:
        """Whether there is something to `step()` for."""
        return bool(self._requests) or self.scheduler.has_unfinished()

    def settle(self) -> None:
        """If no request is left, finish what the scheduler still has in work."""
        if not self._requests and self.scheduler.has_unfinished():
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
        self._check_request_id(request_id)
        number = self.observer.num_requests
        request = self.input_processor.make_request(request_id, prompt, sampling_params, priority, stream, number)
        self.scheduler.add(request.seqs[0])
        self._requests[request_id] = request
        self.observer.num_requests += 1
        self.observer.prompt_tokens += len(request.prompt_token_ids)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request and free its blocks; returns its output so far, or None if it is unknown or over.

        During a step (a logits processor may call this) it ends when the step does.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if self._is_stepping:
            self._aborted_meanwhile.append(request)
        else:
            request.abort(self.scheduler, time.monotonic())
        return request.make_output()

    def recover(self) -> None:
        """After an interrupt, which can come between any two lines: if no request is left, make a new scheduler."""
        if not self._requests:
            self._begin()

    def get_stats(self) -> EngineStats:
        return make_stats(self.observer, self.scheduler)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as before a fair measurement. Requests that run are not disturbed."""
        self.scheduler.block_manager.prefix_cache.reset()

    # ---- inside

    def _check_request_id(self, request_id: str) -> None:
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {request_id!r}")
        if request_id in self._requests or any(one.request_id == request_id for one in self._aborted_meanwhile):
            raise ValueError(f"request_id {request_id!r} belongs to an unfinished request; choose another")

    def _deliver(self, requests: list[Request], now: float) -> list[RequestOutput]:
        """Outputs of requests that have read their tokens; finished requests are removed."""
        outputs = []
        for request in requests:
            if is_finished := request.is_finished:
                request.finished_time = now
                self.observer.num_finished += 1
                self.observed.observe_request(request)
                del self._requests[request.request_id]
            if request.stream or is_finished:
                outputs.append(request.make_output())
        return outputs

    def _take_late(self) -> list[Request]:
        """Requests that ended in a step which failed afterwards."""
        has_failed, self._has_failed = self._has_failed, False
        return [request for request in self._requests.values() if request.is_finished] if has_failed else []

    def _end_step(self) -> None:
        """Requests that were aborted during the step end now."""
        self._is_stepping = False
        for request in self._aborted_meanwhile:
            request.abort(self.scheduler, time.monotonic())
        self._aborted_meanwhile.clear()
