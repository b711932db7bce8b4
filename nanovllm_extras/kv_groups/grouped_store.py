"""The K/V store for groups of layers: a block of each group is loaded and saved under a name of its own.

With block_size 4, a window of 5, and three blocks in the store, after which position 12 is next:

    positions     0 1 2 3     4 5 6 7     8 9 10 11
    group 0       loaded      loaded      loaded         the names of the tokens
    group 1       –           –           loaded         the same keys, hashed with the number of the group

If K and V have two shapes, a block has the same bytes in each group (`equal_blocks.py`), and is stored in the same way.

A hit from the store is the longest prefix of which the store has all blocks of group 0, and in the other groups those
that the next token sees. A block that a sequence gave back while it was not known yet was not saved, so the hit ends
before it.
"""

from typing import Any

from nanovllm_extras.kv_store.share import Loaded, name_in_share
from nanovllm_extras.kv_store.store import StoreHooks
from nanovllm_extras.kv_store.tier import BlockName


class GroupedStoreHooks(StoreHooks):
    """Wraps the methods of a `GroupedBlockManager`."""

    def __init__(self, store: Any, blocks: Any) -> None:
        super().__init__(store, blocks)
        self._windows: dict[BlockName, list[Loaded]] = {}  # by the name of group 0: the blocks of the other groups

    def register(self, seq: Any, num_tokens: int) -> None:
        first = seq.num_registered_blocks
        super().register(seq, num_tokens)
        stop = seq.num_registered_blocks
        if stop == first:
            return
        entries = self.blocks.block_tables.windows_of(seq.block_table)[:, first:stop].T.tolist()
        for name, block_ids in zip(self._store.names(seq, first, stop), entries, strict=True):
            for group, block_id in enumerate(block_ids, 1):
                if block_id in self.blocks.prefix_cache:
                    self._saves[block_id] = name_in_group(name, group)

    def _load(self, names: list[BlockName], first: int, stop: int) -> tuple[int, dict[int, Loaded]]:
        """Load the blocks [first, stop) of group 0, and of the other groups those that the token after them sees."""
        stop, loaded = super()._load(names, first, stop)
        self._windows = {}
        i = stop - 1
        while i >= max(first, self._num_behind_windows(stop)):
            if not self._load_windows(names[i - first]):
                stop = i
            i -= 1
        return stop, loaded

    def _load_windows(self, name: BlockName) -> bool:
        """Load the blocks of the other groups, and return whether the store has all of them."""
        blocks = []
        for group in range(1, self.blocks.num_groups):
            block = self._store.load(name_in_group(name, group))
            if block is None:
                return False
            blocks.append(block)
        self._windows[name] = blocks
        return True

    def _append(self, seq: Any, first: int, names: list[BlockName], loaded: dict[int, Loaded]) -> None:
        num_behind = min(first, self._num_behind_windows(first + len(names)))
        if self.blocks.block_tables.windows_of(seq.block_table)[0, :num_behind].any():
            self.blocks._give_back(seq, num_behind)  # what the pool has found and the next token does not see
        super()._append(seq, first, names, loaded)

    def _append_block(self, seq: Any, name: BlockName, block: Loaded) -> list[tuple[str, int]]:
        taken, i = super()._append_block(seq, name, block), seq.block_table.length - 1
        if name in self._windows:
            blocks = self._windows.pop(name)
            block_ids = self.blocks._take_in_groups(seq, i)
            self.blocks._set_windows(seq, i, block_ids)
            for group, (block_id, one) in enumerate(zip(block_ids, blocks, strict=True), 1):
                taken.append(self._note_load(name_in_group(name, group), block_id, one))
        return taken

    def _num_behind(self, num_blocks: int) -> int:
        """Return 0: group 0 sees all tokens."""
        return 0

    def _num_behind_windows(self, num_blocks: int) -> int:
        """Return how many of the first `num_blocks` blocks are behind the windows of the token after them."""
        return self.blocks.num_behind(num_blocks * self.blocks.block_size)  # type: ignore[no-any-return]


def name_in_group(name: BlockName, group: int) -> BlockName:
    """Return the name of the block with the same tokens in another group."""
    return name_in_share(name, f"group {group}".encode())
