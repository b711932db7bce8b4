"""The swap space: K and V of preempted sequences in host memory. Which host block is used, and which copies are due?

To copy K and V out and back can be cheaper than to compute them anew. The `Scheduler` decides which sequence is
preempted; `KVCache.move_blocks` does the copies before the step's forward pass.
"""

from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.preemption import Recompute
from nanovllm.scheduling.sequence import Sequence
from nanovllm.scheduling.step import BlockMoves, BlockPairs


class SwapSpace:
    """`num_blocks` blocks of `block_size` tokens in host memory."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))
        self._outs: BlockPairs = []
        self._ins: BlockPairs = []

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def try_swap_out(self, seq: Sequence) -> bool:
        """Note that the computed blocks of `seq` are to be copied out; False, and no change, if they do not fit."""
        blocks = seq.block_table.view(0, -(-seq.num_computed_tokens // self.block_size)).tolist()
        blocks = [block_id for block_id in blocks if block_id]  # without those behind a window (`windows.py`)
        if not blocks or len(blocks) > len(self._free):
            return False
        seq.host_block_ids = [self._free.pop() for _ in blocks]
        self._outs += zip(blocks, seq.host_block_ids, strict=True)
        return True

    def swap_in(self, seq: Sequence) -> None:
        """Note that the blocks of `seq` are to be copied back, into the first blocks that it has been given."""
        num_blocks = -(-seq.num_computed_tokens // self.block_size)
        block_ids = seq.block_table.view(num_blocks - len(seq.host_block_ids), num_blocks).tolist()
        # a block may lie behind the window by now: it has the null block in its place
        self._ins += [pair for pair in zip(seq.host_block_ids, block_ids, strict=True) if pair[1]]
        self.drop(seq)

    def drop(self, seq: Sequence) -> None:
        """Take back the host blocks of `seq`, if it has any."""
        self._free += seq.host_block_ids
        seq.host_block_ids = []

    def take_moves(self) -> tuple[BlockPairs, BlockPairs]:
        """(source, destination) blocks to be copied out, and back in, before the step runs.

        Copies out are done first. All of them are noted before the first copy in of the step, so a host block that a
        copy in gives up is not overwritten by a copy out of the same step.
        """
        moves = self._outs, self._ins
        self._outs, self._ins = [], []
        return moves


class Swap(Recompute):
    """Preempted sequences go to `space` as long as it has room, and are recomputed otherwise."""

    def __init__(self, block_manager: BlockManager, space: SwapSpace) -> None:
        super().__init__(block_manager)
        self.space = space

    def preempt(self, seq: Sequence) -> bool:
        num_computed_tokens = seq.num_computed_tokens
        is_swapped = self.space.try_swap_out(seq)
        self.block_manager.free(seq)
        if is_swapped:
            seq.num_computed_tokens = num_computed_tokens
        return is_swapped

    def try_admit(self, seq: Sequence, num_reserved: int) -> bool:
        if not seq.host_block_ids:
            return super().try_admit(seq, num_reserved)
        if self.block_manager.num_missing_blocks(seq) > self.block_manager.num_free_blocks - num_reserved:
            return False
        self.block_manager.try_allocate(seq, seq.num_computed_tokens)  # blocks of its own
        self.space.swap_in(seq)
        return True

    def drop(self, seq: Sequence) -> None:
        super().drop(seq)
        self.space.drop(seq)

    def take_moves(self) -> BlockMoves:
        return BlockMoves(*self.space.take_moves(), self.block_manager.take_copies())
