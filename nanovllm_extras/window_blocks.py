"""Windows: when every layer of the model sees only a window, a sequence gives back the blocks behind it.

The token at position p sees the positions from p - window + 1 on. In the block table, the null block replaces each
block that is wholly before these positions, so that the later entries keep their indices. With block_size 4, a window
of 5, and position 10 next, the positions 6 … 10 are seen:

    position        0 1 2 3    4 5 6 7    8 9 10
    block table     [  7          2          5   ]    before
                    [  0          2          5   ]    block 7 is free

What the rest of the engine makes of it:

    prefix hits     A block that is given back keeps its contents, and can be hit, until it is handed out again. A hit
                    needs all blocks of a prefix, from the first one on: once the first is evicted, the prefix is not
                    found. A sequence that hits it owns only the blocks inside its window.
    forks           A child has the null entries of its parent, and shares the other blocks.
    preemption      A recomputed sequence starts again, with all of its tokens.
    swap            Only blocks of its own are copied to host memory and back; the null entries stay null.
    admission       A sequence needs room for its window and one step's tokens, not for all of its tokens.

`assembly.py` makes this block manager for such models. If some layers see all tokens, `kv_groups/` gives back the
blocks of the others.
"""

import sys

import numpy as np

from nanovllm.prefix_cache import ROOT_SERIAL
from nanovllm_extras.full_observer import Observer
from nanovllm_extras.full_sequence import Sequence
from nanovllm_extras.invariants import NULL_BLOCK, Table
from nanovllm_extras.known_tokens import KnownTokensBlockManager


class WindowBlockManager(KnownTokensBlockManager):
    """Gives back blocks behind the window. A token sees `window` tokens; a chunk has at most `max_chunk_len` tokens."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        observer: Observer | None = None,
        *,
        window: int,
        max_chunk_len: int,
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching, observer)
        self.window = window
        self.max_chunk_len = max_chunk_len
        self.max_held_blocks = max_held_blocks(window, max_chunk_len, block_size)

    @property
    def capacity(self) -> int:
        """Return the most tokens of a sequence that runs by itself: unbounded if its window fits in the pool."""
        return sys.maxsize - 1 if self.max_held_blocks <= self.num_blocks else super().capacity

    def num_missing_blocks(self, seq: Sequence) -> int:
        """Return the most free blocks that `seq` still takes for its tokens, less those that it frees.

        `seq` holds at most `max_held_blocks` at the same time. If it gives back a block, the block becomes free only if
        no other sequence owns it:

            max_held_blocks 5, block table [0, 7, 2, 5], block 7 is shared, `seq` lacks 4 blocks

            min(4, 5 - 2) = 3: blocks 2 and 5 may become free again, block 7 stays in use
        """
        num_missing = super().num_missing_blocks(seq)
        if num_missing <= 0 or self.max_held_blocks > self.num_blocks:
            return num_missing
        return min(num_missing, self.max_held_blocks - count_unshared(seq.block_table.view(), self._ref_counts))

    def try_admit(self, seq: Sequence, num_reserved: int = 0) -> bool:
        """Admit `seq` as the base class does; it only owns the cached blocks that its first new token sees."""
        hits = self.prefix_cache.find(seq)
        num_behind = self.num_behind(len(hits) * self.block_size)
        num_revived = sum([self._ref_counts[hit.block_id] == 0 for hit in hits[num_behind:]])
        num_needed = super().num_missing_blocks(seq) - len(hits) + num_revived
        if min(num_needed, self.max_held_blocks) > len(self._free) - num_reserved:
            return False
        for i, hit in enumerate(hits):
            self._share(seq, NULL_BLOCK if i < num_behind else hit.block_id)
        seq.num_computed_tokens = len(hits) * self.block_size
        seq.num_registered_blocks = len(hits)
        seq.parent_serial = hits[-1].serial if hits else ROOT_SERIAL
        return True

    def try_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        table, num_behind = seq.block_table, self.num_behind(seq.num_computed_tokens)
        while table.length < num_behind:  # it is swapped in: there are no blocks for these entries
            self._share(seq, NULL_BLOCK)
        if num_behind and table.data[num_behind - 1] != NULL_BLOCK:
            self._give_back(seq, num_behind)
        return super().try_allocate(seq, num_tokens)

    def num_behind(self, position: int) -> int:
        """Return the number of blocks that are wholly before the window of the token at `position`."""
        return max(0, position - self.window + 1) // self.block_size

    def tables_of(self, seq: Sequence) -> list[Table]:
        """Return what `check_invariants` needs to know of the block table of `seq`."""
        entries = seq.block_table.view().tolist()
        return [Table(entries, self.num_behind(seq.num_computed_tokens), self.max_held_blocks)]

    def _give_back(self, seq: Sequence, num_behind: int) -> None:
        """Replace the first `num_behind` entries of the block table by the null block."""
        self.prefix_cache.register(seq, num_behind * self.block_size)  # while they are known
        entries = seq.block_table.view(0, num_behind)
        given_back = entries[entries != NULL_BLOCK][::-1].tolist()  # as in `free`, the last one first
        entries[:] = NULL_BLOCK
        for block_id in given_back:
            self._disown(block_id)
        self.observer.on_give_back(seq, given_back)

    def _share(self, seq: Sequence, block_id: int) -> None:
        if block_id != NULL_BLOCK:
            super()._share(seq, block_id)
            return
        self.block_tables.append(seq.block_table, NULL_BLOCK)
        self.observer.on_share_block(seq, NULL_BLOCK)

    def _disown(self, block_id: int) -> None:
        if block_id != NULL_BLOCK:
            super()._disown(block_id)


def max_held_blocks(window: int, max_chunk_len: int, block_size: int) -> int:
    """Return the most blocks that a chunk and the window of its first token can touch."""
    return -(-(window - 1 + max_chunk_len) // block_size) + 1


def count_unshared(entries: np.ndarray, ref_counts: list[int]) -> int:
    """Count the blocks with one owner in entries of a block table: [num_entries]"""
    return sum([ref_counts[block_id] == 1 for block_id in entries[entries != NULL_BLOCK].tolist()])
