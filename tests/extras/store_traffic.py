"""Runs of a scheduler without a model, with a K/V store that lies, loses blocks and drops some. See `full_traffic.py`.

The fake cache keeps for each slot the whole prefix that its K and V depend on, and so does the fake store. A sequence
that reads a slot with another prefix than its own fails the run.
"""

from nanovllm_extras.memory.store_link import StoreLink
from tests.extras.fake_store import FakeStore
from tests.extras.full_fake_kv_cache import FullFakeKVCache
from tests.extras.full_traffic import Run
from tests.extras.speculative_traffic import SpeculativeRun


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
    """Mixed into a `Run`: has a fake store, and does what the steps want of it."""

    is_plain = False

    def __init__(self, *arguments, store_seed=None, **options):
        self.store_seed = store_seed
        super().__init__(*arguments, **options)

    def held(self, block_size):
        self.store = FakeStore(block_size, self.store_seed)
        return super().held(block_size) | {"store": StoreLink(self.store)}

    def make_cache(self, block_size):
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
