"""Blocks in a folder on disk: one file per block, bounded in bytes, for several processes, kept across restarts.

The file system is the index: a block's file name is its key, its modification time says when it was last found, and a
rename makes it visible as a whole. An embedded key-value store such as LMDB would need a fixed size, one writer at a
time, and overflow pages for values of a megabyte; it would give back only what `open` gives here.

    folder/
      3f9a….kv       magic and version, lengths, key, tokens, checksum, data
      tmpx1y2z3.tmp  a file that is being written, or that was when its process was killed
      lock           who may add and remove files; holds the sum of the sizes

SIGKILL at any moment leaves whole blocks and perhaps a temporary file. A power failure may leave a block without its
data, because nothing waits for the disk; the checksum turns it into a miss. POSIX only: it needs `flock`.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from nanovllm_extras.records.tier import BlockName, Tier, cause_of

logger = logging.getLogger(__name__)

MAGIC = b"nanovllm K/V 1\r\n"  # the last digit is the version of the format; \r\n shows a transfer as text
LENGTHS = struct.Struct("<IIQ")  # of the key, of the tokens, of the data
CHECKSUM_BYTES = 8  # XXH3 of header and data: faster than memory
LOCK_TIMEOUT_S = 1.0  # a save is dropped if another process holds the lock for longer
TEMPORARY_FILES_AGE_S = 60  # a temporary file that is older has lost its process: a block takes milliseconds
BLOCK, TEMPORARY = ".kv", ".tmp"


class DiskTier(Tier):
    """A tier in `folder`, which is created with mode 0700. All its blocks together take at most `max_bytes`.

    The block that `match` has found least recently is evicted first, whichever process has asked. A block that is being
    written comes on top of `max_bytes`. If the disk is full or read-only, saving does nothing, and one line is logged
    for each cause. A folder that is deleted is made again by the next block that is saved.
    """

    name = "disk"

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        super().__init__()
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise ValueError(f"`max_bytes` must be an integer >= 1, got {max_bytes!r}")
        self.folder = Path(folder).absolute()
        self.max_bytes = max_bytes
        make_private_folder(self.folder)
        self._files = BoundedFolder(str(self.folder), max_bytes)
        self._stats_lock = threading.Lock()
        self._logged: set[tuple[type[Exception], int | None]] = set()
        try:
            self._count(evictions=self._files.start())
        except OSError as error:  # read-only: blocks can still be loaded
            self._warn(error)

    def match(self, blocks: Sequence[BlockName]) -> int:
        num_found = 0
        for block in blocks:
            file = open_block(self.path_of(block), block)
            if file is None:
                break
            os.close(file[0])
            num_found += 1
        for block in reversed(blocks[:num_found]):  # the ends of prefixes are evicted first
            self._files.touch(self.path_of(block))
        self._count(hits=num_found, misses=len(blocks) - num_found)
        return num_found

    def load(self, block: BlockName, out: np.ndarray) -> bool:
        begin = time.perf_counter()
        path = self.path_of(block)
        file = open_block(path, block)
        if file is None:
            return False
        descriptor, num_bytes = file
        try:
            if num_bytes != out.nbytes:
                return False
            is_loaded = read_data(descriptor, block, out)
        finally:
            os.close(descriptor)
        if is_loaded:
            self._count(loaded_bytes=num_bytes, load_time_s=time.perf_counter() - begin)
        else:
            self._count(failures=1)
            self.failed(block)
        return is_loaded

    def save(self, block: BlockName, data: np.ndarray) -> None:
        begin = time.perf_counter()
        path = self.path_of(block)
        try:
            file = open_block(path, block)
            if file is not None:
                os.close(file[0])
                if file[1] == data.nbytes:
                    return
            header = header_of(block, data.nbytes)
            if len(header) + CHECKSUM_BYTES + data.nbytes > self.max_bytes:
                return
            num_evicted = self._add(path, [header, checksum_of(header, data), data.data])
        except (OSError, ValueError) as error:
            self._warn(error)
            return
        self._count(saved_bytes=data.nbytes, save_time_s=time.perf_counter() - begin, evictions=num_evicted)

    def failed(self, block: BlockName) -> None:
        try:
            self._files.remove(self.path_of(block))
        except FileNotFoundError:  # the folder has been deleted
            pass
        except OSError as error:
            self._warn(error)

    def path_of(self, block: BlockName) -> str:
        """Return the file of a block. Its name is hexadecimal digits only, so it cannot leave the folder."""
        return f"{self._files.folder}/{block.key.hex()}{BLOCK}"

    def _add(self, path: str, parts: Sequence[bytes | memoryview]) -> int:
        """Do what `BoundedFolder.add` does, also if the folder has been deleted. ValueError if others own it now."""
        try:
            return self._files.add(path, parts)
        except FileNotFoundError:
            make_private_folder(self.folder)
            logger.warning("K/V store: %s has been deleted, and is made again", self.folder)
            return self._files.add(path, parts)

    def _count(self, **numbers: float) -> None:
        with self._stats_lock:
            for name, number in numbers.items():
                setattr(self.stats, name, getattr(self.stats, name) + number)

    def _warn(self, error: OSError | ValueError) -> None:
        """Count an error, and log the first one of each cause."""
        self._count(failures=1)
        with self._stats_lock:
            is_known = cause_of(error) in self._logged
            self._logged.add(cause_of(error))
        if not is_known:
            logger.warning(
                "K/V store: %s cannot be changed, and further errors of this kind are only counted: %s",
                *(self.folder, error),
            )


class BoundedFolder:
    """The block files of a folder, of at most `max_bytes` together, whichever processes add them.

    The lock file holds a sum of the sizes that is never below the true one: it grows before a file appears, and
    shrinks after a file is gone. After SIGKILL it may be too large, and the next listing corrects it.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._last_use_ns = 0
        self._oldest: list[tuple[int, int, str]] = []  # (last use, size, path) when last listed; the oldest is last

    def start(self) -> int:
        """Remove old temporary files, and blocks beyond the bound. Returns the number of such blocks."""
        with self.locked() as lock:
            write_sum(lock, self._list())
            return self._make_room(lock, 0)

    def add(self, path: str, parts: Sequence[bytes | memoryview]) -> int:
        """Write a file to a temporary name and rename it. Returns the number of blocks that were evicted for it."""
        descriptor, temporary = tempfile.mkstemp(suffix=TEMPORARY, dir=self.folder)  # with mode 0600
        try:
            with open(descriptor, "wb") as file:
                for part in parts:
                    file.write(part)
            self.touch(temporary)
            size = os.stat(temporary).st_size
            with self.locked() as lock:
                num_evicted = self._make_room(lock, size)
                replaced_size = size_of(path)
                write_sum(lock, read_sum(lock) + size)
                os.replace(temporary, path)
                write_sum(lock, read_sum(lock) - replaced_size)
            return num_evicted
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        with self.locked() as lock, contextlib.suppress(FileNotFoundError):
            size = size_of(path)
            os.unlink(path)
            write_sum(lock, read_sum(lock) - size)

    def touch(self, path: str) -> None:
        """Make a file the most recently used one, for this and all other processes."""
        self._last_use_ns = max(self._last_use_ns + 1, time.time_ns())
        with contextlib.suppress(OSError):  # read-only, or evicted by another process
            os.utime(path, ns=(self._last_use_ns, self._last_use_ns), follow_symlinks=False)

    def _make_room(self, lock: int, size: int) -> int:
        """Remove the least recently used files until `size` bytes fit. Returns how many were removed."""
        assert size <= self._max_bytes
        num_removed = 0
        while read_sum(lock) + size > self._max_bytes:
            if not self._oldest:
                write_sum(lock, self._list())  # 0 if no file is left
                continue
            last_use_ns, file_size, path = self._oldest.pop()
            # files that were added or used since the listing are more recent than all that are left in it
            if last_use(path) == last_use_ns:
                os.unlink(path)
                write_sum(lock, read_sum(lock) - file_size)
                num_removed += 1
        return num_removed

    def _list(self) -> int:
        """Sort the blocks by last use, remove old temporary files, and return the sum of the blocks' sizes."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(BLOCK):
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
                    elif entry.name.endswith(TEMPORARY) and status.st_mtime < time.time() - TEMPORARY_FILES_AGE_S:
                        os.unlink(entry.path)
        self._oldest = sorted(found, reverse=True)
        return sum(size for _, size, _ in found)

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Keep all other threads and processes from adding and removing files. Yields the open lock file."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(f"{self.folder}/lock", flags, 0o600)
        try:
            lock_file(descriptor, fcntl.LOCK_EX)
            try:
                if os.fstat(descriptor).st_size != 8:  # new, or not ours
                    write_sum(descriptor, self._list())
                yield descriptor
            finally:  # to close it is not enough: a process forked meanwhile has the open file too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)


# ---- one file


def header_of(block: BlockName, num_bytes: int) -> bytes:
    """Return what a block's file begins with: everything but checksum and data."""
    return MAGIC + LENGTHS.pack(len(block.key), len(block.tokens), num_bytes) + block.key + block.tokens


