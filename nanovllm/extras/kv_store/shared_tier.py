"""Blocks in shared memory, for all engines of one user on one machine: a `DiskTier` on a file system in memory.

Each block is a file in /dev/shm, so eviction, blocks of several sizes, and a rename that shows a block as a whole are
those of the tier on disk. Compared with a tier on disk whose files are in the page cache, it never writes to a disk and
is never dropped from memory, but it is not faster: `python -m benchmarks.kv_tiers` measures both.

One region of memory that every process keeps mapped would load about four times as fast, because the pages of a file
are looked up at each read. It would need an allocator and locks that survive SIGKILL. And if /dev/shm is full, `write`
only fails, while a store to mapped memory kills the process (SIGBUS). `multiprocessing.shared_memory` is such a region;
before Python 3.13, the first process that ends also removes it.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import weakref
from pathlib import Path

from nanovllm.extras.kv_store.disk_tier import DiskTier, check_name, lock_file

SHARED_MEMORY = Path("/dev/shm")
USERS = "users"  # locked by each process that uses the folder, so that the last one knows to remove it


class SharedTier(DiskTier):
    """A tier in shared memory, of at most `max_bytes`. Engines of one user that give the same `name` share it.

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
        # called by garbage collection and at exit, too
        self._release = weakref.finalize(self, release, folder, users, os.getpid())
        super().__init__(folder, max_bytes)

    def close(self) -> None:
        self._release()


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
