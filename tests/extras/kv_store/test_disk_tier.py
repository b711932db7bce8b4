"""The tier on disk: a dictionary in the order of eviction is the oracle; damage, full disks and SIGKILL are misses."""

import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import time

import pytest
from hypothesis import settings

from nanovllm_extras.kv_store import disk_tier
from nanovllm_extras.kv_store.disk_tier import DiskTier
from tests.conftest import examples
from tests.extras.kv_store.forked import die_at, fork, join
from tests.extras.kv_store.tier_machine import (
    MAX_BYTES,
    OVERHEAD,
    TierMachine,
    block_data,
    block_name,
    files_of,
    load,
    noted_sum,
)

BLOCK, DATA = block_name(), block_data()


class DiskMachine(TierMachine):
    def make_tier(self):
        return DiskTier(self.root / "store", MAX_BYTES)


@pytest.mark.examples
class TestDiskTraffic(DiskMachine.TestCase):
    settings = settings(max_examples=examples(120), stateful_step_count=30, deadline=None)


@pytest.fixture
def tier(tmp_path):
    return DiskTier(tmp_path / "store", MAX_BYTES)


@pytest.fixture
def path(tier):
    """The file of the one block that is saved."""
    tier.save(BLOCK, DATA)
    (path,) = tier.folder.glob("*.kv")
    return path


def check_it_is_a_miss_and_can_be_saved_again(tier, path):
    assert load(tier, BLOCK) is None
    assert tier.match([BLOCK]) == 0
    assert load(tier, BLOCK) is None
    tier.save(BLOCK, DATA)
    assert load(tier, BLOCK) == DATA.tobytes()
    assert files_of(tier.folder) == {path.name: len(DATA) + OVERHEAD}
    assert noted_sum(tier.folder) == len(DATA) + OVERHEAD


# ---- damage


def test_a_file_that_is_cut_or_longer_is_a_miss(tier, path):
    content = path.read_bytes()
    for length in [*range(0, len(content), 20), len(content) - 1]:
        path.write_bytes(content[:length])
        assert tier.match([BLOCK]) == 0, length
        assert load(tier, BLOCK) is None, length
    path.write_bytes(content + b"\0")
    assert tier.match([BLOCK]) == 0
    tier.failed(BLOCK)
    check_it_is_a_miss_and_can_be_saved_again(tier, path)


def test_each_flipped_byte_is_a_miss(tier, path):
    content = path.read_bytes()
    for position in range(1, len(content), 3):  # some of each field
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert load(tier, BLOCK) is None, position
        assert tier.match([BLOCK]) == 0, position
    assert tier.stats.failures == (len(DATA) + 8) // 3, "the checksum finds these; a wrong header is another block's"
    tier.failed(BLOCK)
    check_it_is_a_miss_and_can_be_saved_again(tier, path)


def test_a_file_of_another_block_or_version_is_a_miss(tier, path):
    for block in (block_name(key=1), block_name(tokens=1)):
        other = DiskTier(tier.folder.parent / "other", MAX_BYTES)
        other.save(block, DATA)
        (source,) = other.folder.glob("*.kv")
        path.write_bytes(source.read_bytes())
        check_it_is_a_miss_and_can_be_saved_again(tier, path)
        source.unlink()
    path.write_bytes(path.read_bytes().replace(b"K/V 1", b"K/V 2", 1))
    check_it_is_a_miss_and_can_be_saved_again(tier, path)


def test_an_array_of_another_size_is_not_filled(tier, path):
    assert load(tier, BLOCK, len(DATA) + 1) is None
    assert load(tier, BLOCK, len(DATA) - 1) is None
    assert load(tier, BLOCK) == DATA.tobytes()


