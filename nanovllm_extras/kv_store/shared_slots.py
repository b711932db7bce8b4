"""`Slots`: blocks of one size in one file that every process keeps mapped. `shared_tier.py` puts it in shared memory.

    generations  [num_slots] uint64         even: the slot has a block; odd, or 0: it is free, or a process writes to it
    last_uses    [num_slots] int64          nanoseconds; the smallest is evicted first
    heads        [num_slots] uint64         from the first 8 bytes of the keys, to be searched
    checksums    [num_slots] uint64         XXH3 of the data
    names        [num_slots, name_bytes]    keys and tokens
    data         [num_slots, block_bytes]   from the next page on

A block is loaded without a lock: its slot's generation is read, the data is copied, and the generation must still be
the same. A process that replaces a block first makes the generation odd, and makes it even again when the block is
whole. So a process that is killed leaves a slot that counts as free, and a reader whose block is replaced meanwhile
finds another generation. This needs a processor that shows its stores in order, as x86-64 does. On other processors,
the checksum is compared, too.

The index is written when the file is made, and data is written by `pwrite`: if memory is used up, these calls
fail, while a store to a new page of mapped memory would kill the process (SIGBUS). Data is read only where it was
written.
"""

import errno
import mmap
import os
import platform
import tempfile
import weakref
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from nanovllm_extras.records.tier import BlockName

Generation = TypeVar("Generation", int, np.ndarray)

SUFFIX = ".slots"
COLUMNS = (np.uint64, np.int64, np.uint64, np.uint64)  # generations, last_uses, heads, checksums
HAS_ORDERED_STORES = platform.machine().lower() in ("x86_64", "amd64")


class Slots:
    """An open file. Its name has the sizes. `save` and `remove` need a lock that only one process can hold."""

    def __init__(self, path: Path, has_ordered_stores: bool = HAS_ORDERED_STORES) -> None:
        num_slots, name_bytes, block_bytes = sizes_of(path.name)
        self._compares_checksums = not has_ordered_stores
        self._start = start_of_data(num_slots, name_bytes)
        self._file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        pages = mmap.mmap(self._file, self._start + num_slots * block_bytes)
        columns = [
            np.frombuffer(pages, dtype, num_slots, offset=8 * num_slots * i)  # each number has 8 bytes
            for i, dtype in enumerate(COLUMNS)
        ]
        self._generations, self._last_uses, self._heads, self._checksums = columns
        names = np.frombuffer(pages, np.uint8, num_slots * name_bytes, offset=8 * num_slots * len(COLUMNS))
        self._names = names.reshape(num_slots, name_bytes)
        self._data = np.frombuffer(pages, np.uint8, offset=self._start).reshape(num_slots, block_bytes)

    def find(self, block: BlockName) -> tuple[int, int] | None:
        """Return the slot that has a block, and its generation."""
        name = block.key + block.tokens
        for slot in np.flatnonzero(self._heads == head_of(block)).tolist():
            generation = int(self._generations[slot])
            if is_whole(generation) and self._names[slot].tobytes() == name:
                return slot, generation
        return None

    def touch(self, slot: int, last_use_ns: int) -> None:
        self._last_uses[slot] = last_use_ns

    def load(self, block: BlockName, out: np.ndarray) -> bool:
        """Fill `out`: [block_bytes] uint8. False if the block is not there, or is replaced meanwhile."""
        found = self.find(block)
        if found is None:
            return False
        slot, generation = found
        np.copyto(out, self._data[slot])
        if self._compares_checksums and checksum_of(out) != self._checksums[slot]:
            return False
        return int(self._generations[slot]) == generation

    def save(self, block: BlockName, data: np.ndarray, last_use_ns: int) -> int:
        """Write a block to a free slot, or over the least recently used block. Returns the number of evicted blocks.

        Raises OSError if memory is used up.
        """
        slot = int(np.argmin(np.where(is_whole(self._generations), self._last_uses, -1)))
        generation = int(self._generations[slot])
        self._generations[slot] = generation | 1
        if os.pwrite(self._file, data.data, self._start + slot * data.nbytes) < data.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._heads[slot], self._last_uses[slot], self._checksums[slot] = head_of(block), last_use_ns, checksum_of(data)
        self._names[slot] = np.frombuffer(block.key + block.tokens, np.uint8)
        self._generations[slot] = (generation | 1) + 1
        return int(is_whole(generation))

    def remove(self, block: BlockName) -> None:
        """Make the slot of a block free, if there is one."""
        found = self.find(block)
        if found is not None:
            self._generations[found[0]] = found[1] | 1


def make_slots(folder: Path, name_bytes: int, block_bytes: int, max_bytes: int) -> Path | None:
    """Make a file for blocks of `max_bytes` together, which appears as a whole. None if not even one block fits.

    Its index comes on top of `max_bytes`. Raises OSError if memory is used up.
    """
    num_slots = max_bytes // block_bytes
    if not num_slots:
        return None
    start = start_of_data(num_slots, name_bytes)
    descriptor, temporary = tempfile.mkstemp(suffix=".tmp", dir=folder)  # with mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(bytes(start))
            file.truncate(start + num_slots * block_bytes)
        path = folder / f"{num_slots}-{name_bytes}-{block_bytes}{SUFFIX}"
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def sizes_of(name: str) -> tuple[int, int, int]:
    """Return num_slots, name_bytes and block_bytes from the name of a file."""
    num_slots, name_bytes, block_bytes = map(int, name.removesuffix(SUFFIX).split("-"))
    return num_slots, name_bytes, block_bytes


def start_of_data(num_slots: int, name_bytes: int) -> int:
    index_bytes = num_slots * (8 * len(COLUMNS) + name_bytes)
    return -(-index_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def is_whole(generation: Generation) -> Generation:
    """Return whether a slot with this generation has a block; an array for an array."""
    return (generation > 0) & (generation % 2 == 0)


def head_of(block: BlockName) -> int:
    """Return a number from the key, which is not 0: that is the head of a slot that has never been used."""
    return int.from_bytes(block.key[:8], "little") | 1


def checksum_of(data: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(data.data)