def checksum_of(header: bytes, data: np.ndarray) -> bytes:
    checksum = xxhash.xxh3_64(header)
    checksum.update(data.data)
    return checksum.digest()


def open_block(path: str, block: BlockName) -> tuple[int, int] | None:
    """Open a block's file, at its checksum. Returns the descriptor and the number of bytes of data.

    None if the file does not exist, or is of another version, key or length, or of other tokens.
    """
    try:
        # a name that is a FIFO must not block, and a link must not lead out of the folder
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        num_bytes = status.st_size - len(header_of(block, 0)) - CHECKSUM_BYTES
        if stat.S_ISREG(status.st_mode) and num_bytes >= 0:
            header = header_of(block, num_bytes)
            if os.read(descriptor, len(header)) == header:
                return descriptor, num_bytes
    except OSError:  # the disk is damaged
        pass
    os.close(descriptor)
    return None


def read_data(descriptor: int, block: BlockName, out: np.ndarray) -> bool:
    """Fill `out` from a file that `open_block` has opened. False if the checksum is wrong."""
    checksum = bytearray(CHECKSUM_BYTES)
    try:
        num_read = os.readv(descriptor, [checksum, out.data])
    except OSError:
        return False
    is_whole = num_read == CHECKSUM_BYTES + out.nbytes
    return is_whole and checksum_of(header_of(block, out.nbytes), out) == checksum


