"""The tier in shared memory: as the tier on disk, and its memory is freed with its last user."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings

import nanovllm
from nanovllm.extras.kv_store import shared_tier
from nanovllm.extras.kv_store.conversations import save_conversation
from nanovllm.extras.kv_store.shared_tier import SharedTier
from tests.conftest import examples
from tests.extras.kv_store.forked import fork, join
from tests.extras.kv_store.tier_machine import MAX_BYTES, TierMachine, block_data, block_name, files_of, load

BLOCK, DATA = block_name(), block_data()


@pytest.fixture
def root():
    """A folder of its own in shared memory."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    yield folder
    shutil.rmtree(folder)


class SharedMachine(TierMachine):
    def make_tier(self):
        return SharedTier("default", MAX_BYTES, root=self.root)

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


def test_names_are_apart(root):
    one, other = SharedTier("one", MAX_BYTES, root), SharedTier("other", MAX_BYTES, root)
    one.save(BLOCK, DATA)
    assert other.match([BLOCK]) == 0
    one.close()
    assert [folder.name for folder in root.iterdir()] == [f"nanovllm-kv-{os.geteuid()}-other"]
    other.close()


def test_memory_of_killed_engines_is_found_again_or_freed(root):
    def work(name):
        tier = SharedTier(name, MAX_BYTES, root)
        tier.save(BLOCK, DATA)
        signal.pause()

    pids = [fork(work, name) for name in ("one", "other")]
    deadline = time.monotonic() + 30
    while len(list(root.rglob("*.kv"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    folders = {folder.name.rpartition("-")[2]: folder for folder in root.iterdir()}
    assert all(len(files_of(folder)) == 1 for folder in folders.values())
    tier = SharedTier("one", MAX_BYTES, root)
    assert load(tier, BLOCK) == DATA.tobytes()
    assert list(root.iterdir()) == [folders["one"]], "no process uses the other one"
    tier.close()


def test_a_process_that_ends_without_closing_frees_the_memory(root):
    """In a new process, which imports nothing but the tier and so starts fast."""
    package = os.path.dirname(nanovllm.__file__)
    code = f"""
import sys, types
for name, folder in (("nanovllm", ""), ("nanovllm.extras", "/extras")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{package!r} + folder]
from pathlib import Path
import numpy as np
from nanovllm.extras.kv_store.shared_tier import SharedTier
from nanovllm.extras.kv_store.tier import BlockName
tier = SharedTier("default", 1000, root=Path({str(root)!r}))
block = BlockName(bytes(32), bytes(16))
tier.save(block, np.zeros(40, np.uint8))
assert tier.match([block]) == 1 and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert not list(root.iterdir())


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


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".x", "a\0", "ü", None, "x" * 101])
def test_names_that_are_refused_here(root, name):
    with pytest.raises(ValueError, match="`name` must be 1 to 100 letters, digits"):
        SharedTier(name, MAX_BYTES, root)
    assert not list(root.iterdir())


def test_memory_that_is_not_there(root, caplog, monkeypatch):
    statistics = os.statvfs(root)
    too_many = statistics.f_blocks * statistics.f_frsize + 1
    with pytest.raises(ValueError, match=r"`max_bytes` must be at most \d+, the size of .*--shm-size"):
        SharedTier("default", too_many, root=root)
    with pytest.raises(ValueError, match="`max_bytes` must be an integer"):
        SharedTier("default", "1", root=root)
    with pytest.raises(ValueError, match="the folder of shared memory, does not exist"):
        SharedTier("default", MAX_BYTES, root=root / "no")
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
    begin = time.perf_counter()
    with pytest.raises(TimeoutError):
        SharedTier("default", MAX_BYTES, root=root)
    assert time.perf_counter() - begin < 1
    if num_open:
        assert len(os.listdir("/proc/self/fd")) == num_open
