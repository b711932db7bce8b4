"""The prefix cache: which blocks hold the K and V of a prefix that another sequence needs too?

A full block is identified by its tokens and by all tokens before it. Sequences that begin with the same tokens share
such blocks instead of computing them again. This file finds, registers and forgets blocks. The `BlockManager`, its only
caller, decides which sequence owns a block and when a block is reused.

Two prompts with block_size 4; the second finds the first two blocks of the first one:

    [ a b c d | e f g h | i j ]     registers blocks 7 (a b c d, after nothing) and 2 (e f g h, after block 7)
    [ a b c d | e f g h | x y ]     finds 7, then 2; its third block is its own
    [ e f g h | …                   finds nothing: block 2 holds these tokens, but after other tokens
"""

from itertools import count

import xxhash

from nanovllm.observer import Observer
from nanovllm.sequence import CachedBlock, Sequence

ROOT_SERIAL = 0  # the parent of every first block, unless a sequence has another `root_serial`


def hash_block(parent_hash: int, tokens: bytes) -> int:
    """Return the key of a full block: 64 bits over its tokens, seeded with the key of the block before it."""
    return xxhash.xxh3_64_intdigest(tokens, seed=parent_hash)


class PrefixCache:
    """All blocks that can be found, by hash and by id. If it is not enabled, it stays empty."""

    def __init__(self, block_size: int, observer: Observer, is_enabled: bool = True) -> None:
        self.block_size = block_size
        self.observer = observer
        self.is_enabled = is_enabled
        self._by_hash: dict[int, CachedBlock] = {}
        self._by_id: dict[int, CachedBlock] = {}
        self._serials = count(ROOT_SERIAL + 1)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_id

    def find(self, seq: Sequence) -> list[CachedBlock]:
        """Return the longest run of cached blocks that `seq` begins with.

        A prompt of 8 tokens in blocks of 4 finds at most one block, even if both are cached, since its last token is
        always computed (`seq.max_cached_tokens` is 7).
        """
        hits: list[CachedBlock] = []
        max_hits = seq.max_cached_tokens // self.block_size if self.is_enabled else 0
        while len(hits) < max_hits:
            hit = self.look_up(*self.key(seq, hits))
            if hit is None:
                break
            hits.append(hit)
        return hits

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Add the full blocks among the first `num_tokens` tokens of `seq`, so that other sequences can find them."""
        if not self.is_enabled:
            return
        for i in range(len(seq.cached_blocks), num_tokens // self.block_size):
            block_hash, parent_serial, tokens = self.key(seq, seq.cached_blocks)
            # If another block with this prefix is registered, it stays the one that is found; `seq` keeps its own.
            cached = self.look_up(block_hash, parent_serial, tokens)
            if cached is None:
                if block_hash in self._by_hash:  # a different block with the same hash: the newer one wins
                    self.forget(self._by_hash[block_hash].block_id)
                block_id = seq.block_table[i]
                cached = CachedBlock(block_id, block_hash, next(self._serials), parent_serial, tokens)
                self._by_hash[block_hash] = self._by_id[block_id] = cached
                self.observer.on_register_block(seq, block_id, block_hash, cached.serial)
            seq.cached_blocks.append(cached)

    def forget(self, block_id: int) -> None:
        """Remove a block, if it is cached."""
        cached = self._by_id.pop(block_id, None)
        if cached is not None:
            del self._by_hash[cached.block_hash]
            self.observer.on_forget_block(block_id)

    def key(self, seq: Sequence, before: list[CachedBlock]) -> tuple[int, int, bytes]:
        """Return hash, serial number of the parent, and tokens of the full block of `seq` after the blocks `before`."""
        start = len(before) * self.block_size
        tokens = seq.token_ids[start : start + self.block_size].tobytes()
        parent_hash, parent_serial = (before[-1].block_hash, before[-1].serial) if before else (seq.root_serial,) * 2
        return hash_block(parent_hash, tokens), parent_serial, tokens

    def look_up(self, block_hash: int, parent_serial: int, tokens: bytes) -> CachedBlock | None:
        """Return the cached block that has this key. An equal hash alone proves nothing."""
        found = self._by_hash.get(block_hash)
        is_same = found is not None and found.parent_serial == parent_serial and found.tokens == tokens
        return found if is_same else None