def size_of(path: str) -> int:
    """Return the size of a file, 0 if it is not there or is not a file."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def last_use(path: str) -> int | None:
    try:
        return os.lstat(path).st_mtime_ns
    except FileNotFoundError:
        return None


# ---- folders and locks


def check_name(field: str, name: str) -> str:
    """Return a name from a user if it can be a file name. Raises ValueError if it could leave the folder."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(
            f"`{field}` must be 1 to 100 letters, digits, '.', '_' or '-', and must not begin with '.', got {name!r}"
        )
    return name


def make_private_folder(folder: Path) -> None:
    """Create a folder with mode 0700. Raises ValueError if it is there and others may read or write it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ValueError(f"`folder` cannot be created: {error}. Choose a folder that you may write to.") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(
            f"`folder` must belong to this user and have mode 0700, because K and V reveal the prompts: {folder} "
            f"belongs to user {status.st_uid} and has mode {mode:04o}. Choose another, or run `chmod 700` on it."
        )


def lock_file(descriptor: int, operation: int) -> None:
    """Call `flock`, but raise TimeoutError after LOCK_TIMEOUT_S: the owner may have been stopped."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock") from None
            time.sleep(0.001)


def read_sum(lock: int) -> int:
    return int.from_bytes(os.pread(lock, 8, 0), "little")


def write_sum(lock: int, num_bytes: int) -> None:
    os.pwrite(lock, max(0, num_bytes).to_bytes(8, "little"), 0)
