"""Collectives through shared memory, for ranks on one machine. The C code is in `nanovllm_extras/kernels/cpu/ranks.h`.

The memory has no name: an engine creates an anonymous file, and its workers inherit the descriptor. When the last
process ends, for whatever reason, Linux frees the memory.
"""

import fcntl
import mmap
import os
from ctypes import Structure, addressof, c_char, c_int32, c_long, c_uint32, c_void_p, sizeof
from typing import ClassVar

import torch

from nanovllm_extras.kernels.cpu.library import Library
from nanovllm_extras.parallel.communicator import (
    CommunicationError,
    Communicator,
    check_rank,
    check_tensor,
    sum_parts,
)

BUFFER_BYTES = 1 << 18  # of each of a rank's two buffers: a chunk fits in the L2 cache of the rank that reads it
# Measured with two ranks, each on its own core: an exchange of 2 KB takes 4 us instead of 20, because a sleeping thread
# wakes up slowly. With three ranks on two cores, spinning costs nothing, because a rank that spins yields its core.
SPIN_NS = 50_000


class Post(Structure):
    """The C type `struct post` of ranks.h."""

    _fields_: ClassVar = [
        *(("round", c_uint32), ("num_sleepers", c_uint32), ("pid", c_int32), ("is_aborted", c_uint32)),
        ("padding", c_char * 112),
    ]


class Ranks(Structure):
    """The C type `struct ranks` of ranks.h."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("posts", "buffers")),
        *((name, c_long) for name in ("rank", "size", "buffer_bytes", "spin_ns")),
        ("round", c_uint32),
    ]


class SharedMemoryCommunicator(Communicator):
    """A communicator for tensors on CPU. Its sums have the same bits as those of `GlooCommunicator`.

    When a peer dies, or any rank aborts or closes, current and later calls of all ranks raise CommunicationError within
    0.1 s. Python handles ^C only after a call has returned.
    """

    @staticmethod
    def allocate(size: int) -> int:
        """Allocate memory for `size` ranks; return its file descriptor for `subprocess.Popen(..., pass_fds=[fd])`.

        The caller closes the descriptor when all processes have inherited it. A communicator needs it only in its
        constructor.
        """
        if size < 1:
            raise ValueError(f"size must be >= 1, got {size}")
        fd = above_standard_streams(os.memfd_create("nanovllm"))
        os.ftruncate(fd, posts_bytes(size) + buffers_bytes(size))
        return fd

    def __init__(self, fd: int, rank: int, size: int, library: Library, spin_ns: int = SPIN_NS) -> None:
        """Map the memory of the file descriptor `fd`.

        library: sums tensors of its dtype in C; PyTorch sums tensors of other dtypes.
        spin_ns: how long a waiting rank spins before it sleeps in the kernel.
        """
        check_rank(rank, size)
        expected, found = posts_bytes(size) + buffers_bytes(size), os.fstat(fd).st_size
        if found != expected:
            raise ValueError(f"fd must be memory for size = {size} ranks, {expected} bytes, got {found} bytes")
        self.rank, self.size, self._library = rank, size, library
        memory = mmap.mmap(fd, expected)
        self._posts = (Post * size).from_buffer(memory)  # keeps `memory`
        start = addressof(self._posts)
        self._ranks = Ranks(start, start + posts_bytes(size), rank, size, BUFFER_BYTES, spin_ns, 0)
        self._posts[rank].pid = os.getpid()

    @property
    def address(self) -> int:
        """Return the address of `struct ranks`, which lives as long as this object."""
        return addressof(self._ranks)

    def check(self, status: int) -> None:
        """Raise CommunicationError if a C function returned a non-zero `status`."""
        if status:
            raise CommunicationError(f"rank {self.rank} of {self.size} lost a peer, or a rank was aborted or closed")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        check_tensor(x, "cpu")
        if x.dtype != self._library.dtype:
            return x.copy_(sum_parts(self._gather(x.view(1, -1)).view(self.size, *x.shape)))
        self.check(self._library.all_reduce(self.address, x.data_ptr(), x.numel()))
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        check_tensor(x, "cpu")
        self.check(self._library.broadcast(self.address, x.data_ptr(), x.nbytes))
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        check_tensor(x, "cpu")
        if self.rank == 0:
            return self._gather(x)
        self.check(self._library.gather(self.address, x.data_ptr(), None, len(x), x[:1].nbytes))
        return x

    def abort(self) -> None:
        self._library.abort_ranks(self.address)

    def close(self) -> None:
        """Abort all ranks. The memory stays mapped while this object exists, because layers may still call it."""
        self.abort()

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather x: [n, m] of all ranks -> [n, size * m]"""
        y = x.new_empty(len(x), self.size * x.shape[1])
        self.check(self._library.gather(self.address, x.data_ptr(), y.data_ptr(), len(x), x[:1].nbytes))
        return y


def above_standard_streams(fd: int) -> int:
    """Return a duplicate of `fd` that is at least 3, and close `fd`; return `fd` itself if it is.

    If this process has no stdin, the next file gets its number, and a new process would replace it by its own stdin.
    """
    if fd > 2:
        return fd
    duplicate = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return duplicate


def posts_bytes(size: int) -> int:
    """Return the bytes of the posts, rounded up to whole pages, so that the buffers begin at a page."""
    return -(-size * sizeof(Post) // mmap.PAGESIZE) * mmap.PAGESIZE


def buffers_bytes(size: int) -> int:
    return size * 2 * BUFFER_BYTES
