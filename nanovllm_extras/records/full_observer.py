"""What extras notify an observer of, and what the engine counts.

`SchedulingStats` counts. It also remembers which blocks the steps in flight are to fill, so that `roll_back.py` can
forget them. It is the engine's observer, unless more looks on: then it is the first of `watching.py`'s `Observers`.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanovllm import observer, sequence
from nanovllm.scheduler import Step
from nanovllm_extras.records.full_sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.block_manager import BlockManager
    from nanovllm_extras.records.prefix_miss import PrefixMiss


class Observer(observer.Observer):
    """The core's events, and those of extras."""

    def on_start(self, blocks: "BlockManager") -> None:
        """A scheduler starts with `blocks`, all of them free. Sequences and blocks of an earlier scheduler are gone."""

    def on_fork_apart(self, parent: Sequence, child: Sequence) -> None:
        """`child` is a copy of `parent` that shares no blocks: it waits, and will be computed again."""

    def on_step_end(self, step: Step, seconds: Mapping[str, float]) -> None:
        """The engine has made the outputs of `step`. `seconds` has the times of its parts, named as in `StepOutput`."""

    def on_roll_back(self) -> None:
        """All steps in flight have failed."""

    def on_swap_out(self, seq: Sequence, host_block_ids: list[int]) -> None:
        """`seq`, which is about to be preempted, has its K and V copied to these blocks in host memory."""

    def on_give_back(self, seq: Sequence, block_ids: list[int]) -> None:
        """`seq` gives up blocks behind the window of its layers. In a block table the null block replaces them."""

    def on_load_blocks(self, seq: Sequence, by_tier: dict[str, list[int]], num_tokens: int) -> None:
        """The K/V store fills blocks of `seq` before the step: `num_tokens` of its tokens are not computed.

        by_tier: the name of each tier that had blocks -> the ids of the blocks that are filled.
        """

    # Blocks in groups of layers with a window (`layer_groups.py`). The core's events are about group 0, which sees all
    # tokens. A sequence has a block table for each of the groups 1 …; entries that no event names are null blocks.

    def on_take_in_group(self, seq: Sequence, group: int, place: int, block_id: int, is_evicted: bool) -> None:
        """As `on_take_block`. The block becomes entry `place` of the group's block table."""

    def on_share_in_group(self, seq: Sequence, group: int, place: int, block_id: int) -> None:
        """As `on_share_block`. The block becomes entry `place` of the group's block table."""

    def on_copy_in_group(self, seq: Sequence, group: int, source: int, destination: int) -> None:
        """As `on_copy_block`. `destination`, which was taken behind the table's end, replaces `source`."""

    def on_register_in_group(self, seq: Sequence, group: int, block_id: int, block_hash: int, serial: int) -> None:
        """A prefix hit can now use `block_id`. Group 0 has a block with the same tokens, hash and serial number."""

    def on_forget_in_group(self, block_id: int) -> None:
        """`block_id` is no longer in the prefix cache."""

    def on_take_slot(self, seq: Sequence, slot: int, source: int) -> None:
        """`seq` owns a slot of the pool of states (`memory/slots.py`). The state in `source` will be copied to it.

        `source` is the slot of a snapshot, of the parent in a fork, or, if it is negative, in host memory. It is 0 if
        `seq` starts from a state of zeros.
        """

    def on_move_slot(self, seq: Sequence, slot: int) -> None:
        """`seq` owns `slot` instead of its old slot. To a negative one, in host memory, the state will be copied."""

    def on_snapshot(self, seq: Sequence, slot: int, block_id: int) -> None:
        """The state of `seq` after its computed tokens, which end with `block_id`, will be copied to `slot`."""

    def on_drop_snapshot(self, slot: int, why: str) -> None:
        """The snapshot in `slot` is dropped.

        why: `evicted` (its block is no longer cached), `slot` (the slot is needed), `interval` (a newer snapshot of
        the same sequence replaces it) or `forgotten` (a step has failed, or the prefix cache has been reset)
        """

    def on_verify(self, seq: Sequence, num_drafts: int, num_accepted: int, block_ids: list[int]) -> None:
        """A step has computed drafts (`speculation/`): `seq` keeps the accepted ones, and gives up blocks."""

    def on_reset_prefix_cache(self) -> None:
        """The prefix cache has forgotten all blocks."""

    def on_miss(self, seq: Sequence, misses: "list[PrefixMiss]") -> None:
        """`seq` has been admitted for the first time, and `misses` say why it must compute tokens of its prompt."""


