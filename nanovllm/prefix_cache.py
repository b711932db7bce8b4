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
from typing import NamedTuple

import xxhash

from nanovllm.observer import Observer
from nanovllm.sequence import Sequence

ROOT_SERIAL = 0  # the parent of every first block, unless a sequence has another `root_serial`


def hash_block(parent_hash: int, tokens: bytes) -> int:
    """Return the key of a full block: 64 bits over its tokens, seeded with the key of the block before it."""
    return xxhash.xxh3_64_intdigest(tokens, seed=parent_hash)


class CachedBlock(NamedTuple):
    """The contents of a full block. The hash finds it; `parent_serial` and `tokens` prove that it is the right one.

    A serial number is given once and never again, so the serial number of a parent identifies the whole prefix before
    the block. Two prefixes are never mistaken for each other, even if their hashes are equal.
    """

    block_id: int
    block_hash: int
    serial: int
    parent_serial: int
    tokens: bytes


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
        if not self.is_enabled:
            return hits
        parent_serial = seq.root_serial
        for i in range(seq.max_cached_tokens // self.block_size):
            block_hash, tokens = self.key(seq, i)
            hit = self._by_hash.get(block_hash)
            if hit is None or hit.parent_serial != parent_serial or hit.tokens != tokens:
                break
            hits.append(hit)
            parent_serial = hit.serial
        return hits

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Add the full blocks among the first `num_tokens` tokens of `seq`, so that other sequences can find them."""
        if not self.is_enabled:
            return
        for i in range(seq.num_registered_blocks, num_tokens // self.block_size):
            block_hash, tokens = self.key(seq, i)
            known = self._by_hash.get(block_hash)
            # If another block with this prefix is registered, it stays the one that is found; `seq` keeps its own.
            if known is None or known.parent_serial != seq.parent_serial or known.tokens != tokens:
                block_id = int(seq.block_table.data[i])
                if known is not None:  # a different block with the same hash: the newer one wins
                    self.forget(known.block_id)
                known = CachedBlock(block_id, block_hash, next(self._serials), seq.parent_serial, tokens)
                self._by_hash[block_hash] = self._by_id[block_id] = known
                self.observer.on_register_block(seq, block_id, block_hash, known.serial)
            seq.parent_serial = known.serial
            seq.num_registered_blocks = i + 1

    def forget(self, block_id: int) -> None:
        """Remove a block, if it is cached."""
        cached = self._by_id.pop(block_id, None)
        if cached is not None:
            del self._by_hash[cached.block_hash]
            self.observer.on_forget_block(block_id)

    def key(self, seq: Sequence, i: int) -> tuple[int, bytes]:
        """Return hash and tokens of full block `i` of `seq`. Callers count `i` up, so the parent's hash is known."""
        tokens = seq.token_ids.view(i * self.block_size, (i + 1) * self.block_size).tobytes()
        if i == len(seq.block_hashes):
            seq.block_hashes.append(hash_block(seq.block_hashes[-1] if i else seq.root_serial, tokens))
        return seq.block_hashes[i], tokens
