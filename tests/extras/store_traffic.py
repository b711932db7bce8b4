"""Runs of a scheduler without a model, with a K/V store that lies, loses blocks and drops some. See `full_traffic.py`.

The fake cache keeps for each slot the whole prefix that its K and V depend on, and so does the fake store. A sequence
that reads a slot with another prefix than its own fails the run.
"""

import random

import numpy as np

from nanovllm_extras.kv_store.keys import names_of
from nanovllm_extras.kv_store.store import Loaded, StoreHooks, StoreStats
from tests.extras.full_fake_kv_cache import FullFakeKVCache
from tests.extras.full_traffic import Run
from tests.extras.speculative_traffic import SpeculativeRun

ROOT = bytes(32)


class FakeStore:
    """Keeps the contents of slots. With `seed`, each call may fail; without, it is a perfect store."""

    def __init__(self, block_size, seed=None):
        self.block_size = block_size
        self.rng = None if seed is None else random.Random(seed)
        self.can_load = self.can_save = True
        self.stats = StoreStats()
        self.kept = {}  # name -> contents of the slots of a block
        self.num_loads = self.num_failures = self.num_saves = 0

    def names(self, seq, start, stop):
        return names_of(seq, start, stop, ROOT, self.block_size)

    def match(self, names):
        found = next((i for i, name in enumerate(names) if name not in self.kept), len(names))
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

    def fails(self, probability):
        return self.rng is not None and self.rng.random() < probability


class Loading:
    """Mixed into a fake KV cache: does the loads of a step."""

    def move(self, swap_outs=(), swap_ins=(), copies=()):
        journal = super().move(swap_outs, swap_ins, copies)
        for name, block_id in getattr(copies, "loads", ()):
            for i, held in enumerate(copies.loaded[name]):
                self.slots[block_id, i] = held
                journal.append((self.slots, (block_id, i), None))
        return journal


class LoadingFakeKVCache(Loading, FullFakeKVCache):
    pass


class WithStore:
    """Mixed into a `Run`: attaches a fake store, and does what the steps want of it."""

    def __init__(self, *arguments, store_seed=None, **options):
        self.store_seed = store_seed
        super().__init__(*arguments, **options)

    def make_cache(self, block_size):
        self.store = FakeStore(block_size, self.store_seed)
        StoreHooks(self.store, self.manager)
        return LoadingFakeKVCache(block_size, self.window)

    def write(self, out, writes):
        journal = super().write(out, writes)
        for name, block_id in getattr(out.copies, "saves", ()):
            self.store.save(name, [self.cache.slots[block_id, i] for i in range(self.manager.block_size)])
        return journal


class StoreRun(WithStore, Run):
    """`Run` with a store."""


class SpeculativeStoreRun(WithStore, SpeculativeRun):
    """The same with drafts."""
