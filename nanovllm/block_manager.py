"""Who owns which block of the KV cache.

The cache is cut into blocks of `block_size` tokens, and a sequence's block table lists its blocks in order, so that
memory is handed out as sequences grow and wasted only in each one's last block (PagedAttention, Kwon et al. 2023,
https://arxiv.org/abs/2309.06180). Blocks that hold the same tokens after the same prefix are shared: prefix caching.

This file decides which block is given, shared, kept and evicted, each in O(1). It knows no queues of requests (that is
the `Scheduler`, its only caller) and no tensors.

Where a token lives, with block_size 4 and the block table [7, 2]:

    position              0   1   2   3   4   5
    block_table[pos // 4] 7   7   7   7   2   2
    slot = block * 4 + pos % 4
                         28  29  30  31   8   9
"""

from collections import OrderedDict
from itertools import count
from typing import NamedTuple

import xxhash

from nanovllm.sequence import Sequence

ROOT_SERIAL = 0  # the parent of every first block


def hash_block(parent_hash: int, tokens: bytes) -> int:
    """The key of a full block: 64 bits over its tokens, seeded with the key of the block before it."""
    return xxhash.xxh3_64_intdigest(tokens, seed=parent_hash)


class CachedBlock(NamedTuple):
    """What a full block holds. The hash finds it; `parent_serial` and `tokens` prove it.

    A serial number is given once and never again, so a parent's serial stands for the whole prefix before the block,
    and two prefixes can't be mistaken for each other even where their hashes collide.
    """

    block_id: int
    block_hash: int
    serial: int
    parent_serial: int
    tokens: bytes


class BlockManager:
    """Blocks 1 … `num_blocks` for sequences; block 0 is the null block, which padding writes to and nobody owns.

    A block is owned (reference count above zero), or free; a free block that is still cached can be hit again until
    it is handed out anew. So `num_free_blocks == num_blocks` whenever no sequence runs.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_references = 0  # the sum of all reference counts
        self._ref_counts = [0] * (num_blocks + 1)
        # in the order in which they are to be handed out again
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._cached_by_hash: dict[int, CachedBlock] = {}
        self._cached_by_id: dict[int, CachedBlock] = {}
        self._serials = count(ROOT_SERIAL + 1)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can have in the cache when it is alone."""
        return self.num_blocks * self.block_size

    # ---- giving and taking back

    def try_admit(self, seq: Sequence) -> bool:
        """Give `seq`, which owns nothing, the cached blocks of its prefix, if all of its tokens find room right now.

        Looking at the whole sequence, and not only at its first chunk, keeps a long prompt from being admitted only
        to be preempted half-way; nothing is reserved all the same. Sets `num_computed_tokens` to what was found.
        """
        assert not seq.block_table.length, "a sequence that is admitted owns no blocks"
        if not self._free:  # at least one new block is needed: the last token is always computed
            return False
        hits = self._find_prefix(seq)
        num_new_blocks = -(-seq.num_tokens // self.block_size) - len(hits)
        num_revived = sum(self._ref_counts[hit.block_id] == 0 for hit in hits)  # hits that count as free until now
        if num_new_blocks + num_revived > len(self._free):
            return False
        for hit in hits:
            if self._ref_counts[hit.block_id] == 0:
                del self._free[hit.block_id]
            self._ref_counts[hit.block_id] += 1
            seq.block_table.append(hit.block_id)
        self.num_references += len(hits)
        seq.num_registered_blocks = len(hits)
        seq.parent_serial = hits[-1].serial if hits else ROOT_SERIAL
        seq.num_computed_tokens = len(hits) * self.block_size
        return True

    def try_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Let the block table of `seq` cover its first `num_tokens` tokens; False, and no change, if blocks run out.

        The blocks that these tokens fill can be shared from now on, even by later sequences of the same step: each
        layer stores the K and V of the whole batch before it attends. See `unregister` for a step that fails.
        """
        num_new_blocks = -(-num_tokens // self.block_size) - seq.block_table.length
        if num_new_blocks > len(self._free):
            return False
        for _ in range(num_new_blocks):
            block_id, _ = self._free.popitem(last=False)
            self._forget(block_id)
            self._ref_counts[block_id] = 1
            self.num_references += 1
            seq.block_table.append(block_id)
        if self.enable_prefix_caching and num_tokens // self.block_size > seq.num_registered_blocks:
            self._register(seq, num_tokens)
        return True

    def free(self, seq: Sequence) -> None:
        """Take all blocks of `seq` back, the last one first, so that the tails of prefixes are evicted first."""
        for block_id in seq.block_table.view()[::-1].tolist():
            self._ref_counts[block_id] -= 1
            self.num_references -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._cached_by_id:  # nothing in it can be hit: reuse it first
                    self._free.move_to_end(block_id, last=False)
        seq.block_table.clear()
        seq.num_registered_blocks = 0
        seq.parent_serial = ROOT_SERIAL
        seq.num_computed_tokens = 0

    # ---- prefix caching

    def unregister(self, seq: Sequence, num_tokens: int) -> None:
        """Hide the blocks beyond the first `num_tokens` tokens again: the step that should have filled them failed."""
        for block_id in seq.block_table.view(num_tokens // self.block_size).tolist():
            self._forget(block_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached contents; sequences that run keep their blocks."""
        self._cached_by_hash.clear()
        self._cached_by_id.clear()

    def _find_prefix(self, seq: Sequence) -> list[CachedBlock]:
        """The longest run of cached blocks that `seq` begins with, short of its last token, which must be computed."""
        hits: list[CachedBlock] = []
        if not self.enable_prefix_caching:
            return hits
        parent_serial = ROOT_SERIAL
        for i in range((seq.num_tokens - 1) // self.block_size):
            block_hash, tokens = self._key(seq, i)
            hit = self._cached_by_hash.get(block_hash)
            if hit is None or hit.parent_serial != parent_serial or hit.tokens != tokens:
                break
            hits.append(hit)
            parent_serial = hit.serial
        return hits

    def _register(self, seq: Sequence, num_tokens: int) -> None:
        """Let others find the full blocks among the first `num_tokens` tokens of `seq`."""
        for i in range(seq.num_registered_blocks, num_tokens // self.block_size):
            block_hash, tokens = self._key(seq, i)
            known = self._cached_by_hash.get(block_hash)
            if known is None or known.parent_serial != seq.parent_serial or known.tokens != tokens:
                if known is not None:  # another block under the same hash: the newer one wins
                    self._forget(known.block_id)
                block_id = int(seq.block_table.view()[i])
                known = CachedBlock(block_id, block_hash, next(self._serials), seq.parent_serial, tokens)
                self._cached_by_hash[block_hash] = self._cached_by_id[block_id] = known
            # else: a twin was registered meanwhile. Block tables are append-only, so both copies stay.
            seq.parent_serial = known.serial
            seq.num_registered_blocks = i + 1

    def _key(self, seq: Sequence, i: int) -> tuple[int, bytes]:
        """Hash and tokens of the `i`-th block of `seq`, which is full; `i` counts up, so its parent's hash is known."""
        tokens = seq.token_ids.view(i * self.block_size, (i + 1) * self.block_size).tobytes()
        if i == len(seq.block_hashes):
            seq.block_hashes.append(hash_block(seq.block_hashes[-1] if i else 0, tokens))
        return seq.block_hashes[i], tokens

    def _forget(self, block_id: int) -> None:
        """Drop what the prefix cache knows of a block, if anything."""
        cached = self._cached_by_id.pop(block_id, None)
        if cached is not None:
            del self._cached_by_hash[cached.block_hash]
