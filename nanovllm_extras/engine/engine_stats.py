"""What `LLM.get_stats()` returns: the counters of an engine, and gauges."""

from dataclasses import dataclass, fields

from nanovllm.scheduler import Scheduler
from nanovllm_extras.kv_store.store import KVStore, StoreStats
from nanovllm_extras.memory.slots import StateStats
from nanovllm_extras.records.full_observer import Counts


@dataclass(kw_only=True)
class EngineStats(Counts):
    """What the engine has counted so far, and gauges of this moment."""

    num_kv_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    budget_used: float
    """Share of the steps' token budgets that was scheduled."""
    kv_store: StoreStats | None = None
    """Of the K/V store, if there is one."""
    states: StateStats | None = None  # of a model with recurrent states


def make_stats(counts: Counts, scheduler: Scheduler, kv_store: KVStore | None = None) -> EngineStats:
    blocks = scheduler.block_manager
    return EngineStats(
        **{one.name: getattr(counts, one.name) for one in fields(Counts)},
        num_kv_blocks=blocks.num_blocks,
        num_free_blocks=blocks.num_free_blocks,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        budget_used=counts.scheduled_tokens / max(1, counts.steps * scheduler.max_num_batched_tokens),
        kv_store=None if kv_store is None else kv_store.get_stats(),
        states=getattr(blocks, "state_stats", None),
    )
