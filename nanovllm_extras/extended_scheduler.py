"""The scheduler with policies, a limit for chunks of long prompts, swap, and beams that are forked at any time.

The engine uses the core's scheduler unless an option needs this one, or a subclass of it: `overlap.py`,
`speculation/speculative_scheduler.py`.
"""

from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler
from nanovllm_extras.ordered_queues import Policy, fcfs, order_queues
from nanovllm_extras.preemption import Recompute


class ExtendedScheduler(Scheduler):
    """Serves in the order of `policy`.

    `long_prefill_token_threshold`, unless it is 0, limits the tokens of one sequence in a step. `preemption` decides
    what happens to the K and V of sequences that lose their blocks: its `try_admit` and `take_moves` replace the block
    manager's `try_admit` and `take_copies`.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Policy = fcfs,
        long_prefill_token_threshold: int = 0,
        preemption: Recompute | None = None,
    ) -> None:
        super().__init__(block_manager, max_num_seqs, max_num_batched_tokens, max_model_len)
        self.max_chunk_len = long_prefill_token_threshold or max_num_batched_tokens
        self.preemption = preemption or Recompute(block_manager)
        if preemption is not None:  # it decides how its sequences come back, and what is copied
            block_manager.try_admit = preemption.try_admit  # type: ignore[assignment, method-assign]
            block_manager.take_copies = preemption.take_moves  # type: ignore[method-assign]
        order_queues(self, policy)

    def share_of(self, seq: Any, budget: int) -> int:
        return min(super().share_of(seq, budget), self.max_chunk_len)

    def preempt(self, seq: Any, needy: Any) -> None:
        self.preemption.preempt(seq)
        self.observer.on_preempt(seq, needy)

    def finish(self, seq: Any, finish_reason: str, stop_reason: int | str | None = None) -> None:
        self.preemption.drop(seq)
        super().finish(seq, finish_reason, stop_reason)
        seq.num_tokens = seq.token_ids.length  # without placeholders and drafts

    def forget_steps(self) -> None:
        """Forget the steps in flight, which have failed. `roll_back` calls this method."""
        self.preemption.roll_back()
        for seq in [*self.running, *self.waiting]:
            if seq.block_table.length:  # it may be half-way back from where `preemption` has kept its K and V
                self.preemption.drop(seq)


def count_places(running: list[Any]) -> int:
    """Count the places of `max_num_seqs` in use, including those of children that have not started yet."""
    return sum([1 + len(seq.children) for seq in running])


def fork_anytime(scheduler: Scheduler, parent: Any, child: Any) -> None:
    """Fork `child` from `parent` between two steps.

    If `parent` is not running, or if all of `max_num_seqs` are in use, `child` waits and is computed again.
    """
    if parent in scheduler.running and count_places(scheduler.running) < scheduler.max_num_seqs:
        scheduler.fork(parent, child)
        return
    child.num_cached_tokens = parent.num_cached_tokens
    observer: Any = scheduler.observer
    observer.on_fork_apart(parent, child)
    scheduler.waiting.insert(0, child)
