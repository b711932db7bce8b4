"""The scheduler of the full engine: policies, a limit for chunks of long prompts, and tokens that are not known yet.

It decides as the core's scheduler does, which the engine uses if no option and no model needs more. What it adds is in
objects that it holds:

    order           the queues sort by a policy (`ordered_queues.py`)
    pending         steps in flight, placeholders and drafts (`pending.py`)
    drafter         who gets drafts (`drafter.py`); None for no speculation
    adapter_slots   which LoRA adapters run (`lora/slots.py`); None if there are none
    block_manager   swap, states, windows, a K/V store (`memory/block_manager.py`)
"""

from typing import Any

from nanovllm import scheduler, sequence
from nanovllm.scheduler import Chunk, Step
from nanovllm_extras.lora.slots import AdapterSlots
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.records.full_observer import Observer
from nanovllm_extras.records.full_sequence import Sequence, own_sequences
from nanovllm_extras.records.moves import Moves
from nanovllm_extras.scheduling.drafter import Drafter
from nanovllm_extras.scheduling.ordered_queues import Policy, fcfs, order_queues
from nanovllm_extras.scheduling.pending import Drafts, Pending, forget_unknown, needs_token


class Scheduler(scheduler.Scheduler):
    """Serves in the order of `policy`.

    `long_prefill_token_threshold`, unless it is 0, limits the tokens of one sequence in a step. If it `overlaps`, the
    engine may schedule a step before the step in flight is updated, where `can_schedule_ahead`.
    """

    block_manager: BlockManager
    observer: Observer
    running: list[Any]  # the core types its sequences as its own; these are the extras'
    waiting: list[Any]

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Policy = fcfs,
        long_prefill_token_threshold: int = 0,
        *,
        overlaps: bool = False,
        drafter: Drafter | None = None,
        adapter_slots: AdapterSlots | None = None,
    ) -> None:
        super().__init__(block_manager, max_num_seqs, max_num_batched_tokens, max_model_len)
        self.max_chunk_len = long_prefill_token_threshold or max_num_batched_tokens
        self.overlaps = overlaps
        self.drafter = drafter
        self.adapter_slots = adapter_slots
        self.pending = Pending()
        # states of tokens that become known later are saved before another step changes them
        self._settles = block_manager.states is not None and (overlaps or drafter is not None)
        order_queues(self, policy)

    def schedule(self) -> Step:
        blocks, drafts = self.block_manager, Drafts()
        if self._settles:
            for seq in self.running:
                blocks.settle(seq)
        if self.drafter is not None:
            if self.pending.steps:
                self.drafter.skip(self.running, self.may_admit())
            else:
                drafts = self.drafter.draft(blocks, self.running, self.may_admit())
        planned = super().schedule()
        assert isinstance(planned.copies, Moves)
        blocks.complete(planned, planned.copies)
        return self.pending.add(planned, drafts, self.overlaps) if planned.chunks else planned

    def update(self, step: Step, new_token_ids: list[int]) -> list[tuple[int, sequence.Sequence]]:
        """Update as the core does. A sequence with drafts may be among the advanced ones several times."""
        assert step is self.pending.steps[0], "the oldest"
        if (verification := self.pending.verification) is None:
            advanced = super().update(step, new_token_ids)
        else:
            assert self.drafter is not None
            num_kept = []
            for seq, rows in zip(own_sequences(verification.planned.samples), verification.rows, strict=True):
                drafts = verification.drafts.get(seq)
                drawn = new_token_ids[rows.start : rows.stop]
                num_kept.append(
                    1 if drafts is None else 1 + self.drafter.verify(self.block_manager, seq, drafts, drawn)
                )
            known, kept = self.pending.confirm(step, num_kept)
            advanced = [(kept[i], seq) for i, seq in super().update(known, [new_token_ids[row] for row in kept])]
        self.pending.end_step()  # not before: if a line above fails, `forget_steps` forgets what is not known
        return advanced

    def finish(self, seq: Sequence, finish_reason: str, stop_reason: int | str | None = None) -> None:
        if self._settles and seq.block_table and not self.pending.has_drafts(seq):  # it is not swapped out
            self.block_manager.settle(seq)
        super().finish(seq, finish_reason, stop_reason)
        forget_unknown(seq)
        if self.drafter is not None:
            self.drafter.forget(seq)

    def share_of(self, seq: Sequence, budget: int) -> int:
        """Return the number of tokens of `seq` that the step computes: a chunk ends where a snapshot is due."""
        num_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, self.max_chunk_len)
        if num_tokens <= 1 or (states := self.block_manager.states) is None:
            return num_tokens
        return min(num_tokens, states.next_cut(seq) - seq.num_computed_tokens)

    def admit_waiting(self, budget: int, chunks: list[Chunk]) -> int:
        """Admit as the core does, but no sequence for whose adapter there is no slot."""
        slots = self.adapter_slots
        if slots is None or not self.waiting:
            return super().admit_waiting(budget, chunks)
        held, running = slots.find_held(self.waiting, self.running), set(self.running)
        for seq in held:
            self.waiting.remove(seq)
        try:
            budget = super().admit_waiting(budget, chunks)
        finally:
            for seq in held:
                self.waiting.insert(0, seq)  # an ordered queue: it gets its place again
        for seq in self.running:
            if seq not in running:
                slots.assign(seq, self.running)
        return budget

    def preempt(self, seq: Sequence, needy: Sequence) -> None:
        self.block_manager.preempt(seq)
        self.observer.on_preempt(seq, needy)

    def may_admit(self) -> bool:
        """Return whether there are places for the first waiting sequence."""
        if not self.waiting:
            return False
        return count_places(self.running) + 1 + len(self.waiting[0].children) <= self.max_num_seqs

    def can_schedule_ahead(self) -> bool:
        """Return whether the next step needs no token of the step in flight, and would preempt no sequence.

        Otherwise the next step waits until the step in flight has run: then its tokens are known, and the sequences
        that they end have freed their blocks.
        """
        if not self.overlaps or self.pending.verification is not None:
            return False
        if any([needs_token(seq) for seq in own_sequences(self.pending.steps[-1].samples)]):
            return False
        if self.drafter is not None and not self.drafter.rests(self.running, self.may_admit()):
            return False
        blocks, running = self.block_manager, self.running
        # each sequence fills the rest of one block and copies one at most, besides the blocks that the budget fills
        num_blocks = self.max_num_batched_tokens // blocks.block_size + 2 * len(running)
        if blocks.num_free_blocks >= blocks.num_groups * num_blocks:
            return True
        needed = [blocks.num_missing_blocks(seq) + blocks.num_groups * seq.has_shared_tail for seq in running]
        return sum(needed) <= blocks.num_free_blocks

    def forget_steps(self) -> None:
        """Forget the steps in flight, which have failed. `roll_back` calls this method."""
        preempted = [seq for step in self.pending.steps for seq in own_sequences(step.preempted)]
        self.block_manager.forget_step(preempted)
        self.pending.drop_all()


def count_places(running: list[sequence.Sequence]) -> int:
    """Count the places of `max_num_seqs` in use, including those of children that have not started yet."""
    return sum([1 + len(seq.children) for seq in running])


def fork_anytime(one: Any, parent: Sequence, child: Sequence) -> None:
    """Fork `child` from `parent` between two steps.

    If `parent` is not running, or if all of `max_num_seqs` are in use, `child` waits and is computed again.
    """
    if parent in one.running and count_places(one.running) < one.max_num_seqs:
        one.fork(parent, child)
        return
    child.num_cached_tokens = parent.num_cached_tokens
    one.observer.on_fork_apart(parent, child)
    one.waiting.insert(0, child)
