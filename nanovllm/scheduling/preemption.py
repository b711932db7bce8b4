"""What becomes of a sequence that must give up its blocks, and how does it come back?

Its tokens are kept in any case. `Recompute` computes their K and V anew, except for those that the prefix cache still
finds. `Swap` (`swap.py`) copies K and V to host memory and back, as long as there is room. The `Scheduler` has one of
the two, and calls it without knowing which.
"""

from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.sequence import Sequence
from nanovllm.scheduling.step import BlockMoves


class Recompute:
    """A strategy has these four methods. `preempt` and `try_admit` pair; `drop` ends a sequence wherever it is."""

    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager

    def preempt(self, seq: Sequence) -> bool:
        """Take all blocks of `seq`; returns whether its K and V are kept elsewhere."""
        self.block_manager.free(seq)
        return False

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
