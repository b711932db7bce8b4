"""The tier in shared memory: as the tier on disk, and its memory is freed with its last user."""

import errno
import gc
import os
import random
import shutil
import signal
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from nanovllm_extras.kv_store import shared_slots, shared_tier
from nanovllm_extras.kv_store.conversations import save_conversation
from nanovllm_extras.kv_store.shared_tier import SharedTier
from tests.conftest import examples
from tests.extras.kv_store.forked import die_at, fork, join
from tests.extras.kv_store.tier_machine import MAX_BYTES, block_data, block_name, files_of, load

BLOCK, DATA = block_name(), block_data()


@pytest.fixture
def root():
    """A folder of its own in shared memory."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    yield folder
    shutil.rmtree(folder)


SIZES = (40, 100, 300)
WHICH = st.integers(0, 1)
BLOCKS = st.tuples(st.integers(0, 6), st.integers(0, 1), st.sampled_from(SIZES))


def named(block):
    key, tokens, size = block
    return block_name(7 * SIZES.index(size) + key, tokens)


class SharedMachine(RuleBasedStateMachine):
    """Two tiers of the same name take turns, against dictionaries in the order of eviction, one for each size."""

    @initialize()
    def start(self):
        self.root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.tiers = [self.make_tier(), self.make_tier()]
        self.model = {size: OrderedDict() for size in SIZES}  # size -> block -> data

    def make_tier(self):
        return SharedTier("default", MAX_BYTES, root=self.root)

    @rule(which=WHICH, block=BLOCKS, seed=st.integers(0, 99))
    def save(self, which, block, seed):
        data, kept = block_data(seed, block[2]), self.model[block[2]]
        stats, evictions = self.tiers[which].stats, self.tiers[which].stats.evictions
        self.tiers[which].save(named(block), data)
        expected, data[:] = data.tobytes(), 0  # the tier has a copy
        if block not in kept:
            if len(kept) == MAX_BYTES // block[2]:
                kept.popitem(last=False)
                evictions += 1
            kept[block] = expected
        assert stats.evictions == evictions

    @rule(which=WHICH, block=BLOCKS, size=st.sampled_from(SIZES))
    def load(self, which, block, size):
        stats = self.tiers[which].stats
        loaded_bytes = stats.loaded_bytes
        expected = self.model[size].get(block)
        assert load(self.tiers[which], named(block), size) == expected
        assert stats.loaded_bytes == loaded_bytes + (0 if expected is None else size)
        assert stats.failures == 0

    @rule(which=WHICH, blocks=st.lists(BLOCKS, max_size=5))
    def match(self, which, blocks):
        stats = self.tiers[which].stats
        before = stats.hits, stats.misses
        expected = next((i for i, block in enumerate(blocks) if block not in self.model[block[2]]), len(blocks))
        assert self.tiers[which].match([named(block) for block in blocks]) == expected
        for block in reversed(blocks[:expected]):
            self.model[block[2]].move_to_end(block)
        assert (stats.hits, stats.misses) == (before[0] + expected, before[1] + len(blocks) - expected)

    @rule(which=WHICH, block=BLOCKS)
    def failed(self, which, block):
        self.tiers[which].failed(named(block))
        self.model[block[2]].pop(block, None)

    @rule(which=WHICH)
    def restart(self, which):
        self.tiers[which].close()
        self.tiers[which] = self.make_tier()

    def teardown(self):
        if hasattr(self, "root"):
            for tier in self.tiers:
                assert tier.folder.exists()
                tier.close()
            assert not list(self.root.iterdir()), "the last one frees the memory"
            self.root.rmdir()


@pytest.mark.examples
class TestSharedTraffic(SharedMachine.TestCase):
    settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None)


def test_engines_share_blocks_and_the_last_one_frees_the_memory(root):
    one, other = SharedTier("default", MAX_BYTES, root=root), SharedTier("default", MAX_BYTES, root=root)
    one.save(BLOCK, DATA)
    save_conversation(one, "chat", [BLOCK])
    one.close()
    one.close()
    assert load(other, BLOCK) == DATA.tobytes()

    def use():
        tier = SharedTier("default", MAX_BYTES, root=root)
        assert load(tier, BLOCK) == DATA.tobytes()
        tier.save(block_name(1), DATA)
        tier.close()
        other.close()  # the parent's: it is not this process's to give up

    join(fork(use))
    assert load(other, block_name(1)) == DATA.tobytes()
    other.close()
    assert not list(root.iterdir())
    unclosed = SharedTier("default", MAX_BYTES, root=root)
    assert list(root.iterdir())
    del unclosed
    gc.collect()
    assert not list(root.iterdir())


def test_memory_of_killed_engines_is_found_again_or_freed(root):
    def work(name):
        tier = SharedTier(name, MAX_BYTES, root)
        tier.save(BLOCK, DATA)
        os.write(saved, b".")
        signal.pause()

    read, saved = os.pipe()
    pids = [fork(work, name) for name in ("one", "other")]
    for _ in pids:
        assert os.read(read, 1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    folders = {folder.name.rpartition("-")[2]: folder for folder in root.iterdir()}
    assert all(len(files_of(folder, ".slots")) == 1 for folder in folders.values())
    tier = SharedTier("one", MAX_BYTES, root)
    assert load(tier, BLOCK) == DATA.tobytes()
    assert list(root.iterdir()) == [folders["one"]], "no process uses the other one"
    tier.close()


def test_engines_that_start_and_end_at_once(root):
    """The folder goes and comes while others open it: each engine finds what it has saved itself."""

    def work(key):
        for _ in range(25):
            tier = SharedTier("default", MAX_BYTES, root=root)
            tier.save(block_name(key), DATA)
            assert load(tier, block_name(key)) == DATA.tobytes()
            assert tier.stats.failures == 0
            tier.close()

    join(*[fork(work, key) for key in range(3)])
    assert not list(root.iterdir())


def test_the_folder_goes_while_another_engine_opens_it(root, monkeypatch):
    """Its last user removes it after the file of users was opened, and before it is locked."""
    real_lock_file, num_calls = shared_tier.lock_file, []

    def lock_file(descriptor, operation):
        num_calls.append(1)
        if len(num_calls) == 1:
            (folder,) = root.iterdir()
            shutil.rmtree(folder)
        real_lock_file(descriptor, operation)

    monkeypatch.setattr(shared_tier, "lock_file", lock_file)
    num_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    one = SharedTier("default", MAX_BYTES, root=root)
    if num_open:
        assert len(os.listdir("/proc/self/fd")) == num_open + 1
    one.save(BLOCK, DATA)
    SharedTier("default", MAX_BYTES, root=root).close()
    assert load(one, BLOCK) == DATA.tobytes(), "its lock is on the file that the others see"
    one.close()


@pytest.mark.parametrize("has_other", [False, True], ids=["for itself", "by another engine"])
def test_a_folder_that_is_deleted_is_made_again(root, caplog, has_other):
    num_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    tier = SharedTier("default", MAX_BYTES, root=root)
    for _ in range(2):
        tier.save(BLOCK, DATA)
        shutil.rmtree(tier.folder)
        tier.failed(block_name(5))
        other = SharedTier("default", MAX_BYTES, root=root) if has_other else None
        caplog.clear()
        for key in range(1, 4):
            tier.save(block_name(key), DATA)
        assert len(caplog.records) == 1
        assert "has been deleted, and is made again" in caplog.text
        other = other or SharedTier("default", MAX_BYTES, root=root)
        assert load(other, block_name(3)) == load(tier, block_name(3)) == DATA.tobytes()
        other.close()
        assert load(tier, block_name(3)) == DATA.tobytes(), "it is still in use"
        assert tier.stats.failures == 0
    tier.close()
    assert not list(root.iterdir())
    if num_open:
        del tier, other
        assert len(os.listdir("/proc/self/fd")) == num_open


def test_folders_that_are_not_this_users(root, monkeypatch):
    folder = root / f"nanovllm-kv-{os.geteuid()}-default"
    secret = root / "secret"
    secret.mkdir(mode=0o700)
    (secret / "users").touch()
    folder.symlink_to(secret)
    with pytest.raises(ValueError, match="must be a folder of this user with mode 0700"):
        SharedTier("default", MAX_BYTES, root=root)
    SharedTier("other", MAX_BYTES, root).close()
    assert (secret / "users").exists(), "the link was not followed to remove an unused folder"
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="Remove it, or change `name`"):
        SharedTier("default", MAX_BYTES, root=root)


def test_memory_and_names_that_are_refused(root, caplog, monkeypatch):
    statistics = os.statvfs(root)
    too_many = statistics.f_blocks * statistics.f_frsize + 1
    with pytest.raises(ValueError, match=r"`max_bytes` must be at most \d+, the size of .*--shm-size"):
        SharedTier("default", too_many, root=root)
    with pytest.raises(ValueError, match="`max_bytes` must be an integer"):
        SharedTier("default", "1", root=root)
    with pytest.raises(ValueError, match="the folder of shared memory, does not exist"):
        SharedTier("default", MAX_BYTES, root=root / "no")
    for name in ("", "..", "../x", "a/b", ".x", "a\0", "ü", None, "x" * 101):
        with pytest.raises(ValueError, match="`name` must be 1 to 100 letters, digits"):
            SharedTier(name, MAX_BYTES, root)
    assert not list(root.iterdir())
    tier = SharedTier("default", MAX_BYTES, root=root)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        tier.save(BLOCK, DATA)
        tier.save(BLOCK, DATA)
    assert tier.match([BLOCK]) == 0
    assert len(caplog.records) == 1
    tier.close()


def test_an_engine_that_cannot_get_the_lock_does_not_wait_for_ever(root, monkeypatch):
    monkeypatch.setattr(shared_tier.lock_file.__globals__["time"], "monotonic", iter(range(100)).__next__)

    def flock(*args):
        raise BlockingIOError

    monkeypatch.setattr(shared_tier.fcntl, "flock", flock)
    num_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(TimeoutError):  # before the clock has no more seconds
        SharedTier("default", MAX_BYTES, root=root)
    if num_open:
        assert len(os.listdir("/proc/self/fd")) == num_open


# ---- processes that write at once, or are killed


LARGE = 1 << 19
NUM_SLOTS = 2


def save_without_end(root, ready=None):
    """Write three blocks in turns to two slots."""
    tier = SharedTier("default", NUM_SLOTS * LARGE, root=root)
    data = [block_data(key, LARGE) for key in range(3)]
    if ready is not None:
        os.write(ready, b"x")
    while True:
        for key in range(3):
            tier.save(block_name(key), data[key])


@pytest.mark.parametrize("num_kills", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_readers_find_whole_blocks_while_writers_replace_them_and_are_killed(root, num_kills):
    data = [block_data(key, LARGE).tobytes() for key in range(3)]
    tier = SharedTier("default", NUM_SLOTS * LARGE, root=root)
    choose, num_found, num_missed = random.Random(0), 0, 0
    for _ in range(num_kills):
        is_ready, ready = os.pipe()
        pids = [fork(save_without_end, root, ready) for _ in range(2)]
        os.read(is_ready, 1)
        deadline = time.monotonic() + choose.uniform(0.02, 0.06)
        is_first = True
        while is_first or time.monotonic() < deadline:
            is_first = False
            for key in range(3):
                found = load(tier, block_name(key), LARGE)
                assert found in (None, data[key])
                num_found += found is not None
                num_missed += found is None
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(is_ready)
        os.close(ready)
        for key in range(3):
            assert load(tier, block_name(key), LARGE) in (None, data[key])
            tier.save(block_name(key), block_data(key, LARGE))
            assert load(tier, block_name(key), LARGE) == data[key]
    assert num_found > 0
    assert num_missed > 0
    assert tier.stats.failures == 0
    tier.close()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("module", "function"), [(os, "pwrite"), (shared_slots, "checksum_of"), (os, "replace")])
def test_sigkill_at_each_moment_of_a_save(root, module, function, after):
    """The slots are full, so that a save evicts a block too; but for `replace`, which makes the file."""
    tier = SharedTier("default", MAX_BYTES, root=root)
    first = 10 if module is os and function == "replace" else 0
    for key in range(first, 10):
        tier.save(block_name(key), block_data(key))

    def save():
        setattr(module, function, die_at(getattr(module, function), after=after))
        tier.save(block_name(10), block_data(10))

    _, status = os.waitpid(fork(save), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    other = SharedTier("default", MAX_BYTES, root=root)
    for one in (tier, other):
        assert sum(load(one, block_name(key)) is not None for key in range(11)) >= 9 - first
        for key in range(11):
            assert load(one, block_name(key)) in (None, block_data(key).tobytes())
        one.save(block_name(11), DATA)
        assert load(one, block_name(11)) == DATA.tobytes()
        one.close()


def test_a_block_that_is_replaced_while_it_is_read_is_a_miss(root, monkeypatch):
    tier, other = SharedTier("default", 100, root=root), SharedTier("default", 100, root=root)
    tier.save(BLOCK, DATA)
    real_copy = np.copyto

    def copy(out, data):
        real_copy(out, data)
        other.save(block_name(1), block_data(1))

    monkeypatch.setattr(shared_slots.np, "copyto", copy)
    assert load(tier, BLOCK) is None
    monkeypatch.undo()
    assert load(tier, block_name(1)) == block_data(1).tobytes()
    tier.close()
    other.close()


def test_without_ordered_stores_the_checksum_is_compared(root):
    path = shared_slots.make_slots(root, 48, 100, 1000)
    one, strict = shared_slots.Slots(path), shared_slots.Slots(path, has_ordered_stores=False)
    assert one.save(BLOCK, DATA, 1) == 0
    assert strict.load(BLOCK, out := np.zeros(100, np.uint8))
    assert out.tobytes() == DATA.tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(DATA.tobytes())] ^= 1
    path.write_bytes(content)
    assert not strict.load(BLOCK, out)
    assert one.load(BLOCK, out)


def test_memory_that_is_used_up_in_the_middle_of_a_block(root, monkeypatch, caplog):
    tier = SharedTier("default", 100, root=root)
    tier.save(BLOCK, DATA)
    real_pwrite = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda file, data, start: real_pwrite(file, data[:40] if start else data, start))
        tier.save(block_name(1), block_data(1))
    assert tier.match([BLOCK]) == tier.match([block_name(1)]) == 0
    assert "No space left" in caplog.text
    tier.save(block_name(1), block_data(1))
    assert load(tier, block_name(1)) == block_data(1).tobytes()
    tier.save(BLOCK, block_data(0, 101))
    assert tier.match([BLOCK]) == 0, "it is larger than the tier"
    tier.close()
