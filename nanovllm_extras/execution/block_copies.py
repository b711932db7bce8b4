"""`BlockCopies`: the copies of a step without host memory and states. `transfers.py` has the others."""

from collections.abc import Iterable

from nanovllm.kv_cache import KVCache


class BlockCopies:
    """Copies blocks in all caches that have the same block ids, before each forward pass of `ModelRunner`."""

    num_swap_blocks = num_swap_slots = 0
    """Blocks, and slots of states, in host memory."""

    def __init__(self, caches: Iterable[KVCache]) -> None:
        self.caches = list(caches)

    @property
    def bytes_per_block(self) -> int:
        """The size of one block in all caches."""
        return sum([cache.bytes_per_block for cache in self.caches])

    def allocate(self) -> None:
        """Allocate host memory. Called when the KV cache has been allocated."""

    def add(self, cache: KVCache) -> None:
        """Add a cache with the same block ids, as that of a draft model, which has been allocated."""
        self.caches.append(cache)

    def before(self, moves: list[tuple[int, int]]) -> None:
        """Do what a step copies before its forward pass."""
        for cache in self.caches:
            cache.copy_blocks(moves)
