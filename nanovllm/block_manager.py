"""The block manager: which sequence owns which block of the KV cache?

The cache is divided into blocks of `block_size` tokens, and a sequence's block table lists its blocks in order. Blocks
are allocated as sequences grow, so only the end of each sequence's last block is wasted (PagedAttention, Kwon et al.
2023, https://arxiv.org/abs/2309.06180). Sequences that begin with the same tokens share blocks (`prefix_cache.py`).

This file allocates, shares, keeps and evicts blocks, each in O(1). It has no queues and no tensors; the `Scheduler`
calls it. Where the K and V of a token are stored, with block_size 4 and the block table [7, 2]:

    position              0   1   2   3   4   5          block_id = block_table[position // 4]
    block id              7   7   7   7   2   2          slot = block_id * 4 + position % 4
    slot                 28  29  30  31   8   9

Which sequence owns which block, for A (6 tokens) and B (7 tokens), whose first 4 tokens are the same:

    block                       7             2             5        references: block 7 two, blocks 2 and 5 one each
    A  block table [7, 2]   [ 0 1 2 3 ]  [ 4 5 . . ]
    B  block table [7, 5]   [ 0 1 2 3 ]                [ 4 5 6 . ]   two slots of block 2 and one of block 5 are waste

When A ends, block 2 returns to the free queue, and only B owns block 7.
"""

from collections import OrderedDict

from nanovllm.observer import Observer
from nanovllm.prefix_cache import PrefixCache
from nanovllm.sequence import Sequence


