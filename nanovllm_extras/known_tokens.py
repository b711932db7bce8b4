"""Blocks of sequences whose newest tokens are not known yet: sampled by a step in flight (`overlap.py`), or drafts
(`speculation/`).

Their K and V are computed, but the prefix cache learns only known tokens.
"""

from typing import Any

import numpy as np

from nanovllm.block_manager import BlockManager
from nanovllm.block_tables import IntArray
from nanovllm.prefix_cache import PrefixCache
from nanovllm_extras.full_observer import Observer


class KnownTokensPrefixCache(PrefixCache):
    """Registers only blocks whose tokens are known, and which the sequence owns."""

    def register(self, seq: Any, num_tokens: int) -> None:
        if not self.is_enabled:
            return
        num_tokens = min(num_tokens, seq.token_ids.length)
        first, stop = seq.num_registered_blocks, num_tokens // self.block_size
        for i in range(first, stop):  # behind a window a block may have been given back, and evicted since
            if not seq.block_table.data[i] and not self.has_block(seq, i):
                return
            super().register(seq, (i + 1) * self.block_size)

    def has_block(self, seq: Any, i: int) -> bool:
        """Return whether the contents of block `i` of `seq` are cached, whichever block holds them."""
        block_hash, tokens = self._key(seq, i)
        known = self._by_hash.get(block_hash)
        return known is not None and known.parent_serial == seq.parent_serial and known.tokens == tokens


class KnownTokensBlockManager(BlockManager):
    """The core's block manager over a `KnownTokensPrefixCache`."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, observer: Observer | None = None
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching, observer)
        self.prefix_cache = KnownTokensPrefixCache(block_size, self.observer, enable_prefix_caching)

    def free(self, seq: Any) -> None:
        """Register the full blocks whose tokens have become known, then free all blocks of `seq`."""
        if seq.block_table.length:
            self.prefix_cache.register(seq, seq.num_computed_tokens)
        super().free(seq)


def grow(ids: IntArray) -> None:
    """Double the capacity of a sequence's tokens, so that there is room for tokens that are not known yet."""
    ids.data = np.concatenate([ids.data, np.zeros_like(ids.data)])
