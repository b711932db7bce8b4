"""Observers are notified of each decision of the scheduler and the block manager. They decide nothing.

The methods of `Observer` do nothing: a subclass overrides those that it needs. `Stats`, the engine's observer, counts.
No method is called for every token, so observing costs a step little.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.sequence import Sequence

if TYPE_CHECKING:  # these modules import this one
    from nanovllm.block_manager import BlockManager
    from nanovllm.scheduler import Step


class Observer:
    """Arguments are valid during the call, and an observer must not change them."""

    def on_add(self, seq: Sequence) -> None:
        """`seq` is queued for the first time. Its children wait with it."""

    def on_wait(self, seq: Sequence, has_place: bool, num_needed_blocks: int, num_reserved_blocks: int) -> None:
        """`seq` is first in the queue and is not admitted.

        Either `max_num_seqs` sequences run already (`has_place` is False), or too few blocks are free. Of the free
        blocks, `num_reserved_blocks` are reserved for running sequences.
        """

    def on_admit(self, seq: Sequence) -> None:
        """`seq` runs from this step on. Its first `num_computed_tokens` tokens are cached.

        `seq.num_cached_tokens` is still None if `seq` is admitted for the first time.
        """

    def on_preempt(self, seq: Sequence, needy: Sequence) -> None:
        """`seq` has given up its blocks because `needy` needs some."""

    def on_fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` begins to run and to share the blocks of `parent`."""

    def on_schedule(self, step: "Step", running: list[Sequence], blocks: "BlockManager") -> None:
        """`step` is scheduled. `running` and `blocks` are the state after this decision."""

    def on_update(self, step: "Step", new_token_ids: list[int]) -> None:
        """`step` has run and has sampled a token for each of `step.samples`."""

    def on_finish(self, seq: Sequence) -> None:
        """`seq` has ended; `seq.finish_reason` says why."""

    def on_take_block(self, seq: Sequence, block_id: int, is_evicted: bool) -> None:
        """`seq` owns a block that was free. `is_evicted` says whether the block was in the prefix cache."""

    def on_share_block(self, seq: Sequence, block_id: int) -> None:
        """`seq` owns a block that holds what it needs, from the prefix cache or from its parent in a fork."""

    def on_copy_block(self, seq: Sequence, source: int, destination: int) -> None:
        """`seq` writes to a copy of a block that others own too."""

    def on_free(self, seq: Sequence) -> None:
        """`seq` owns no blocks any more. They were freed one by one, the last one first."""

    def on_register_block(self, seq: Sequence, block_id: int, block_hash: int, serial: int) -> None:
        """The full block `block_id` of `seq` is now in the prefix cache, under `block_hash`."""

    def on_forget_block(self, block_id: int) -> None:
        """`block_id` is no longer in the prefix cache."""


@dataclass
class Counters:
    """What an engine has counted over its life."""

    num_requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    """Tokens computed in all steps: prompts, outputs, and tokens computed again after preemption."""
    num_preemptions: int = 0
    peak_used_blocks: int = 0
    """Most blocks that were in use in any one step."""
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    """Of these prompt tokens, the number whose K and V were in the prefix cache."""

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.prefix_cache_hit_tokens / self.prefix_cache_query_tokens if self.prefix_cache_query_tokens else 0.0


class Stats(Counters, Observer):
    """Counts what it is notified of."""

    def on_add(self, seq: Sequence) -> None:
        self.num_requests += 1
        self.prompt_tokens += seq.num_prompt_tokens

    def on_admit(self, seq: Sequence) -> None:
        if seq.num_cached_tokens is None:  # otherwise it resumes after preemption: its own blocks are no hits
            self.prefix_cache_query_tokens += seq.num_prompt_tokens
            self.prefix_cache_hit_tokens += seq.num_computed_tokens

    def on_preempt(self, seq: Sequence, needy: Sequence) -> None:
        self.num_preemptions += 1

    def on_schedule(self, step: "Step", running: list[Sequence], blocks: "BlockManager") -> None:
        self.peak_used_blocks = max(self.peak_used_blocks, blocks.num_used_blocks)

    def on_update(self, step: "Step", new_token_ids: list[int]) -> None:
        self.steps += 1
        self.scheduled_tokens += step.num_scheduled_tokens
        self.generation_tokens += len(new_token_ids)
