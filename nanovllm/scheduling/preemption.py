"""What becomes of a sequence that must give up its blocks, and how does it come back?

Its tokens are kept in any case. `Recompute` computes their K and V anew, as far as the prefix cache has forgotten them;
`Swap` (`swap.py`) copies K and V to host memory and back, as long as there is room. The `Scheduler` holds one of them.
"""

from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.sequence import Sequence
from nanovllm.scheduling.step import BlockMoves


class Recompute:
    """`preempt` and `try_admit` pair; `drop` ends a sequence wherever it is."""

    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager

    def preempt(self, seq: Sequence) -> bool:
        """Take the blocks of `seq`; returns whether its K and V are kept elsewhere."""
        self.block_manager.free(seq)
        return False

    def try_admit(self, seq: Sequence, num_reserved: int) -> bool:
        """Give `seq` the blocks of what is computed of it, if all of its tokens find room.

        `num_reserved` free blocks are left to running sequences.
        """
        return self.block_manager.try_admit(seq, num_reserved)

    def drop(self, seq: Sequence) -> None:
        """Give up all that is kept of `seq`: nothing of it is computed any more."""
        self.block_manager.free(seq)

    def take_moves(self) -> BlockMoves:
        """The block copies that this step has asked for."""
        return BlockMoves(copies=self.block_manager.take_copies())
