"""Who owns which block of the swap space: the K and V of preempted sequences, kept in host memory.

Copying a sequence out and back can be cheaper than computing it anew. Decides which host blocks are used; which
sequence is swapped is the scheduler's decision, and `ModelRunner` does the copies before the step's forward pass.
"""

from nanovllm.scheduling.sequence import Sequence


class SwapSpace:
    """`num_blocks` blocks of `block_size` tokens in host memory."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))
        self._outs: list[tuple[int, int]] = []
        self._ins: list[tuple[int, int]] = []

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def try_swap_out(self, seq: Sequence) -> bool:
        """Note that the computed blocks of `seq` are to be copied out; False, and no change, if they don't fit."""
        num_blocks = -(-seq.num_computed_tokens // self.block_size)
        if num_blocks == 0 or num_blocks > len(self._free):
            return False
        seq.host_block_ids = [self._free.pop() for _ in range(num_blocks)]
        self._outs += zip(seq.block_table.view(0, num_blocks).tolist(), seq.host_block_ids, strict=True)
        return True

    def swap_in(self, seq: Sequence) -> None:
        """Note that the blocks of `seq` are to be copied back, into the first blocks that it has been given."""
        device_block_ids = seq.block_table.view(0, len(seq.host_block_ids)).tolist()
        self._ins += zip(seq.host_block_ids, device_block_ids, strict=True)
        self.drop(seq)

    def drop(self, seq: Sequence) -> None:
        """Give up what is kept of `seq`, if anything."""
        self._free += seq.host_block_ids
        seq.host_block_ids = []

    def take_moves(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(source, destination) blocks to be copied out, and back in, before the step runs.

        Outs are done first. Ins are noted behind all of a step's outs, so a host block that is given up by a copy in
        is not written by a copy out of the same step.
        """
        moves = self._outs, self._ins
        self._outs, self._ins = [], []
        return moves