@dataclass
class Counts(observer.Counters):
    """The core's counters, and those of extras. The observer counts decisions, the engine requests and steps."""

    num_window_blocks: int = 0
    """Blocks that sequences have given back because they were behind the window of all layers, or of a group."""
    num_swaps: int = 0
    """Preemptions that copied K and V to host memory."""
    num_finished: int = 0
    kv_tokens_stored: int = 0
    """Summed over the steps: tokens in the cache; a shared block counts once."""
    kv_slots_reserved: int = 0
    """Summed over the steps: slots of the blocks that sequences own."""
    prefill_step_tokens: int = 0
    """Tokens computed in steps with a prefill chunk. `prefill_step_time_s` is the time of these steps."""
    prefill_step_time_s: float = 0.0
    decode_step_tokens: int = 0
    """Tokens computed in steps without a prefill chunk. `decode_step_time_s` is the time of these steps."""
    decode_step_time_s: float = 0.0
    num_drafts: int = 0
    """Verifications of drafts. Of `num_draft_tokens` draft tokens, `num_accepted_tokens` were accepted."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prefix_cache_miss_tokens: Mapping[str, int] = field(default_factory=dict)
    """Cause -> number of prompt tokens that were not in the prefix cache; empty without `explain_prefix_misses`."""
    num_failed_observers: int = 0
    """Observers that have failed and are not notified any more, such as a recording whose disk is full."""

    @property
    def waste(self) -> float:
        """Share of the reserved KV slots that held no token, averaged over the steps."""
        return 1 - self.kv_tokens_stored / self.kv_slots_reserved if self.kv_slots_reserved else 0.0


class SchedulingStats(Counts, observer.Stats, Observer):
    """Counts what is scheduled. `LLMEngine` adds the requests and the times."""

    def __init__(self) -> None:
        super().__init__()
        self.new_blocks: set[int] = set()  # registered for the step that is being scheduled
        self._admitted: list[Sequence] = []  # by that step
        # of each step in flight: tokens stored, slots, used blocks, and the blocks that were registered for it
        self._in_flight: deque[tuple[int, int, int, set[int]]] = deque()

    def blocks_in_flight(self) -> set[int]:
        """Return the blocks that are in the prefix cache although a step in flight is still to fill them."""
        return self.new_blocks.union(*[new_blocks for *_, new_blocks in self._in_flight])

    def take_admitted(self) -> list[Sequence]:
        """Return the sequences that have been admitted since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def on_start(self, blocks: "BlockManager") -> None:
        self._in_flight.clear()
        self.new_blocks = set()
        self._admitted = []

    def on_add(self, seq: Sequence) -> None:
        if seq.sample_index == 0:  # a request whose samples cannot all run at once is queued in several parts
            super().on_add(seq)

    def on_admit(self, seq: Sequence) -> None:
        super().on_admit(seq)
        self._admitted.append(seq)

    def on_register_block(self, seq: Sequence, block_id: int, block_hash: int, serial: int) -> None:
        self.new_blocks.add(block_id)

    def on_swap_out(self, seq: Sequence, host_block_ids: list[int]) -> None:
        self.num_swaps += 1

    def on_give_back(self, seq: Sequence, block_ids: list[int]) -> None:
        self.num_window_blocks += len(block_ids)

    def on_load_blocks(self, seq: Sequence, by_tier: dict[str, list[int]], num_tokens: int) -> None:
        if seq.num_cached_tokens is None:  # `on_admit`, which comes next, adds all cached tokens
            self.prefix_cache_hit_tokens -= num_tokens

    def on_verify(self, seq: Sequence, num_drafts: int, num_accepted: int, block_ids: list[int]) -> None:
        self.num_drafts += num_drafts > 0
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted

    def on_schedule(self, step: Step, running: list[Sequence], blocks: "BlockManager") -> None:
        num_used_blocks = blocks.num_used_blocks
        num_slots, num_stored = num_used_blocks * blocks.block_size, count_stored_tokens(running, blocks)
        self._in_flight.append((num_stored, num_slots, num_used_blocks, self.new_blocks))
        self.new_blocks = set()

    def on_update(self, step: Step, new_token_ids: list[int]) -> None:
        num_stored, num_slots, num_used_blocks, _ = self._in_flight.popleft()
        self.kv_tokens_stored += num_stored
        self.kv_slots_reserved += num_slots
        self.peak_used_blocks = max(self.peak_used_blocks, num_used_blocks)

    def on_finish(self, seq: Sequence) -> None:
        """Count the last blocks of `seq` for the newest step in flight, if there is one: that step may fill them."""
        if self._in_flight:
            self._in_flight[-1][-1].update(self.new_blocks)
        self.new_blocks.clear()

    def on_miss(self, seq: Sequence, misses: "list[PrefixMiss]") -> None:
        counts = dict(self.prefix_cache_miss_tokens)  # a new one: statistics of before keep the old one
        for miss in misses:
            counts[miss.cause] = counts.get(miss.cause, 0) + miss.end - miss.start
        self.prefix_cache_miss_tokens = counts

    def on_roll_back(self) -> None:
        self._in_flight.clear()
        self.new_blocks.clear()
        self._admitted.clear()

    def count_failed_observer(self) -> None:
        self.num_failed_observers += 1

    def count_step(self, step: Step, num_advanced: int, time_s: float) -> None:
        """Count a step that has run, and has brought a token to `num_advanced` sequences."""
        self.steps += 1
        self.scheduled_tokens += step.num_scheduled_tokens
        self.generation_tokens += num_advanced
        if step.num_scheduled_tokens > step.num_decodes:
            self.prefill_step_tokens += step.num_scheduled_tokens
            self.prefill_step_time_s += time_s
        else:
            self.decode_step_tokens += step.num_scheduled_tokens
            self.decode_step_time_s += time_s


def count_stored_tokens(running: Collection[sequence.Sequence], blocks: "BlockManager") -> int:
    """Count the tokens in owned blocks. A block that several sequences share counts once."""
    num_groups = getattr(blocks, "num_groups", 1)  # of layers, each of which has a last block of every sequence
    size = blocks.block_size
    return blocks.num_used_blocks * size - num_groups * count_empty_slots(running, size)


def count_empty_slots(running: Collection[sequence.Sequence], block_size: int) -> int:
    """Count the slots of owned blocks that hold no token: all blocks are full except the last one of each sequence.

    Forks may share their last block, whose empty slots count once.
    """
    num_empty = sum([-seq.num_computed_tokens % block_size for seq in running])
    sharing = [seq for seq in running if seq.has_shared_tail]
    shared_tails = {seq.block_table[-1]: -seq.num_computed_tokens % block_size for seq in sharing}
    return num_empty - sum([-seq.num_computed_tokens % block_size for seq in sharing]) + sum(shared_tails.values())
