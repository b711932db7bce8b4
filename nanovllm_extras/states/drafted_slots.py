"""Which state does a sequence keep after a step with drafts, if some of them were wrong?

A step with drafts computes the newest token of a sequence and its drafts (`speculation/speculative_scheduler.py`). The
K and V of a rejected draft are overwritten later. A state is changed by each token, so a state that has seen a
rejected draft cannot be used. So each draft reads the state after the token before it, and writes to a slot of its
own:

    position                6     7     8     9       the sequence owns slot 2; its drafts d1 d2 d3 get 5, 6 and 7
    the step computes       t6    d1    d2    d3
    reads the state in      2     2     5     6
    writes the state to     2     5     6     7

If d1 is right and d2 is wrong, slot 5 has the state after the accepted tokens. The sequence owns slot 5 from then on,
and 2, 6 and 7 are free. No state is copied and no token is computed again: the rollback only changes which slot the
sequence owns. The inputs that a layer's short convolution keeps are in the same slots, so they are rolled back too.

The alternative is one copy of the state before the step, from which the accepted tokens are computed again. It needs
one more slot instead of one for each draft. But it copies a state in every step with drafts (18.6 MiB in
Qwen3.5-0.8B), and a rejected draft costs another forward pass. The slots of drafts cost little: drafts are made when
few sequences run, in slots that no sequence needs, and the least recently used snapshots are dropped for them. A
sequence gets only as many drafts as there are slots.

A snapshot must not hold the state after a draft that may be rejected. So drafts end where a snapshot is due. It is
taken when the drafts are verified, and the block at its end is registered.
"""

from typing import Any

from nanovllm.scheduler import Step
from nanovllm_extras.records import Moves
from nanovllm_extras.speculation.speculative_scheduler import Drafts, SpeculativeScheduler
from nanovllm_extras.states.known_snapshots import KnownStateBlockManager
from nanovllm_extras.states.slots import StateScheduler


class DraftedStateBlockManager(KnownStateBlockManager):
    """Has slots for drafts from `take_draft_slots` to `keep_state`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._draft_slots: dict[Any, list[int]] = {}  # of each sequence whose drafts are not verified yet

    @property
    def num_free_slots(self) -> int:
        return super().num_free_slots - sum(map(len, self._draft_slots.values()))

    def take_draft_slots(self, seq: Any, count: int) -> None:
        """Take a slot for each draft of `seq`. There must be `count` free slots."""
        self._draft_slots[seq] = [self.prefix_cache.take_slot() for _ in range(count)]

    def slots_of(self, seq: Any) -> list[int]:
        """Return the slots that the newest token of `seq` and its drafts write to. A draft reads the slot before."""
        return [self.slot_of(seq), *self._draft_slots.get(seq, ())]

    def slot_to_read(self, seq: Any) -> int:
        """Return the slot that has the state of `seq` between two steps: its own, or one that the next step copies."""
        slot = self.slot_of(seq)
        for source, destination in reversed(self._copies_for_next):
            if destination == slot:
                slot = source
        return slot

    def keep_state(self, seq: Any, num_accepted: int) -> None:
        """Let `seq` own the slot with the state after its last accepted draft, and free the others."""
        slots = self.slots_of(seq)
        self._slots[seq] = slots.pop(num_accepted)
        self.prefix_cache.free_slots += slots
        del self._draft_slots[seq]
        if num_accepted:
            self.observer.on_move_slot(seq, self._slots[seq])

    def forget_slots(self) -> None:
        super().forget_slots()
        self._draft_slots.clear()

    def free(self, seq: Any) -> None:
        self.prefix_cache.free_slots += self._draft_slots.pop(seq, ())
        super().free(seq)


class DraftedStateScheduler(SpeculativeScheduler, StateScheduler):
    """Speculates for sequences with states. Its block manager is a `DraftedStateBlockManager`."""

    block_manager: DraftedStateBlockManager

    def schedule(self) -> Step:
        step = super().schedule()
        if self._underway is None:
            return step
        slots: list[int] = []
        sources: list[int] = []
        for seq, _, _ in self._underway.planned.chunks:
            rows = self.block_manager.slots_of(seq)
            slots += rows
            sources += rows[:1] + rows[:-1]
        moves: Any = step.copies
        moves.slots, moves.sources = slots, sources
        return step

    def update(self, step: Step, new_token_ids: list[int]) -> list[tuple[int, Any]]:
        drafts: Drafts = {} if self._underway is None else self._underway.drafts
        advanced = super().update(step, new_token_ids)
        for seq in drafts:
            if seq.finish_reason is None:
                self.block_manager.settle(seq)
        return advanced

    def finish(self, seq: Any, finish_reason: str, stop_reason: int | str | None = None) -> None:
        is_verified = 0 < seq.num_computed_tokens < seq.num_known_tokens  # its drafts are, if it had any
        if is_verified and seq.block_table.length:  # else it is swapped out
            self.block_manager.settle(seq)
        super().finish(seq, finish_reason, stop_reason)

    def _draft(self) -> Drafts:
        drafts = super()._draft()
        for seq, token_ids in drafts.items():
            self.block_manager.take_draft_slots(seq, len(token_ids))
        return drafts

    def _choose(self) -> list[tuple[Any, int]]:
        """Return as the parent does, but with at most as many drafts as there are slots, and none beyond a snapshot."""
        blocks = self.block_manager
        room = blocks.num_free_slots - sum([len(seq.children) for seq in self.running])  # they may start in this step
        wanted = []
        for seq, count in super()._choose():
            if blocks.prefix_cache.is_enabled:
                count = min(count, blocks.next_snapshot(seq) - seq.num_tokens)
            count = min(count, room)
            if count > 0:
                wanted.append((seq, count))
                room -= count
        return wanted

    def _verify(self, seq: Any, drafts: list[int], drawn: list[int]) -> int:
        num_accepted = super()._verify(seq, drafts, drawn)
        if seq.finish_reason is None:  # else it has failed, and has freed its slots
            self.block_manager.keep_state(seq, num_accepted)
        return num_accepted


def drafts_of_nobody(num_rows: int, most_drafts: int, num_slots: int) -> Moves:
    """Return the slots of a step that is only measured: of decodes with `most_drafts` drafts each, or fewer at the end.

    6 rows, most_drafts 3 -> slots [1, 2, 3, 4, 5, 6], sources [1, 1, 2, 3, 5, 5]

    If the pool has fewer slots than the step has rows, rows share them: the states mean nothing.
    """
    slots = [1 + row % num_slots for row in range(num_rows)]
    sources = [slots[row - (row % (1 + most_drafts) > 0)] for row in range(num_rows)]
    return Moves(slots=slots, sources=sources)
