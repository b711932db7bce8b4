"""What has the engine done so far? Counts over its life, and the gauges of a moment, for `LLMEngine.get_stats`."""

from dataclasses import dataclass

from nanovllm.outputs import EngineStats
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.step import SchedulerOutput


@dataclass
class Counters:
    """The engine's own; the scheduler counts what it decides itself. `EngineStats` says what they mean."""

    steps: int = 0
    num_requests: int = 0
    scheduled_tokens: int = 0
    num_finished: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    peak_used_blocks: int = 0
    kv_tokens_stored: int = 0
    kv_slots_reserved: int = 0
    prefill_step_tokens: int = 0
    prefill_step_time_s: float = 0.0
    decode_step_tokens: int = 0
    decode_step_time_s: float = 0.0

    def count_step(self, scheduled: SchedulerOutput, num_advanced: int, block_size: int, time_s: float) -> None:
        self.steps += 1
        self.scheduled_tokens += scheduled.num_scheduled_tokens
        self.generation_tokens += num_advanced
        self.kv_tokens_stored += scheduled.kv_tokens_stored
        self.kv_slots_reserved += scheduled.kv_slots_reserved
        self.peak_used_blocks = max(self.peak_used_blocks, scheduled.kv_slots_reserved // block_size)
        if scheduled.num_prefill_tokens:
            self.prefill_step_tokens += scheduled.num_scheduled_tokens
            self.prefill_step_time_s += time_s
        else:
            self.decode_step_tokens += scheduled.num_scheduled_tokens
            self.decode_step_time_s += time_s


def make_stats(counters: Counters, scheduler: Scheduler) -> EngineStats:
    blocks = scheduler.block_manager
    return EngineStats(
        num_kv_blocks=blocks.num_blocks,
        num_free_blocks=blocks.num_free_blocks,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_preemptions=scheduler.num_preemptions,
        num_swaps=scheduler.num_swaps,
        prefix_cache_query_tokens=scheduler.prefix_cache_query_tokens,
        prefix_cache_hit_tokens=scheduler.prefix_cache_hit_tokens,
        budget_used=counters.scheduled_tokens / max(1, counters.steps * scheduler.max_num_batched_tokens),
        **vars(counters),
    )
