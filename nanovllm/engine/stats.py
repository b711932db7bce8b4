"""What the engine has done so far: counts over its life, gauges of this moment, and the times of a step's parts."""

import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, fields

from nanovllm.engine.request import Request
from nanovllm.outputs import EngineStats, RequestMetrics
from nanovllm.scheduling.observer import SchedulingStats
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.step import SchedulerOutput

# upper bounds of the buckets in which values are counted: seconds, or tokens
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

BOUNDS: Mapping[str, tuple[float, ...]] = {
    "ttft": TTFT,
    "inter_token_latencies": ITL,
    "tpot": ITL,
    "e2e_latency": LATENCY,
    "queue_time": LATENCY,
    "prefill_time": LATENCY,
    "decode_time": LATENCY,
    "num_prompt_tokens": TOKENS,
    "num_output_tokens": TOKENS,
}
"""What is observed of each request when it ends, most of it by the names of `RequestMetrics`."""


class Observations:
    """How large the values were, in constant memory. `extras/vllm/metrics.py` makes histograms of them."""

    def __init__(self) -> None:
        self.counts = {name: [0] * (len(bounds) + 1) for name, bounds in BOUNDS.items()}  # the last: beyond all bounds
        self.sums = dict.fromkeys(BOUNDS, 0.0)
        self.num_ended = {"stop": 0, "length": 0, "abort": 0}

    def observe(self, times: RequestMetrics, num_prompt_tokens: int, num_output_tokens: int, reason: str) -> None:
        """`num_output_tokens` are those of all samples; the request for an embedding has none."""
        self.num_ended[reason] += 1
        self._add("num_prompt_tokens", num_prompt_tokens)
        self._add("num_output_tokens", num_output_tokens)
        for name in ("queue_time", "prefill_time", "e2e_latency"):
            self._add(name, getattr(times, name))
        if num_output_tokens:
            for name in ("ttft", "decode_time", "tpot"):
                self._add(name, getattr(times, name))
            for seconds in times.inter_token_latencies:
                self._add("inter_token_latencies", seconds)

    def note_abort(self) -> None:
        """A request has gone before anything was known of it."""
        self.num_ended["abort"] += 1

    def _add(self, name: str, value: float | None) -> None:
        if value is not None:
            self.counts[name][bisect_left(BOUNDS[name], value)] += 1
            self.sums[name] += value


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
        self.observed = Observations()

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
        num_failed_observers=decided.num_failed_observers,
        budget_used=counters.scheduled_tokens / max(1, counters.steps * scheduler.max_num_batched_tokens),
        **{one.name: getattr(counters, one.name) for one in fields(counters)},
    )
