"""What has the engine done so far? Counts over its life, gauges of this moment, and the times of a step's parts."""

import time
from dataclasses import dataclass, fields

from nanovllm.engine.metrics import RequestObservations
from nanovllm.engine.request import Request
from nanovllm.outputs import EngineStats
from nanovllm.scheduling.observer import SchedulingStats
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.step import SchedulerOutput


class StepClock:
    """Seconds of each part of a step: `with clock.part("schedule_time_s"): …`; parts of one name add up.

    `now` is the last reading, in seconds of `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.now = time.monotonic()
        self._name = ""
        self._start = 0.0

    def part(self, name: str) -> "StepClock":
        self._name = name
        return self

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.now = time.monotonic()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + self.now - self._start


@dataclass
class Counters:
    """What the engine counts; `SchedulingStats` counts the scheduler's decisions. `EngineStats` explains the fields."""

    steps: int = 0
    num_requests: int = 0
    scheduled_tokens: int = 0
    num_finished: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefill_step_tokens: int = 0
    prefill_step_time_s: float = 0.0
    decode_step_tokens: int = 0
    decode_step_time_s: float = 0.0

    def __post_init__(self) -> None:
        self.observed = RequestObservations()  # no count: `get_metrics` shows it

    def count_finished(self, request: Request) -> None:
        self.num_finished += 1
        num_output_tokens = sum([seq.num_output_tokens for seq in request.seqs]) if request.gives_tokens else 0
        reason = request.seqs[0].finish_reason
        # of a beam search, the first beam may have been dropped long before
        reason = reason if reason in ("stop", "length") else "stop"
        self.observed.observe(request.make_metrics(), len(request.prompt_token_ids), num_output_tokens, reason)

    def count_step(self, scheduled: SchedulerOutput, num_advanced: int, time_s: float) -> None:
        self.steps += 1
        self.scheduled_tokens += scheduled.num_scheduled_tokens
        self.generation_tokens += num_advanced
        if scheduled.num_prefill_tokens:
            self.prefill_step_tokens += scheduled.num_scheduled_tokens
            self.prefill_step_time_s += time_s
        else:
            self.decode_step_tokens += scheduled.num_scheduled_tokens
            self.decode_step_time_s += time_s


def make_stats(counters: Counters, decided: SchedulingStats, scheduler: Scheduler) -> EngineStats:
    blocks = scheduler.block_manager
    return EngineStats(
        num_kv_blocks=blocks.num_blocks,
        num_free_blocks=blocks.num_free_blocks,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_preemptions=decided.num_preemptions,
        num_swaps=decided.num_swaps,
        prefix_cache_query_tokens=decided.prefix_cache_query_tokens,
        prefix_cache_hit_tokens=decided.prefix_cache_hit_tokens,
        peak_used_blocks=decided.peak_used_blocks,
        num_window_blocks=decided.num_window_blocks,
        kv_tokens_stored=decided.kv_tokens_stored,
        kv_slots_reserved=decided.kv_slots_reserved,
        budget_used=counters.scheduled_tokens / max(1, counters.steps * scheduler.max_num_batched_tokens),
        **{one.name: getattr(counters, one.name) for one in fields(counters)},
    )
