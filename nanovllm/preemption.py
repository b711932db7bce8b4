"""What becomes of a sequence that must give up its blocks, and how does it come back?

Its tokens are kept in any case. `Recompute` computes their K and V anew, except for those that the prefix cache still
finds. The `Scheduler` calls a strategy without knowing which: `extras/swap` has another one.
"""

from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Sequence
from nanovllm.step import BlockMoves


class Recompute:
    """A strategy has these five methods. `preempt` and `try_admit` pair; `drop` ends a sequence wherever it is."""

    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager

    def preempt(self, seq: Sequence) -> list[int]:
        """Take all blocks of `seq`; returns the blocks in host memory that will hold its K and V, here none."""
        self.block_manager.free(seq)
        return []

    def try_admit(self, seq: Sequence, num_reserved: int) -> bool:
        """Give `seq` the blocks of its computed tokens, if all of its tokens find room; False, and no change, if not.

        `num_reserved` free blocks are left to running sequences.
        """
        return self.block_manager.try_admit(seq, num_reserved)

    def drop(self, seq: Sequence) -> None:
        """Give up all K and V of `seq`, on the device and elsewhere."""
        self.block_manager.free(seq)

    def take_moves(self) -> BlockMoves:
        """The block copies that are due before this step's forward pass."""
        return BlockMoves(copies=self.block_manager.take_copies())

    def roll_back(self) -> None:
        """A step has failed: the copies that it has asked for will not be done."""
        self.block_manager.take_copies()
