"""Swap for groups of layers: the blocks of all groups wait in host memory together.

For a sequence with three blocks in group 0, of which the groups with a window have the last two:

    block tables     [ 7 2 5 ]   [ 0 3 6 ]   [ 0 9 8 ]
    copied out         7 2 5         3 6         9 8        in this order, to seven host blocks
"""

from typing import Any

from nanovllm_extras.kv_groups.grouped_tables import GroupedBlockTables
from nanovllm_extras.swap.space import Swap, SwapSpace


class GroupedSwapSpace(SwapSpace):
    """Blocks in host memory, each of which keeps a block of any group."""

    def __init__(self, num_blocks: int, tables: GroupedBlockTables) -> None:
        super().__init__(num_blocks, tables.block_size)
        self.tables = tables

    def try_swap_out(self, seq: Any) -> bool:
        blocks = [block_id for table in self.tables_of(seq) for block_id in table if block_id]
        if not blocks or len(blocks) > len(self._free):
            return False
        self._held[seq] = [self._free.pop() for _ in blocks]
        self._outs += zip(blocks, self._held[seq], strict=True)
        return True

    def swap_in(self, seq: Any) -> None:
        first, *windows = self.tables_of(seq)
        held = self._held[seq]
        num_of_window = (len(held) - len(first)) // len(windows)
        block_ids = first + [block_id for table in windows for block_id in table[len(table) - num_of_window :]]
        # a block may have left the window by now: then the null block replaces it
        self._ins += [pair for pair in zip(held, block_ids, strict=True) if pair[1]]
        self.drop(seq)

    def tables_of(self, seq: Any) -> list[list[int]]:
        """Return the blocks of the computed tokens of `seq`, for each group."""
        num_blocks = -(-seq.num_computed_tokens // self.block_size)
        windows = self.tables.windows_of(seq.block_table)[:, :num_blocks].tolist()
        return [seq.block_table.view(0, num_blocks).tolist(), *windows]


def make_swap(transfers: Any, blocks: Any) -> Swap:
    """Return the strategy for a `GroupedBlockManager` and the `Transfers` of its runner."""
    return Swap(blocks, GroupedSwapSpace(transfers.num_swap_blocks, blocks.block_tables))