@pytest.mark.parametrize("kind", ["empty", "folder", "pipe", "link", "dangling link"])
def test_something_else_in_the_way(tier, path, kind, caplog):
    elsewhere = tier.folder.parent / "elsewhere"
    os.replace(path, elsewhere)
    {
        "empty": path.touch,
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(elsewhere),
        "dangling link": lambda: path.symlink_to("nowhere"),
    }[kind]()
    assert tier.match([BLOCK]) == 0
    assert load(tier, BLOCK) is None
    content = elsewhere.read_bytes()
    tier.save(BLOCK, DATA)
    tier.save(BLOCK, DATA)
    assert load(tier, BLOCK) == (None if kind == "folder" else DATA.tobytes())
    tier.failed(BLOCK)
    assert elsewhere.read_bytes() == content, "a link is replaced, not followed"
    assert len(caplog.records) == (kind == "folder")
    assert not files_of(tier.folder, ".tmp")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_no_file_stays_open(tier, path, monkeypatch):
    before = os.listdir("/proc/self/fd")
    tier.match([BLOCK, block_name(1)])
    tier.match([block_name(0, tokens=1)])
    load(tier, BLOCK)
    load(tier, BLOCK, 7)
    tier.save(BLOCK, DATA)
    tier.save(BLOCK, block_data(1, 50))
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", raises(errno.ENOLCK))
        tier.save(block_name(2), DATA)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    load(tier, BLOCK, 50)
    assert os.listdir("/proc/self/fd") == before


# ---- a disk that is full or read-only


def raises(code):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("module", "function", "code"),
    [
        (disk_tier.tempfile, "mkstemp", errno.EROFS),
        (disk_tier.os, "replace", errno.ENOSPC),
        (disk_tier.os, "pwrite", errno.ENOSPC),
        (disk_tier.fcntl, "flock", errno.ENOLCK),
    ],
)
def test_a_save_that_fails_is_dropped_with_one_line(tier, path, monkeypatch, caplog, module, function, code):
    with monkeypatch.context() as patch:
        patch.setattr(module, function, raises(code))
        for key in range(1, 4):
            tier.save(block_name(key), DATA)
            assert tier.match([block_name(key)]) == 0
        tier.failed(block_name(9))
        assert load(tier, BLOCK) == DATA.tobytes()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert os.strerror(code) in caplog.text
    assert str(tier.folder) in caplog.text
    assert tier.stats.failures >= 3
    assert tier.stats.saved_bytes == len(DATA)
    assert not files_of(tier.folder, ".tmp")
    tier.save(block_name(1), DATA)
    assert load(tier, block_name(1)) == DATA.tobytes()
    assert noted_sum(tier.folder) >= sum(files_of(tier.folder).values())


def test_each_cause_has_a_line_of_its_own(tier, monkeypatch, caplog):
    codes = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES)
    for _ in range(2):
        for code in codes:
            with monkeypatch.context() as patch:
                patch.setattr(disk_tier.os, "replace", raises(code))
                for key in range(3):
                    tier.save(block_name(key), DATA)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(codes)
    for code, record in zip(codes, caplog.records, strict=True):
        assert os.strerror(code) in record.message
        assert "further errors of this kind are only counted" in record.message
    assert tier.stats.failures == 2 * 3 * len(codes)


def test_a_file_that_cannot_be_written_to_its_end(tier, path, caplog):
    """The system refuses files of more than 4,096 bytes, after it has written that many: like a full disk."""
    tier = DiskTier(tier.folder, 100_000)

    def save():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        for key in range(1, 4):
            tier.save(block_name(key), block_data(key, 50_000))
            assert tier.match([block_name(key)]) == 0
        tier.save(block_name(4), DATA)
        assert load(tier, block_name(4)) == DATA.tobytes()
        assert len(caplog.records) == 1
        assert tier.stats.failures == 3

    join(fork(save))
    assert len(files_of(tier.folder)) == 2
    assert not files_of(tier.folder, ".tmp")


