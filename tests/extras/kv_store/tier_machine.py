"""A state machine for tiers whose blocks are files, against a dictionary in the order of eviction.

Two tiers of the same folder take turns, as those of two processes do, and are closed and opened again.
"""

import os
import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nanovllm_extras.records.tier import BlockName

MAX_BYTES = 1000
OVERHEAD = 16 + 16 + 32 + 16 + 8  # magic, lengths, key, tokens, checksum


def block_name(key=0, tokens=0):
    """A block of four tokens. Names with the same key and other tokens collide."""
    return BlockName(bytes([key]) * 32, np.full(4, tokens, "<i4").tobytes())


def block_data(seed=0, size=100):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def load(tier, block, size=100):
    """Return what a tier loads, as bytes, or None."""
    out = np.full(size, 7, np.uint8)
    return out.tobytes() if tier.load(block, out) else None


def files_of(folder, suffix=".kv"):
    return {path.name: path.stat().st_size for path in Path(folder).iterdir() if path.name.endswith(suffix)}


def noted_sum(folder):
    """The sum of sizes in the lock file."""
    return int.from_bytes((Path(folder) / "lock").read_bytes(), "little")


NAMES = st.builds(block_name, st.integers(0, 6), st.integers(0, 1))
SIZES = st.sampled_from([40, 100, 300])
WHICH = st.integers(0, 1)


class TierMachine(RuleBasedStateMachine):
    """`make_tier` opens a tier of MAX_BYTES bytes in `self.root`."""

    def make_tier(self):
        raise NotImplementedError

    @initialize()
    def start(self):
        self.root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.tiers = [self.make_tier(), self.make_tier()]
        self.model: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()  # key -> (tokens, data)

    def has(self, block):
        return self.model.get(block.key, (None,))[0] == block.tokens

    @rule(which=WHICH, block=NAMES, size=SIZES, seed=st.integers(0, 99))
    def save(self, which, block, size, seed):
        data = block_data(seed, size)
        stats, evictions = self.tiers[which].stats, self.tiers[which].stats.evictions
        self.tiers[which].save(block, data)
        data[:] = 0  # the tier has a copy
        if self.has(block) and len(self.model[block.key][1]) == size:
            return
        while self.num_bytes() + size + OVERHEAD > MAX_BYTES:
            self.model.popitem(last=False)
            evictions += 1
        self.model.pop(block.key, None)
        self.model[block.key] = block.tokens, block_data(seed, size).tobytes()
        assert stats.evictions == evictions

    @rule(which=WHICH, block=NAMES, size=SIZES)
    def load(self, which, block, size):
        stats = self.tiers[which].stats
        loaded_bytes = stats.loaded_bytes
        found = load(self.tiers[which], block, size)
        if self.has(block) and len(self.model[block.key][1]) == size:
            assert found == self.model[block.key][1]
            assert stats.loaded_bytes == loaded_bytes + size
        else:
            assert found is None
            assert stats.loaded_bytes == loaded_bytes
        assert stats.failures == 0

    @rule(which=WHICH, blocks=st.lists(NAMES, max_size=5))
    def match(self, which, blocks):
        stats = self.tiers[which].stats
        before = stats.hits, stats.misses
        expected = next((i for i, block in enumerate(blocks) if not self.has(block)), len(blocks))
        assert self.tiers[which].match(blocks) == expected
        for block in reversed(blocks[:expected]):
            self.model.move_to_end(block.key)
        assert (stats.hits, stats.misses) == (before[0] + expected, before[1] + len(blocks) - expected)

    @rule(which=WHICH, block=NAMES)
    def failed(self, which, block):
        self.tiers[which].failed(block)
        self.model.pop(block.key, None)

    @rule(which=WHICH)
    def finished(self, which):
        self.tiers[which].finished()

    @rule(which=WHICH)
    def restart(self, which):
        self.tiers[which].close()
        self.tiers[which] = self.make_tier()

    def num_bytes(self):
        return sum(len(data) + OVERHEAD for _, data in self.model.values())

    @invariant()
    def the_files_are_those_of_the_model(self):
        if hasattr(self, "model"):
            folder = self.tiers[0].folder
            sizes = {f"{key.hex()}.kv": len(data) + OVERHEAD for key, (_, data) in self.model.items()}
            assert files_of(folder) == sizes
            assert not files_of(folder, ".tmp")
            assert noted_sum(folder) == sum(sizes.values()) <= MAX_BYTES

    def teardown(self):
        if hasattr(self, "root"):
            for tier in self.tiers:
                tier.close()
            shutil.rmtree(self.root)
