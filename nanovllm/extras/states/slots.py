"""Which sequence owns which state? One slot of the pool for each running sequence, beside its blocks.

A layer with a recurrent state keeps one matrix for each sequence, whatever the sequence's length. So a sequence needs
blocks, whose number grows, and one slot, which it owns from its admission on. Blocks and slot come and go together:

    admission     needs a slot, and blocks for all tokens. A request for n samples needs n slots
    fork          the child gets a slot of its own, and the parent's state is copied to it. K and V are shared: a state
                  is overwritten by each token, so it cannot be
    preemption    frees both. The sequence starts again from its first token, with a state of zeros
    end, abort    free both

A and its child B, with blocks of 4. The chunk with the last token of A's prompt is scheduled in step 1. Step 1 computes
the state after the prompt, so the copy is the first thing that step 2 does:

    step 1    A prefills positions 0 … 5    A: blocks [7, 2], slot 1      then B: blocks [7, 2], slot 2
    step 2    copy of slot 1 to slot 2      A decodes position 6          B decodes position 6

The prefix cache is off: K and V of a prefix are useless without the state at its end, which later tokens overwrite.
"""

from dataclasses import replace
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.extras.extended_scheduler import ExtendedScheduler
from nanovllm.observer import Observer
from nanovllm.scheduler import Step

BlockCopies = list[tuple[int, int]]
SlotCopies = list[tuple[int, int]]


class StateMoves(list[tuple[int, int]]):
    """A step's block copies, with the copies of states, and the slot of each chunk's sequence.

    `state_copies` are (source, destination) slots. They are done one after the other, because a slot that is copied to
    may be copied from later. A step overwrites the states of its sequences, so it can only be run again if
    `keeps_states` is set: the states before it are kept, and `is_again` brings them back.
    """

    def __init__(
        self,
        copies: BlockCopies,
        state_copies: SlotCopies,
        slots: list[int],
        keeps_states: bool = False,
        is_again: bool = False,
    ) -> None:
        super().__init__(copies)
        self.state_copies = state_copies
        self.slots = slots
        self.keeps_states = keeps_states
        self.is_again = is_again

    def again(self) -> "StateMoves":
        """Return what is to be done before the same step runs once more (`isolation.py`)."""
        return StateMoves([], [], self.slots, is_again=True)


class StateBlockManager(BlockManager):
    """The core's block manager with slots 1 … `num_slots`. No sequence owns slot 0, the null slot."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, observer: Observer | None = None) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching=False, observer=observer)
        self.num_slots = num_slots
        self._free_slots = list(range(num_slots, 0, -1))
        self._slots: dict[Any, int] = {}  # of each sequence that owns blocks
        self._state_copies: SlotCopies = []

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def slot_of(self, seq: Any) -> int:
        """Return the slot with the state of `seq`, which must be running."""
        return self._slots[seq]

    def try_admit(self, seq: Any, num_reserved: int = 0) -> bool:
        """Give `seq` a slot if there is one, and room for all of its tokens. False, and no change, otherwise.

        Its children will need slots too, as will the children of running sequences that have not started yet.
        """
        num_promised = sum([len(other.children) for other in self._slots])
        if 1 + len(seq.children) + num_promised > len(self._free_slots) or not super().try_admit(seq, num_reserved):
            return False
        self._slots[seq] = self._free_slots.pop()
        return True

    def fork(self, parent: Any, child: Any) -> None:
        """Let `child` share the blocks of `parent`, and copy the state before the next step."""
        super().fork(parent, child)
        assert self._free_slots, "slots are reserved for children"
        self._slots[child] = self._free_slots.pop()
        self._state_copies.append((self._slots[parent], self._slots[child]))

    def free(self, seq: Any) -> None:
        super().free(seq)
        if seq in self._slots:  # a waiting sequence has none
            self._free_slots.append(self._slots.pop(seq))

    def take_state_copies(self) -> SlotCopies:
        """Return (source, destination) of states to be copied before the step that is scheduled next."""
        copies, self._state_copies = self._state_copies, []
        return copies

    def put_back(self, copies: SlotCopies) -> None:
        """Keep copies that no step has done for the next step."""
        self._state_copies = copies + self._state_copies


class StateScheduler(ExtendedScheduler):
    """Adds the slots of the step's sequences to the step. Its block manager is a `StateBlockManager`."""

    block_manager: StateBlockManager

    def schedule(self) -> Step:
        # before anything else: forks of this step copy states that this step computes, so their copies wait
        state_copies = self.block_manager.take_state_copies()
        step = super().schedule()
        if not step.chunks:
            self.block_manager.put_back(state_copies)
            return step
        seqs: list[Any] = [seq for seq, _, _ in step.chunks]
        slots = [self.block_manager.slot_of(seq) for seq in seqs]
        keeps_states = not all([seq.is_plain for seq in seqs])  # what a request asks for may make the step fail
        return replace(step, copies=StateMoves(step.copies, state_copies, slots, keeps_states))

    def forget_steps(self) -> None:
        super().forget_steps()
        self.block_manager.take_state_copies()