def test_a_read_only_folder_can_be_loaded_from(tier, path, monkeypatch, caplog):
    real_open = os.open

    def read_only_open(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only_open)
    monkeypatch.setattr(os, "utime", raises(errno.EROFS))
    again = DiskTier(tier.folder, MAX_BYTES)
    assert again.match([BLOCK]) == 1
    assert load(again, BLOCK) == DATA.tobytes()
    again.save(block_name(1), DATA)
    again.failed(BLOCK)
    assert load(again, BLOCK) == DATA.tobytes()
    assert len(caplog.records) == 1


def test_a_block_larger_than_the_bound_is_not_saved(tier, path, caplog):
    tier.save(block_name(1), block_data(1, MAX_BYTES - OVERHEAD + 1))
    assert files_of(tier.folder).keys() == {path.name}
    tier.save(block_name(1), block_data(1, MAX_BYTES - OVERHEAD))
    assert sum(files_of(tier.folder).values()) == MAX_BYTES
    assert not caplog.records


# ---- the folder


def test_modes_and_owners(tmp_path, path, monkeypatch):
    folder = path.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    folder.chmod(0o750)
    with pytest.raises(ValueError, match=r"`folder` must belong to this user and have mode 0700.*0750.*chmod 700"):
        DiskTier(folder, MAX_BYTES)
    with pytest.raises(ValueError, match="`folder` cannot be created"):
        DiskTier(path, MAX_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(ValueError, match="must belong to this user"):
            DiskTier(folder, MAX_BYTES)
    deep = DiskTier(tmp_path / "a" / "b", MAX_BYTES)
    assert deep.folder.stat().st_mode & 0o777 == 0o700


def test_bounds_that_are_refused(tmp_path):
    for max_bytes in (0, -1, True, 1.5, "1"):
        with pytest.raises(ValueError, match="`max_bytes` must be an integer >= 1"):
            DiskTier(tmp_path / "store", max_bytes)
    assert not (tmp_path / "store").exists()


def test_keys_of_any_bytes_stay_in_the_folder(tier):
    for key in (b"../../x", b"/etc/x", b"\0", b"", b"." * 32):
        block = BLOCK._replace(key=key)
        tier.save(block, DATA)
        assert load(tier, block) == DATA.tobytes()
    assert [path.name for path in tier.folder.parent.iterdir()] == ["store"]
    tier.save(BLOCK._replace(key=b"x" * 200), DATA)  # the name is too long


def test_old_temporary_files_are_removed_at_the_start(tier, path):
    young, old, stranger = (tier.folder / name for name in ("young.tmp", "old.tmp", "notes.txt"))
    for file in (young, old, stranger):
        file.write_bytes(b"x")
    for file in (old, stranger):
        os.utime(file, (time.time() - 100,) * 2)
    again = DiskTier(tier.folder, MAX_BYTES)
    assert not old.exists()
    assert young.exists()
    assert stranger.exists()
    assert load(again, BLOCK) == DATA.tobytes()


def test_the_order_of_eviction_when_the_clock_stands_still(tier, monkeypatch):
    """As between two ticks of a file system's clock."""
    monkeypatch.setattr(disk_tier.time, "time_ns", lambda: 10**18)
    for key in (3, 0, 2, 1):
        tier.save(block_name(key), DATA)
    tier.match([block_name(2), block_name(0)])
    files = sorted(tier.folder.glob("*.kv"), key=lambda path: path.stat().st_mtime_ns)
    assert [int(path.name[:2]) for path in files] == [3, 1, 0, 2]


def test_a_smaller_bound_holds_from_the_start(tier):
    for key in range(5):
        tier.save(block_name(key), DATA)
    assert tier.match([block_name(0), block_name(1), block_name(2)]) == 3
    again = DiskTier(tier.folder, 2 * (len(DATA) + OVERHEAD))
    assert again.match([block_name(0), block_name(1)]) == 2, "the rest of a prefix needs its beginning"
    assert len(files_of(tier.folder)) == 2
    assert again.stats.evictions == 3


def test_a_lost_or_wrong_sum_is_found_again(tier, path):
    lock = tier.folder / "lock"
    lock.unlink()
    tier.save(block_name(1), DATA)
    assert noted_sum(tier.folder) == 2 * (len(DATA) + OVERHEAD)
    lock.write_bytes(bytes(8))
    tier.failed(block_name(1))
    assert noted_sum(tier.folder) == 0, "a sum below zero would read as a huge one, and evict everything"
    lock.write_bytes((10**6).to_bytes(8, "little"))  # too large, as after SIGKILL
    for key in range(8):
        tier.save(block_name(key), DATA)
    assert noted_sum(tier.folder) == sum(files_of(tier.folder).values()) == 5 * (len(DATA) + OVERHEAD)


def test_a_folder_that_is_deleted_is_made_again(tmp_path, caplog):
    tier = DiskTier(tmp_path / "a" / "b" / "store", MAX_BYTES)
    for is_whole in (True, False):  # with its parents, or the folder
        caplog.clear()
        for key in range(9):
            tier.save(block_name(key), DATA)
        shutil.rmtree(tmp_path / "a" if is_whole else tier.folder)  # a user's `rm -r`
        assert load(tier, block_name(8)) is None
        tier.failed(block_name(8))
        for key in range(9):
            tier.save(block_name(key), DATA)
        assert load(tier, block_name(8)) == DATA.tobytes()
        assert tier.folder.stat().st_mode & 0o777 == 0o700
        assert noted_sum(tier.folder) == sum(files_of(tier.folder).values()) == 5 * (len(DATA) + OVERHEAD)
        assert [record.message for record in caplog.records] == [
            f"K/V store: {tier.folder} has been deleted, and is made again"
        ]
        assert tier.stats.failures == 0


def test_a_folder_that_cannot_be_made_again_is_a_failed_save(tmp_path, caplog):
    tier = DiskTier(tmp_path / "a" / "store", MAX_BYTES)
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").symlink_to("/no/such/folder")
    for key in range(2):
        tier.save(block_name(key), DATA)
    assert len(caplog.records) == 1
    assert tier.stats.failures == 2
    (tmp_path / "a").unlink()
    tier.save(BLOCK, DATA)
    assert load(tier, BLOCK) == DATA.tobytes()


# ---- threads and processes


def test_processes_write_the_same_blocks(tmp_path):
    """Each removes what it and the others write, over a folder that holds five of eight blocks."""

    def work(seed):
        tier = DiskTier(tmp_path / "store", MAX_BYTES)
        choose = random.Random(seed)
        num_loaded = 0
        for i in range(100):
            key = choose.randrange(8)
            tier.save(block_name(key), block_data(key))
            if i % 5 == 0:
                tier.failed(block_name(choose.randrange(8)))
            found = load(tier, block_name(key))
            assert found in (None, block_data(key).tobytes())
            num_loaded += found is not None
            assert sum(files_of_others(tier.folder)) <= MAX_BYTES
        assert num_loaded > 15
        assert tier.stats.failures == 0

    def files_of_others(folder):
        fd = os.open(folder / "lock", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        sizes = list(files_of(folder).values())
        os.close(fd)
        return sizes

    join(*[fork(work, seed) for seed in range(2)])
    assert noted_sum(tmp_path / "store") == sum(files_of(tmp_path / "store").values())
    assert not files_of(tmp_path / "store", ".tmp")


def test_a_process_that_holds_the_lock_and_is_stopped(tier, path, monkeypatch, caplog):
    monkeypatch.setattr(disk_tier, "LOCK_TIMEOUT_S", 0.01)
    with open(tier.folder / "lock", "rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tier.save(block_name(1), DATA)
        assert load(tier, BLOCK) == DATA.tobytes()
        DiskTier(tier.folder, MAX_BYTES)
    assert tier.match([block_name(1)]) == 0
    assert "another process holds the lock" in caplog.text
    tier.save(block_name(1), DATA)
    assert tier.match([block_name(1)]) == 1


def test_a_process_forked_while_the_lock_is_held_does_not_keep_it(tier, path, monkeypatch):
    monkeypatch.setattr(disk_tier, "LOCK_TIMEOUT_S", 0.01)
    with tier._files.locked():
        pid = fork(signal.pause)
    tier.save(block_name(1), DATA)
    assert tier.match([block_name(1)]) == 1
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# ---- SIGKILL


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("module", "function", "num_calls"),
    [(os, "replace", 1), (os, "unlink", 1), (os, "stat", 1), *[(disk_tier, "write_sum", i) for i in (1, 2, 3)]],
)
def test_sigkill_at_each_moment_of_a_save(tmp_path, module, function, num_calls, after):
    """The folder is full, so that a save evicts a block too."""
    tier = DiskTier(tmp_path / "store", MAX_BYTES)
    for key in range(5):
        tier.save(block_name(key), block_data(key))

    def save():
        setattr(module, function, die_at(getattr(module, function), num_calls, after))
        tier.save(block_name(5), block_data(5))

    _, status = os.waitpid(fork(save), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    true_sum = sum(files_of(tier.folder).values())
    assert true_sum <= noted_sum(tier.folder)
    assert true_sum <= MAX_BYTES
    assert len(files_of(tier.folder)) >= 4
    again = DiskTier(tmp_path / "store", MAX_BYTES)
    assert noted_sum(tier.folder) == true_sum
    for one in (tier, again):
        for key in range(6):
            assert load(one, block_name(key)) in (None, block_data(key).tobytes())
            one.save(block_name(key), block_data(key))
            assert load(one, block_name(key)) == block_data(key).tobytes()
        assert sum(files_of(tier.folder).values()) <= noted_sum(tier.folder) <= MAX_BYTES


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("module", "function"), [(os, "unlink"), (disk_tier, "write_sum")])
def test_sigkill_at_each_moment_of_a_removal(tier, path, module, function, after):
    def remove():
        setattr(module, function, die_at(getattr(module, function), after=after))
        tier.failed(BLOCK)

    _, status = os.waitpid(fork(remove), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert noted_sum(tier.folder) >= sum(files_of(tier.folder).values())
    assert load(tier, BLOCK) in (None, DATA.tobytes())


@pytest.mark.parametrize("num_kills", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_sigkill_in_the_middle_of_writes(tmp_path, num_kills):
    size, num_blocks = 1 << 19, 5
    max_bytes = 3 * (size + OVERHEAD)
    choose = random.Random(0)
    data = [block_data(key, size) for key in range(num_blocks)]

    def save_without_end(ready):
        tier = DiskTier(tmp_path / "store", max_bytes)
        os.write(ready, b"x")
        while True:
            for key in range(num_blocks):
                tier.save(block_name(key), data[key])

    num_found = num_left = num_killed = 0
    while num_killed < num_kills or (num_left == 0 and num_killed < 100):  # a busy machine may write nothing meanwhile
        num_killed += 1
        is_ready, ready = os.pipe()
        pid = fork(save_without_end, ready)
        os.read(is_ready, 1)
        time.sleep(choose.uniform(0.002, 0.01))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(is_ready)
        num_left += len(files_of(tmp_path / "store", ".tmp"))
        tier = DiskTier(tmp_path / "store", max_bytes)
        assert sum(files_of(tier.folder).values()) == noted_sum(tier.folder) <= max_bytes
        for key in range(num_blocks):
            found = load(tier, block_name(key), size)
            assert found in (None, data[key].tobytes())
            num_found += found is not None
        assert tier.stats.failures == 0, "no block is ever half written"
        for file in tier.folder.glob("*.tmp"):
            file.unlink()
    assert num_found >= num_kills
    assert num_left >= 1, "some writes were cut off"
