"""Blocks in shared memory, for all engines of one user on one machine: a folder in /dev/shm, with a lock.

A `DiskTier` has a file for each block. Here, all blocks of one size are in one file (`shared_slots.py`), which every
process keeps mapped. So loading a block is one copy, for which no page of a file is looked up or mapped. The lock is
released when its process is killed. `multiprocessing.shared_memory` would also give such a region, but before Python
3.13 the first process that ends removes it.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nanovllm_extras.kv_store.disk_tier import DiskTier, check_name, lock_file
from nanovllm_extras.kv_store.shared_slots import SUFFIX, Slots, make_slots, sizes_of
from nanovllm_extras.records.tier import BlockName

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
USERS = "users"  # locked by each process that uses the folder, so that the last one knows to remove it


class SharedTier(DiskTier):
    """A tier in shared memory, of at most `max_bytes`. Engines of one user that give the same `name` share it.

    Blocks of each size have `max_bytes` of their own, and the first engine that saves such a block decides how many.
    Engines of different models should use different names.

    The last engine that closes it frees the memory. After SIGKILL, the next engine with this name finds the blocks, and
    the next engine with another name frees them.
    """

    name = "shared"

    def __init__(self, name: str, max_bytes: int, root: Path = SHARED_MEMORY) -> None:
        check_name("name", name)
        if not root.is_dir():
            raise ValueError(
                f"{root}, the folder of shared memory, does not exist: use a `DiskTier`, or leave the tier out"
            )
        statistics = os.statvfs(root)
        num_bytes = statistics.f_blocks * statistics.f_frsize
        if isinstance(max_bytes, int) and max_bytes > num_bytes:
            raise ValueError(
                f"`max_bytes` must be at most {num_bytes}, the size of {root}, got {max_bytes}. "
                "In a container, its size is set by `--shm-size`."
            )
        prefix = f"nanovllm-kv-{os.geteuid()}-"
        folder = root / f"{prefix}{name}"
        for other in root.glob(f"{prefix}*"):
            if other != folder:
                remove_if_unused(other)
        users = open_users(folder)
        self._slots: dict[tuple[int, int], Slots] = {}  # (bytes of a name, bytes of a block) -> the file
        self._last_use_ns = 0
        self._use(folder, users)
        super().__init__(folder, max_bytes)

    def _use(self, folder: Path, users: int) -> None:
        """Give up the folder when this object ends. `users`: the open file of users"""
        self._users = users
        # called by garbage collection and at exit, too
        self._release = weakref.finalize(self, release, folder, users, os.getpid())

    def match(self, blocks: Sequence[BlockName]) -> int:
        found = self._find(blocks)
        if len(found) < len(blocks) and self._open_new():
            found = self._find(blocks)
        for slots, slot in reversed(found):  # the ends of prefixes are evicted first
            slots.touch(slot, self._now_ns())
        self._count(hits=len(found), misses=len(blocks) - len(found))
        return len(found)

    def load(self, block: BlockName, out: np.ndarray) -> bool:
        begin = time.perf_counter()
        slots = self._slots_for(block, out)
        if slots is None or not slots.load(block, out):
            return False
        self._count(loaded_bytes=out.nbytes, load_time_s=time.perf_counter() - begin)
        return True

    def save(self, block: BlockName, data: np.ndarray) -> None:
        begin = time.perf_counter()
        try:
            self._open_again_if_deleted()
            slots = self._slots_for(block, data)
            if slots is not None and slots.find(block):
                return
            with self._files.locked():
                slots = slots or self._slots_for(block, data) or self._make(block, data)
                if slots is None or slots.find(block):  # it is too large, or another process has saved it
                    return
                num_evicted = slots.save(block, data, self._now_ns())
        except (OSError, ValueError) as error:
            self._warn(error)
            return
        self._count(saved_bytes=data.nbytes, save_time_s=time.perf_counter() - begin, evictions=num_evicted)

    def failed(self, block: BlockName) -> None:
        try:
            self._open_new()
            with self._files.locked():
                for slots in self._slots.values():
                    slots.remove(block)
        except FileNotFoundError:  # the folder has been deleted
            pass
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        self._release()

    def _find(self, blocks: Sequence[BlockName]) -> list[tuple[Slots, int]]:
        """Return where the first of these blocks are, until one is not there."""
        found: list[tuple[Slots, int]] = []
        for block in blocks:
            places = [(slots, place[0]) for slots in self._slots.values() if (place := slots.find(block))]
            if not places:
                break
            found.append(places[0])
        return found

    def _slots_for(self, block: BlockName, data: np.ndarray) -> Slots | None:
        sizes = len(block.key) + len(block.tokens), data.nbytes
        if sizes not in self._slots:
            self._open_new()
        return self._slots.get(sizes)

    def _open_again_if_deleted(self) -> None:
        """Make the folder again if it has been deleted, or use the one that another engine has made since."""
        with self._stats_lock:
            if not self._release.alive:  # closed
                return
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.folder / USERS).st_ino == os.fstat(self._users).st_ino:
                    return
            users = open_users(self.folder)
            logger.warning("K/V store: %s has been deleted, and is made again", self.folder)
            self._release.detach()
            os.close(self._users)
            self._use(self.folder, users)
            self._slots = {}  # another thread may still copy from the old ones

    def _open_new(self) -> bool:
        """Open the files that other processes have made. Returns whether there were any."""
        new = {}
        with contextlib.suppress(FileNotFoundError):  # a user's `rm -r`
            for name in os.listdir(self.folder):
                if name.endswith(SUFFIX) and sizes_of(name)[1:] not in self._slots:
                    new[sizes_of(name)[1:]] = Slots(self.folder / name)
        self._slots = self._slots | new  # a new dict: another thread may read the old one
        return bool(new)

    def _make(self, block: BlockName, data: np.ndarray) -> Slots | None:
        path = make_slots(self.folder, len(block.key) + len(block.tokens), data.nbytes, self.max_bytes)
        return None if path is None else self._slots_for(block, data)

    def _now_ns(self) -> int:
        """Return the time; each call returns a later one."""
        self._last_use_ns = max(self._last_use_ns + 1, time.time_ns())
        return self._last_use_ns


def open_users(folder: Path) -> int:
    """Create the folder if it is not there, and hold a shared lock on its file of users. Returns the open file."""
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not is_own_folder(folder):
            raise ValueError(f"{folder} must be a folder of this user with mode 0700. Remove it, or change `name`.")
        with contextlib.suppress(FileNotFoundError):  # removed by its last user: try again
            users = os.open(folder / USERS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                lock_file(users, fcntl.LOCK_SH)
                if os.fstat(users).st_ino == os.stat(folder / USERS).st_ino:
                    return users
            except BaseException:
                os.close(users)
                raise
            os.close(users)


def is_own_folder(path: Path) -> bool:
    """Return whether this is a private folder, and not a link: /dev/shm is writable by all users."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return True  # removed by the last user meanwhile
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def release(folder: Path, users: int, pid: int) -> None:
    """Give up the lock on the file of users, and remove the folder if no other process has one."""
    if os.getpid() != pid:  # a forked process: its parent still uses the folder
        return
    try:
        remove_unless_locked(folder, users)
    finally:
        os.close(users)


def remove_if_unused(folder: Path) -> None:
    """Remove the folder of another name whose processes have all ended without closing it."""
    if not is_own_folder(folder):
        return
    with contextlib.suppress(OSError):
        users = os.open(folder / USERS, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            remove_unless_locked(folder, users)
        finally:
            os.close(users)


def remove_unless_locked(folder: Path, users: int) -> None:
    """Remove the folder if no other process has a lock on `users`, its open file of users."""
    with contextlib.suppress(OSError):
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in folder.iterdir():
            if path.is_dir():  # of conversations
                shutil.rmtree(path)
            elif path.name != USERS:
                path.unlink()
        (folder / USERS).unlink()  # the last: until then, a process that starts waits for the lock
        folder.rmdir()
