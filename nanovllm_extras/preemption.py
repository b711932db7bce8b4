"""What happens to the K and V of a sequence that must give up its blocks, and how does it come back?

Its tokens are kept in any case. `Recompute` computes their K and V again, except for those that the prefix cache still
finds. `swap/` has another strategy. `ExtendedScheduler` replaces `try_admit` and `take_copies` of the block manager by
`try_admit` and `take_moves` of the strategy, which call the methods of the block manager's class.
"""

from typing import Any

from nanovllm.block_manager import BlockManager


class Recompute:
    """The strategy of the core: blocks are freed. A strategy has these six methods."""

    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager

    def preempt(self, seq: Any) -> None:
        """Take all blocks of `seq`."""
        self.block_manager.free(seq)

    def try_admit(self, seq: Any, num_reserved: int) -> bool:
        """Give `seq` the blocks of its computed tokens, if there is room for all of its tokens.

        Returns False, and changes nothing, if there is not. `num_reserved` free blocks are kept for running sequences.
        """
        return type(self.block_manager).try_admit(self.block_manager, seq, num_reserved)

    def drop(self, seq: Any) -> None:
        """Give up K and V of `seq` that are not on the device."""

    def take_moves(self) -> list[tuple[int, int]]:
        """Return the block copies to be done before this step's forward pass."""
        return type(self.block_manager).take_copies(self.block_manager)

    def roll_back(self) -> None:
        """Forget the copies of a step that has failed."""

    def forget(self, seq: Any) -> None:
        """Let `seq`, which a failed step has preempted, be computed again: its copies may not have been done."""
