"""A K/V store without tiers, which lies, loses blocks and drops some.

It keeps what a fake KV cache has: for each slot, the whole prefix that its K and V depend on.
"""

import random

import numpy as np

from nanovllm_extras.kv_store.keys import names_of
from nanovllm_extras.kv_store.share import Loaded, name_of_state
from nanovllm_extras.kv_store.store import KVStore, StoreStats

ROOT = bytes(32)


class FakeStore:
    """Keeps the contents of slots. With `seed`, each call may fail; without, it is a perfect store."""

    num_usable = KVStore.num_usable

    def __init__(self, block_size, seed=None, has_states=False):
        self.block_size = block_size
        self.bytes_per_state = int(has_states)
        self.rng = None if seed is None else random.Random(seed)
        self.can_load = self.can_save = True
        self.stats = StoreStats()
        self.tiers = self
        self.kept = {}  # name -> contents of the slots of a block
        self.states = {}  # name of a snapshot -> the tokens that the state has seen
        self.num_loads = self.num_failures = self.num_saves = 0

    def names(self, seq, start, stop):
        return names_of(seq, start, stop, ROOT, self.block_size)

    def match(self, names):
        kept = self.kept | self.states
        found = next((i for i, name in enumerate(names) if name not in kept), len(names))
        if self.fails(0.2):
            return self.rng.randint(0, len(names))  # a lie, in either direction
        return found

    def load(self, name):
        contents = self.kept.get(name)
        if contents is None or self.fails(0.1):
            self.num_failures += 1
            return None
        self.num_loads += 1
        return Loaded(contents, self.tier_of(contents))

    def tier_of(self, contents):
        """The tier that has a block, of two: every other block of a prefix is in the same one."""
        return ("even", "odd")[len(contents[-1]) // self.block_size % 2]

    def save(self, name, contents):
        self.num_saves += 1
        prefix = contents[-1]
        assert np.array(prefix[-self.block_size :], dtype="<i4").tobytes() == name.tokens
        assert contents == [prefix[: len(prefix) - i] for i in reversed(range(self.block_size))], "a half-filled block"
        assert self.kept.get(name, contents) == contents, "two prefixes with the same name"
        if not self.fails(0.1):
            self.kept[name] = contents
        if self.kept and self.fails(0.1):  # evicted
            del self.kept[self.rng.choice(list(self.kept))]

    def load_state(self, name):
        tokens = self.states.get(name_of_state(name))
        if tokens is None or self.fails(0.2):
            self.num_failures += 1
            return None
        return Loaded(tokens, "states")

    def save_state(self, name, tokens):
        if not self.fails(0.1):
            self.states[name] = tokens
        if self.states and self.fails(0.1):  # evicted
            del self.states[self.rng.choice(list(self.states))]

    def fails(self, probability):
        return self.rng is not None and self.rng.random() < probability
