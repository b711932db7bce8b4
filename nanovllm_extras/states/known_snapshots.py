"""Snapshots of sequences whose newest tokens are not known yet: drafts, or sampled by a step in flight (`overlap.py`).

The prefix cache learns only known tokens. So a block of outputs may be registered later than the step that fills it is
scheduled, and its snapshot is taken then, before another step changes the state:

    blocks of 4, a snapshot after every second block; position 7 is sampled by step N - 1

    step N        computes position 7, whose token is not known: no block is registered
    step N - 1    has run, so the token of position 7 is known
    step N + 1    first, `settle` registers the block. Its copies of states run after step N, and before its own tokens
"""

from typing import Any

from nanovllm.scheduler import Step
from nanovllm_extras.known_tokens import KnownTokensPrefixCache
from nanovllm_extras.overlap import OverlappedScheduler
from nanovllm_extras.states.slots import SnapshotCache, StateBlockManager, StateScheduler


class KnownSnapshotCache(KnownTokensPrefixCache, SnapshotCache):
    """Registers only blocks whose tokens are known, and finds only prefixes with a snapshot."""


class KnownStateBlockManager(StateBlockManager):
    """Takes the snapshots of blocks whose tokens have become known, in `settle`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        plain = self.prefix_cache
        self.prefix_cache = KnownSnapshotCache(self.block_size, self.observer, plain.is_enabled, plain.free_slots)

    def settle(self, seq: Any) -> None:
        """Register blocks whose tokens have become known, and take a snapshot if one is due."""
        self.prefix_cache.register(seq, seq.num_computed_tokens)
        self.take_snapshot(seq)


class OverlappedStateScheduler(OverlappedScheduler, StateScheduler):
    """Schedules the next step while a step runs. Its block manager is a `KnownStateBlockManager`.

    A sequence that ends is in the step that was launched ahead, too, and that step still writes to its slot. The device
    computes in the order of the launches. So the slot's next owner writes later, and starts from zeros or from a copy.
    """

    block_manager: KnownStateBlockManager

    def schedule(self) -> Step:
        for seq in self.running:
            self.block_manager.settle(seq)
        return super().schedule()

    def finish(self, seq: Any, finish_reason: str, stop_reason: int | str | None = None) -> None:
        if seq.block_table.length:  # else it waits, or is swapped out
            self.block_manager.settle(seq)
        super().finish(seq, finish_reason, stop_reason)
