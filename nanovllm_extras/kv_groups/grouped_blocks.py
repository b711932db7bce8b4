"""The block manager of models in which some layers see a window and others see all tokens.

There is one pool of blocks, and each group of layers has its own block tables (`layer_groups.py`). A sequence owns a
block of group 0 for every `block_size` tokens, and blocks of the other groups only inside the window. All groups are
served together:

    admission       needs room for all tokens in group 0, and for a window and a chunk in each other group
    allocation      a sequence gets blocks in all groups, or in none
    window          before a chunk, the blocks behind the window of its first token are given back
    fork, free      share and free the blocks of all groups; a shared block is copied in all of them
    preemption      frees the blocks of all groups

The windows of all groups are equal, so their tables have null blocks at the same places.

Prefix hits. A full block of group 0 is found by its tokens, as in other models. The blocks of the other groups with the
same tokens are found by its serial number, which identifies the whole prefix (`CachedBlock`). A hit is the longest
prefix with all of its blocks in group 0, and in every other group those that its next token sees:

    block             0      1      2      3           window of 5, block_size 4
    group 0           7      2      5      9           all cached
    group 1           –      3      6      –           blocks 0 and 3 are evicted
    prefixes          4 tokens need block 0 of group 1, 8 tokens block 1, 12 tokens block 2, 16 tokens block 3:
                      the hit has 12 tokens

If one group's block is evicted, or the block of group 0, those of the other groups with a window cannot be found
either. They are free blocks without contents then.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from nanovllm.prefix_cache import ROOT_SERIAL, CachedBlock
from nanovllm_extras.full_observer import Observer
from nanovllm_extras.invariants import Table
from nanovllm_extras.known_tokens import KnownTokensBlockManager, KnownTokensPrefixCache
from nanovllm_extras.kv_groups.group_observer import observe_groups
from nanovllm_extras.kv_groups.grouped_tables import GroupedBlockTables
from nanovllm_extras.window_blocks import NULL_BLOCK, count_unshared, max_held_blocks


def num_blocks_behind(position: int, window: int, block_size: int) -> int:
    """Return the number of blocks that are wholly before the window of the token at `position`."""
    return max(0, position - window + 1) // block_size


class GroupedPrefixCache(KnownTokensPrefixCache):
    """Finds blocks of all groups. `windows` has those of the groups with a window, by serial number."""

    def __init__(
        self, block_size: int, observer: Observer, is_enabled: bool, tables: GroupedBlockTables, window: int
    ) -> None:
        super().__init__(block_size, observer, is_enabled)
        self.group_observer = observe_groups(observer)
        self.tables = tables
        self.window = window
        self.windows: dict[int, tuple[int, ...]] = {}  # serial of a block of group 0 -> blocks of the other groups
        self._serials_of: dict[int, int] = {}  # block of another group -> the serial under which it is found

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_id or block_id in self._serials_of

    def find(self, seq: Any) -> list[CachedBlock]:
        """Return the blocks of group 0 of the longest prefix that every group has what it needs of."""
        hits = super().find(seq)
        num_usable = num_last = 0  # `num_last`: blocks in succession, up to this one, that all groups have
        for i, hit in enumerate(hits, 1):
            num_last = num_last + 1 if hit.serial in self.windows else 0
            if i - num_last <= num_blocks_behind(i * self.block_size, self.window, self.block_size):
                num_usable = i
        return hits[:num_usable]

    def missing_windows(self, hits: list[CachedBlock], num_blocks: int) -> list[int]:
        """Return the serial numbers of blocks that a hit of the first `num_blocks` of `hits` needs and groups lack."""
        num_behind = num_blocks_behind(num_blocks * self.block_size, self.window, self.block_size)
        return [hit.serial for hit in hits[num_behind:num_blocks] if hit.serial not in self.windows]

    def register(self, seq: Any, num_tokens: int) -> None:
        if not self.is_enabled:
            return
        for i in range(seq.num_registered_blocks, min(num_tokens, seq.token_ids.length) // self.block_size):
            super().register(seq, (i + 1) * self.block_size)
            blocks = tuple(self.tables.windows_of(seq.block_table)[:, i].tolist())
            if NULL_BLOCK not in blocks and seq.parent_serial not in self.windows:
                self.windows[seq.parent_serial] = blocks
                self._serials_of.update(dict.fromkeys(blocks, seq.parent_serial))
                for group, block_id in enumerate(blocks, 1):
                    self.group_observer.on_register_in_group(
                        seq, group, block_id, seq.block_hashes[i], seq.parent_serial
                    )

    def forget(self, block_id: int) -> None:
        cached = self._by_id.get(block_id)
        super().forget(block_id)
        serial = self._serials_of.get(block_id) if cached is None else cached.serial
        if serial is not None:
            for one in self.windows.pop(serial, ()):
                del self._serials_of[one]
                self.group_observer.on_forget_in_group(one)

    def blocks_beside(self) -> dict[int, int]:
        """Return for each block of a group with a window the serial under which it is found."""
        return self._serials_of

    def serials_beside(self) -> Iterable[int]:
        """Return the serials under which blocks of groups with a window are found."""
        return self.windows

    def forget_beside(self) -> None:
        """Forget the blocks of all groups with a window, so that there are no hits until new ones are registered."""
        for block_id in self._serials_of:
            self.group_observer.on_forget_in_group(block_id)
        self.windows.clear()
        self._serials_of.clear()


class GroupedBlockManager(KnownTokensBlockManager):
    """Blocks 1 … `num_blocks` for all groups. A sequence's `block_table` is that of group 0, which sees all tokens.

    The other `num_groups - 1` groups see `window` tokens. A chunk has at most `max_chunk_len` tokens.
    """

    observer: Observer
    prefix_cache: GroupedPrefixCache
    block_tables: GroupedBlockTables

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        observer: Observer | None = None,
        *,
        num_groups: int,
        window: int,
        max_chunk_len: int,
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching, observer or Observer())
        self.group_observer = observe_groups(self.observer)
        self.num_groups = num_groups
        self.window = window
        self.max_held_blocks = max_held_blocks(window, max_chunk_len, block_size)  # in each group with a window
        self.block_tables = GroupedBlockTables(block_size, num_groups - 1)
        cache_arguments = (block_size, self.observer, enable_prefix_caching, self.block_tables, window)
        self.prefix_cache = GroupedPrefixCache(*cache_arguments)  # type: ignore[arg-type]

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can have in the cache if it is the only one."""
        if_long = self.num_blocks - (self.num_groups - 1) * self.max_held_blocks
        return max(if_long, self.num_blocks // self.num_groups) * self.block_size

    def num_missing_blocks(self, seq: Any) -> int:
        """Return the most free blocks that `seq` still takes for its tokens, less those that it frees.

        In each group with a window, `seq` holds at most `max_held_blocks` at the same time. If it gives back a block,
        the block becomes free only if no other sequence owns it.
        """
        num_missing = super().num_missing_blocks(seq)
        if num_missing <= 0:
            return num_missing
        # the blocks at one place of all groups have the same owners
        num_unshared = count_unshared(self.block_tables.windows_of(seq.block_table)[0], self._ref_counts)
        return num_missing + (self.num_groups - 1) * min(num_missing, self.max_held_blocks - num_unshared)

    def try_admit(self, seq: Any, num_reserved: int = 0) -> bool:
        """Admit `seq` as the core does. In groups with a window, it only owns what its first new token sees."""
        num_free = len(self._free) - num_reserved
        if num_free <= 0:
            return False
        hits = self.prefix_cache.find(seq)
        num_behind = self.num_behind(len(hits) * self.block_size)
        windows = [self.prefix_cache.windows[hit.serial] for hit in hits[num_behind:]]  # of each block: one per group
        num_missing = super().num_missing_blocks(seq) - len(hits)  # in each group
        num_needed = num_missing + sum([self._ref_counts[hit.block_id] == 0 for hit in hits])
        num_revived = sum([self._ref_counts[blocks[0]] == 0 for blocks in windows])
        num_needed += (self.num_groups - 1) * min(num_missing + num_revived, self.max_held_blocks)
        if num_needed > num_free:
            return False
        for hit in hits:
            self._share(seq, hit.block_id)
        for i, blocks in enumerate(windows, num_behind):
            self._share_windows(seq, i, blocks)
        seq.num_computed_tokens = len(hits) * self.block_size
        seq.num_registered_blocks = len(hits)
        seq.parent_serial = hits[-1].serial if hits else ROOT_SERIAL
        return True

    def try_allocate(self, seq: Any, num_tokens: int) -> bool:
        table, num_blocks = seq.block_table, -(-num_tokens // self.block_size)
        num_behind = self.num_behind(seq.num_computed_tokens)
        if num_behind and table.length and self.block_tables.windows_of(table)[0, num_behind - 1] != NULL_BLOCK:
            self._give_back(seq, num_behind)
        needs_copy = seq.has_shared_tail and self._ref_counts[self._tail(seq)] > 1
        num_new = max(0, num_blocks - table.length)
        num_new_windows = max(0, num_blocks - max(table.length, num_behind))
        num_of_windows = (self.num_groups - 1) * (num_new_windows + needs_copy)
        if num_new + needs_copy + num_of_windows > len(self._free):
            return False
        if needs_copy:
            self._copy_tail(seq)
        seq.has_shared_tail = False
        for i in range(table.length, num_blocks):
            self._append(seq, self._take(seq))
            if i >= num_behind:
                self._set_windows(seq, i, self._take_in_groups(seq, i))
        return super().try_allocate(seq, num_tokens)  # registers full blocks

    def fork(self, parent: Any, child: Any) -> None:
        super().fork(parent, child)
        for i, blocks in enumerate(self.block_tables.windows_of(parent.block_table).T.tolist()):
            if blocks[0] != NULL_BLOCK:
                self._share_windows(child, i, blocks)

    def free(self, seq: Any) -> None:
        owned = owned_by_windows(self.block_tables.windows_of(seq.block_table))
        super().free(seq)
        for block_id in owned:
            self._disown(block_id)

    def take_windows(self, seq: Any, first: int, stop: int | None = None) -> list[int]:
        """Take the blocks [first, stop) of `seq` in all groups with a window, and return them, the last ones first."""
        entries = self.block_tables.windows_of(seq.block_table)[:, first:stop]
        taken = owned_by_windows(entries)
        entries[:] = NULL_BLOCK
        return taken

    def tables_of(self, seq: Any) -> list[Table]:
        """Return what `check_invariants` needs to know of the block tables of `seq`, one of each group."""
        windows = self.block_tables.windows_of(seq.block_table).tolist()
        num_behind = self.num_behind(seq.num_computed_tokens)
        own = [Table(entries, num_behind, self.max_held_blocks) for entries in windows]
        return [Table(seq.block_table.view().tolist()), *own]

    def num_behind(self, position: int) -> int:
        return num_blocks_behind(position, self.window, self.block_size)

    def _give_back(self, seq: Any, num_behind: int) -> None:
        """Replace the first `num_behind` blocks by the null block in all groups with a window."""
        self.prefix_cache.register(seq, num_behind * self.block_size)  # while they are known
        given_back = self.take_windows(seq, 0, num_behind)
        for block_id in given_back:
            self._disown(block_id)
        self.observer.on_give_back(seq, given_back)

    def _take_in_groups(self, seq: Any, i: int) -> tuple[int, ...]:
        """Take a free block for each group with a window, for entry `i` of its block table, as `_take` does."""
        taken = []
        for group in range(1, self.num_groups):
            block_id, _ = self._free.popitem(last=False)
            self.group_observer.on_take_in_group(seq, group, i, block_id, block_id in self.prefix_cache)
            self.prefix_cache.forget(block_id)
            taken.append(block_id)
        return tuple(taken)

    def _share_windows(self, seq: Any, i: int, blocks: tuple[int, ...]) -> None:
        """Let `seq` own blocks with contents as block `i` of the groups with a window."""
        self._set_windows(seq, i, blocks)
        for group, block_id in enumerate(blocks, 1):
            self.group_observer.on_share_in_group(seq, group, i, block_id)

    def _set_windows(self, seq: Any, i: int, blocks: tuple[int, ...]) -> None:
        """Let `seq` own `blocks` as block `i` of the groups with a window, one for each. They may be free until now."""
        self.block_tables.windows_of(seq.block_table)[:, i] = blocks
        for block_id in blocks:
            self._free.pop(block_id, None)
            self._ref_counts[block_id] += 1

    def _copy_tail(self, seq: Any) -> None:
        super()._copy_tail(seq)
        i = seq.num_computed_tokens // self.block_size
        sources = self.block_tables.windows_of(seq.block_table)[:, i].tolist()
        destinations = self._take_in_groups(seq, seq.block_table.length)
        self._set_windows(seq, i, destinations)
        self._copies += zip(sources, destinations, strict=True)
        for group, (source, destination) in enumerate(zip(sources, destinations, strict=True), 1):
            self._disown(source)
            self.group_observer.on_copy_in_group(seq, group, source, destination)


def owned_by_windows(entries: np.ndarray) -> list[int]:
    """Return the blocks of entries: [num_window_groups, length], without null blocks, the last ones first."""
    by_block = entries.T
    return by_block[by_block != NULL_BLOCK][::-1].tolist()  # type: ignore[no-any-return]
