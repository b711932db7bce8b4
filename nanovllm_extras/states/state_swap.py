"""Swap with states: which slot in host memory holds the state of a preempted sequence, while its blocks wait there too.

A sequence that is swapped out owns neither a slot of the pool nor blocks. It needs a slot in host memory and host
blocks, and is computed again if either is missing. It comes back when there are a slot of the pool and blocks for all
of its tokens; a snapshot may be dropped for the slot. Slots in host memory have negative numbers, so one ordered list
holds all copies of states:

    A forks B in step 1; step 2 needs blocks, so it preempts B and copies B's state out; step 5 copies it back

    step 2    state_copies [(1, 2), (2, -1)]    the copy for the fork is due, and then slot 2 is copied to host slot -1
    step 5    state_copies [(-1, 4)]            B goes on with slot 4

This file has integers only. `transfers.py` has the memory.
"""

from typing import Any

from nanovllm_extras.invariants import Pool
from nanovllm_extras.states.slots import StateBlockManager
from nanovllm_extras.swap.space import Swap, SwapSpace


class StateSwapSpace(SwapSpace):
    """Host memory for `num_blocks` blocks and `num_slots` states."""

    def __init__(self, num_blocks: int, num_slots: int, block_manager: StateBlockManager) -> None:
        super().__init__(num_blocks, block_manager.block_size)
        self.num_slots = num_slots
        self.block_manager = block_manager
        self._free_slots = list(range(-num_slots, 0))
        self._slots: dict[Any, int] = {}  # of each sequence that is swapped out

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def pools(self) -> list[Pool]:
        owned = [(seq, [slot]) for seq, slot in self._slots.items()]
        return [*super().pools(), Pool("host slot", range(-self.num_slots, 0), self._free_slots, owned)]

    def try_swap_out(self, seq: Any) -> bool:
        """Note that blocks and state of `seq` are to be copied out; False, and no change, if either does not fit."""
        if not self._free_slots or not super().try_swap_out(seq):
            return False
        self._slots[seq] = self._free_slots.pop()
        self.block_manager.copy_out(seq, self._slots[seq])
        return True

    def swap_in(self, seq: Any) -> None:
        """Note that blocks and state of `seq` are to be copied back, into the blocks and the slot that it gets."""
        self.block_manager.copy_in(seq, self._slots[seq])
        super().swap_in(seq)

    def drop(self, seq: Any) -> None:
        """Take back the host blocks and the host slot of `seq`, if it has any."""
        super().drop(seq)
        if seq in self._slots:
            self._free_slots.append(self._slots.pop(seq))


class StateSwap(Swap):
    """Preempted sequences go to `space` as long as it has blocks and slots, and are computed again otherwise."""

    block_manager: StateBlockManager

    def try_admit(self, seq: Any, num_reserved: int) -> bool:
        if seq in self.space and not self.block_manager.has_slots_for(seq):
            return False
        return super().try_admit(seq, num_reserved)


def make_swap(transfers: Any, block_manager: StateBlockManager) -> StateSwap:
    """Return the strategy for a runner's `Transfers`, with as many blocks and slots in host memory as it has."""
    space = StateSwapSpace(transfers.num_swap_blocks, transfers.num_swap_slots, block_manager)
    return StateSwap(block_manager, space)
