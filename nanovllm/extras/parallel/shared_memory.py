"""Ranks on one machine speak through memory that they share: `extras/kernels/cpu/ranks.h`.

No page of it has a name: an engine makes an anonymous file, and its workers inherit it. When the last process ends,
however it ends, the memory is free.
"""

import mmap
import os
from ctypes import Structure, addressof, c_char, c_int32, c_long, c_uint32, c_void_p, sizeof
from typing import Any, ClassVar

import torch

from nanovllm.extras.kernels.cpu.library import Library
from nanovllm.extras.parallel.communicator import (
    CommunicationError,
    Communicator,
    check_rank,
    check_tensor,
    sum_parts,
)

BUFFER_BYTES = 1 << 18  # of each of a rank's two buffers: a chunk stays in the L2 cache of the rank that reads it
# Measured: with a core for each of two ranks 2 KB take 4 us instead of 20, since a sleeper takes long to wake up. For
# three ranks on two cores it costs nothing: a rank that spins yields its core to any other that can run.
SPIN_NS = 50_000


class Post(Structure):
    """`struct post` of ranks.h"""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *(("round", c_uint32), ("num_sleepers", c_uint32), ("pid", c_int32), ("is_aborted", c_uint32)),
        ("padding", c_char * 112),
    ]


class Ranks(Structure):
    """`struct ranks` of ranks.h"""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, c_void_p) for name in ("posts", "buffers")),
        *((name, c_long) for name in ("rank", "size", "buffer_bytes", "spin_ns")),
        ("round", c_uint32),
    ]


class SharedMemoryCommunicator(Communicator):
    """Tensors on CPU. Sums have the bits of `GlooCommunicator`.

    When a peer dies, or any rank aborts or closes, waiting and later calls of all ranks raise CommunicationError within
    0.1 s. A call that waits hears no signals: ^C is handled when it returns.
    """

    @staticmethod
    def allocate(size: int) -> int:
        """New memory for `size` ranks -> its file descriptor, for `subprocess.Popen(..., pass_fds=[fd])`. The caller
        closes it when all processes have it; a communicator needs it only in its constructor."""
        if size < 1:
            raise ValueError(f"size must be >= 1, got {size}")
        fd = os.memfd_create("nanovllm")
        os.ftruncate(fd, posts_bytes(size) + buffers_bytes(size))
        return fd

    def __init__(self, fd: int, rank: int, size: int, library: Library, spin_ns: int = SPIN_NS) -> None:
        """`library`: of the dtype whose tensors are summed in C; others are summed by PyTorch.
        `spin_ns`: how long a rank that waits asks again and again before it sleeps in the kernel."""
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
        """Of `struct ranks`, which lives as long as this object."""
        return addressof(self._ranks)

    def check(self, status: int) -> None:
        """`status`: what a function of C has returned, 0 or 1."""
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
        """The memory is unmapped with the last reference to this object: layers that have joined may still call."""
        self.abort()

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, m] -> [n, size * m] of all ranks"""
        y = x.new_empty(len(x), self.size * x.shape[1])
        self.check(self._library.gather(self.address, x.data_ptr(), y.data_ptr(), len(x), x[:1].nbytes))
        return y


def posts_bytes(size: int) -> int:
    """Whole pages, so that buffers begin at one."""
    return -(-size * sizeof(Post) // mmap.PAGESIZE) * mmap.PAGESIZE


def buffers_bytes(size: int) -> int:
    return size * 2 * BUFFER_BYTES