class BlockManager:
    """Blocks 1 … `num_blocks` for sequences. No sequence owns block 0, the null block, which pads block tables.

    A block is either owned (its reference count is above zero) or free. A free block that is still cached can be found
    again until it is reused.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        observer: Observer | None = None,
        prefix_cache_cls: type[PrefixCache] = PrefixCache,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.observer = observer or Observer()
        self.prefix_cache = prefix_cache_cls(block_size, self.observer, enable_prefix_caching)
        self._ref_counts = [0] * (num_blocks + 1)
        # in the order in which they will be allocated again
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._copies: list[tuple[int, int]] = []

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can have in the cache if it is the only one."""
        return self.num_blocks * self.block_size

    def num_missing_blocks(self, seq: Sequence) -> int:
        """Return the number of blocks that `seq` still needs for all of its tokens."""
        return -(-seq.num_tokens // self.block_size) - len(seq.block_table)

    def try_admit(self, seq: Sequence, num_reserved: int = 0) -> bool:
        """Give `seq`, which owns no blocks, the cached blocks of its prefix, if there is room for all of its tokens.

        Returns False, and changes nothing, if there is not enough room. `num_reserved` free blocks are kept for tokens
        that running sequences have not computed yet. Requiring room for all tokens of `seq`, not only for its first
        chunk, avoids preempting a long prompt half-way.

        A prompt of 10 tokens whose first 4 are cached needs 3 blocks of 4: 1 is found, and `try_allocate` will take 2
        free ones.
        """
        assert not seq.block_table, "a sequence that is admitted owns no blocks"
        num_free = self.num_free_blocks - num_reserved
        if num_free <= 0:
            return False
        hits = self.prefix_cache.find(seq)
        num_revived = sum([self.num_owners(hit.block_id) == 0 for hit in hits])  # hits that are free until now
        if self.num_missing_blocks(seq) - len(hits) + num_revived > num_free:
            return False
        for hit in hits:
            self._share(seq, hit.block_id)
        seq.num_computed_tokens = len(hits) * self.block_size
        seq.cached_blocks = hits
        return True

    def try_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Extend the block table of `seq` to its first `num_tokens` tokens. Returns False, unchanged, without room.

        If the next token goes to a block that others own too, `seq` gets its own copy of the block (copy-on-write).
        Full blocks are registered in the prefix cache at once, so that even later sequences of the same step share
        them: each layer stores the K and V of the whole batch before it attends.

        With block_size 4 and the block table [7, 2], num_tokens 8 takes no block; num_tokens 9 takes a free one, 5,
        and the block table is [7, 2, 5].
        """
        # Positions begin at 0. With blocks of 4, the eighth token is at position 7 and fills the second block: a block
        # is full if num_tokens % size == 0. It is registered below, and no new block is taken. The ninth token is the
        # first of a new block. nano-vllm's `may_append` does the same for decodes: if `len(seq) % block_size == 1`, it
        # takes a block for the newest token, whose K and V are not stored yet; if `== 0`, it hashes the full block.
        size = self.block_size
        if num_tokens > len(seq.block_table) * size or seq.has_shared_tail:
            num_new_blocks = max(0, -(-num_tokens // size) - len(seq.block_table))
            needs_copy = seq.has_shared_tail and self.num_owners(self._tail(seq)) > 1
            if num_new_blocks + needs_copy > self.num_free_blocks:
                return False
            if needs_copy:
                self._copy_tail(seq)
            seq.has_shared_tail = False
            for _ in range(num_new_blocks):
                self._append(seq, self.take(seq))
        if num_tokens >= (len(seq.cached_blocks) + 1) * size:
            self.prefix_cache.register(seq, num_tokens)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which owns no blocks, share all blocks of `parent`."""
        parent.has_shared_tail = child.has_shared_tail = parent.num_computed_tokens % self.block_size > 0
        for block_id in parent.block_table:
            self._share(child, block_id)
        child.num_computed_tokens = parent.num_computed_tokens
        child.cached_blocks = parent.cached_blocks.copy()

    def free(self, seq: Sequence) -> None:
        """Free all blocks of `seq`, the last one first, so that the ends of prefixes are evicted first."""
        for block_id in reversed(seq.block_table):
            self.release(block_id)
        del seq.block_table[:]
        seq.has_shared_tail = False
        seq.cached_blocks = []
        seq.num_computed_tokens = 0
        self.observer.on_free(seq)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (source, destination) blocks of this step's copy-on-write, to be copied before the step runs."""
        copies, self._copies = self._copies, []
        return copies

    # ---- single blocks, for what goes beyond the methods above

    def num_owners(self, block_id: int) -> int:
        """Return the number of block tables that hold a block. A block without owners is free."""
        return self._ref_counts[block_id]

    def take(self, seq: Sequence) -> int:
        """Take a free block for `seq`: one without cached contents, otherwise the least recently freed one, evicted.

        The caller, who is its only owner, puts it into the block table.
        """
        block_id, _ = self._free.popitem(last=False)
        self.observer.on_take_block(seq, block_id, block_id in self.prefix_cache)
        self.prefix_cache.forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def release(self, block_id: int) -> None:
        """Count one owner of a block less. The block becomes free if there is no other."""
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            self._free[block_id] = None
            if block_id not in self.prefix_cache:  # its contents cannot be found: reuse it first
                self._free.move_to_end(block_id, last=False)

    def _append(self, seq: Sequence, block_id: int) -> None:
        seq.block_table.append(block_id)

    def _share(self, seq: Sequence, block_id: int) -> None:
        """Add an owner to a block with contents. The block may be free until now."""
        self._free.pop(block_id, None)
        self._ref_counts[block_id] += 1
        self._append(seq, block_id)
        self.observer.on_share_block(seq, block_id)

    def _tail(self, seq: Sequence) -> int:
        """Return the block that the K and V of the next token are written to."""
        return seq.block_table[seq.num_computed_tokens // self.block_size]

    def _copy_tail(self, seq: Sequence) -> None:
        source, destination = self._tail(seq), self.take(seq)
        self._copies.append((source, destination))
        seq.block_table[seq.num_computed_tokens // self.block_size] = destination
        self.release(source)
        self.observer.on_copy_block(seq, source, destination)
