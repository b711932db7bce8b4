"""What do the scheduler and the block manager decide, and why? They tell an observer, which decides nothing.

`Observer` does nothing: a subclass overrides what it wants to see. `SchedulingStats`, the engine's observer, counts.
None of the methods is called for every token, so watching costs a step little.
"""

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nanovllm.outputs import Counts
from nanovllm.sequence import Sequence
from nanovllm.step import SchedulerOutput

if TYPE_CHECKING:  # it imports this file
    from nanovllm.block_manager import BlockManager


class Observer:
    """Arguments are valid during the call; an observer must not change them."""

    def on_start(self, blocks: "BlockManager") -> None:
        """A scheduler begins with `blocks`, all of them free; what the scheduler before it knew is gone."""

    def on_add(self, seq: Sequence) -> None:
        """`seq` is queued for the first time; its children wait with it."""

    def on_wait(self, seq: Sequence, has_place: bool, num_needed_blocks: int, num_reserved_blocks: int) -> None:
        """`seq` is first in the queue, and is not admitted: it has no place among the `max_num_seqs` that run, or too
        few blocks are free. Of the free ones, `num_reserved_blocks` are left to running sequences.
        """

    def on_admit(self, seq: Sequence) -> None:
        """`seq` runs from this step on; `seq.num_computed_tokens` of its tokens are cached, or are swapped in.

        `seq.num_cached_tokens` is still None for a sequence that is admitted for the first time.
        """

    def on_preempt(self, seq: Sequence, host_block_ids: list[int], needy: Sequence) -> None:
        """`seq` has given up its blocks for `needy`. Its K and V go to these blocks in host memory, if any."""

    def on_fork(self, parent: Sequence, child: Sequence, is_shared: bool) -> None:
        """`child` is a new sequence with the computed tokens of `parent`: it shares their blocks, or waits."""

    def on_schedule(self, step: SchedulerOutput, running: list[Sequence], blocks: "BlockManager") -> None:
        """`step` is decided; `running` and `blocks` are the state after this decision."""

    def on_update(self, step: SchedulerOutput, new_token_ids: list[int]) -> None:
        """`step` has run, and has drawn a token for each of `step.samples`; ended sequences have dropped theirs."""

    def on_step_end(self, step: SchedulerOutput, seconds: Mapping[str, float]) -> None:
        """The engine has done its part too; `seconds` has the times of the step by their names in `StepOutput`."""

    def on_roll_back(self) -> None:
        """All steps in flight have failed."""

    def on_finish(self, seq: Sequence) -> None:
        """`seq` has ended, for `seq.finish_reason`."""

    def on_take_block(self, seq: Sequence, block_id: int, is_evicted: bool) -> None:
        """`seq` owns a block that was free; with `is_evicted` the prefix cache forgets the block's contents."""

    def on_share_block(self, seq: Sequence, block_id: int) -> None:
        """`seq` owns a block whose contents it needs: found in the prefix cache, or shared with a fork.

        Or its next entry is the null block, 0, because the entry lies behind the window (`extras/window_blocks.py`).
        """

    def on_copy_block(self, seq: Sequence, source: int, destination: int) -> None:
        """`seq` writes to a copy of a block that others own too."""

    def on_give_back(self, seq: Sequence, block_ids: list[int]) -> None:
        """`seq` gives up blocks behind the window of all layers; in its block table the null block replaces them."""

    def on_verify(self, seq: Sequence, num_drafts: int, num_accepted: int, block_ids: list[int]) -> None:
        """A step has computed drafts (`extras/speculation`): `seq` keeps the accepted ones, and gives up blocks."""

    def on_free(self, seq: Sequence) -> None:
        """`seq` owns no blocks any more: they have lost an owner each, the last one first."""

    def on_register_block(self, seq: Sequence, block_id: int, block_hash: int, serial: int) -> None:
        """The prefix cache can find the full block `block_id` of `seq` from now on, by `block_hash`."""

    def on_forget_block(self, block_id: int) -> None:
        """The prefix cache cannot find `block_id` any more."""

    def on_reset_prefix_cache(self) -> None:
        """The prefix cache has forgotten all blocks."""


class SchedulingStats(Counts, Observer):
    """Counts what is scheduled; `LLMEngine` adds the requests."""

    def __init__(self) -> None:
        super().__init__()
        self._in_flight: deque[tuple[int, int, int]] = deque()  # of each step: tokens stored, slots, used blocks

    def on_admit(self, seq: Sequence) -> None:
        if seq.num_cached_tokens is None:  # else it resumes after preemption, and finds its own blocks: no hit
            self.prefix_cache_query_tokens += seq.num_prompt_tokens
            self.prefix_cache_hit_tokens += seq.num_computed_tokens

    def on_start(self, blocks: "BlockManager") -> None:
        self._in_flight.clear()

    def on_preempt(self, seq: Sequence, host_block_ids: list[int], needy: Sequence) -> None:
        self.num_preemptions += 1
        self.num_swaps += bool(host_block_ids)

    def on_give_back(self, seq: Sequence, block_ids: list[int]) -> None:
        self.num_window_blocks += len(block_ids)

    def on_verify(self, seq: Sequence, num_drafts: int, num_accepted: int, block_ids: list[int]) -> None:
        self.num_drafts += num_drafts > 0
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted

    def on_schedule(self, step: SchedulerOutput, running: list[Sequence], blocks: "BlockManager") -> None:
        num_used_blocks, size = blocks.num_used_blocks, blocks.block_size
        num_stored = num_used_blocks * size - count_empty_slots(running, size)
        self._in_flight.append((num_stored, num_used_blocks * size, num_used_blocks))

    def on_update(self, step: SchedulerOutput, new_token_ids: list[int]) -> None:
        num_stored, num_slots, num_used_blocks = self._in_flight.popleft()
        self.kv_tokens_stored += num_stored
        self.kv_slots_reserved += num_slots
        self.peak_used_blocks = max(self.peak_used_blocks, num_used_blocks)

    def on_roll_back(self) -> None:
        self._in_flight.clear()

    def count_step(self, step: SchedulerOutput, num_advanced: int, time_s: float) -> None:
        """The step has run, and has brought a token to `num_advanced` sequences."""
        self.steps += 1
        self.scheduled_tokens += step.num_scheduled_tokens
        self.generation_tokens += num_advanced
        if step.num_prefill_tokens:
            self.prefill_step_tokens += step.num_scheduled_tokens
            self.prefill_step_time_s += time_s
        else:
            self.decode_step_tokens += step.num_scheduled_tokens
            self.decode_step_time_s += time_s


def count_empty_slots(running: list[Sequence], block_size: int) -> int:
    """Slots of owned blocks that hold no token: all blocks are full but the last one of each sequence.

    Forks may share their last block, whose empty slots count once.
    """
    num_empty = sum([-seq.num_computed_tokens % block_size for seq in running])
    sharing = [seq for seq in running if seq.has_shared_tail]
    shared_tails = {int(seq.block_table.view()[-1]): -seq.num_computed_tokens % block_size for seq in sharing}
    return num_empty - sum([-seq.num_computed_tokens % block_size for seq in sharing]) + sum(shared_tails.values())
