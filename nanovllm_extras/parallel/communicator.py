"""The collectives by which the ranks of one engine exchange tensors: an interface, and its definition with Gloo.

A collective is a call that every rank makes, in the same order, with tensors of the same shape and dtype. Each
communicator is an object without global state, so two engines can run in one process.
"""

import ctypes
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store, Work

# The longest time for which a rank may keep the others waiting. Gloo requires a limit; a dead peer is noticed earlier.
PATIENCE = timedelta(hours=24)
POLL = timedelta(seconds=0.2)  # how often a waiting call checks whether it was aborted
END_S = 2.0  # at interpreter exit, time for a call whose peers have just ended


class CommunicationError(RuntimeError):
    """Raised if a peer has ended, or `abort` or `close` was called. The communicator cannot be used any more."""


class Communicator(ABC):
    """The interface through which rank `rank` of `size` calls collectives.

    One thread makes the calls; any thread may call `abort`. A call blocks until it is done (on CUDA: until it is
    launched on the current stream). It raises CommunicationError if a peer has ended.
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x (contiguous, any shape) by its sum over all ranks, in place, and return it."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x (contiguous, any shape and dtype) by its contents on rank 0, in place, and return it."""

    @abstractmethod
    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Collect the columns of all ranks on rank 0. x: [n, m], contiguous

        Rank 0 gets [n, size * m], with columns in the order of ranks; other ranks get x, unchanged.
        """

    @abstractmethod
    def abort(self) -> None:
        """Make a waiting call in this process raise CommunicationError within a second. Any thread may call this."""

    @abstractmethod
    def close(self) -> None:
        """Free the communicator's resources. Later calls of other methods raise CommunicationError."""


def sum_parts(parts: torch.Tensor) -> torch.Tensor:
    """Add parts: [size, ...] in the order of ranks -> [...]. 16-bit floats are added in float32 and rounded once.

    The result's bits do not depend on the position of an element in its tensor, so a token's bits do not depend on its
    batch.
    """
    is_short = parts.is_floating_point() and parts.itemsize < 4
    total = parts[0].float() if is_short else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def join_columns(parts: torch.Tensor) -> torch.Tensor:
    """Concatenate the parts' columns: [size, n, m] -> [n, size * m]"""
    return parts.transpose(0, 1).flatten(1)


def check_tensor(x: torch.Tensor, device: str) -> None:
    if x.device.type != device:
        raise ValueError(f"x must be on {device}, got a tensor on {x.device}")
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got shape {tuple(x.shape)} with strides {x.stride()}")


def check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in 0 … size - 1 = {size - 1}, got {rank}")


class GlooCommunicator(Communicator):
    """The reference implementation: TCP between any machines, for tensors on CPU.

    For a sum, every rank gets the parts of all ranks and adds them itself. With two ranks this takes as many bytes as
    Gloo's own all-reduce, in one exchange instead of two. Gloo would also add in an order that depends on an element's
    position in the tensor.
    """

    def __init__(self, store: Store, rank: int, size: int, host: str = "127.0.0.1") -> None:
        """Wait until all ranks have joined.

        host: the address on which this rank listens and which its peers can reach.
        store: must not contain keys of another group; a PrefixStore makes a group's keys unique.
        """
        check_rank(rank, size)
        self.rank, self.size = rank, size
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = PATIENCE
        options._threads = 1  # one call at a time
        self._is_aborted = threading.Event()
        self._works: list[Work] = []  # the current call
        try:
            group: Any = ProcessGroupGloo(store, rank, size, options)  # its stubs lack its base class
        except RuntimeError as error:
            raise CommunicationError(f"rank {rank} of {size} cannot reach its peers: {error}") from error
        self._group = [group]  # no other reference to it, so that `free_group` can end it
        self._free = weakref.finalize(self, free_group, self._group, self._works, os.getpid())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        check_tensor(x, "cpu")
        return x.copy_(sum_parts(self._all_gather(x)))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        check_tensor(x, "cpu")
        self._wait(self._open().broadcast(x.view(-1).view(torch.uint8), 0))
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        check_tensor(x, "cpu")
        parts = x.new_empty(self.size, *x.shape) if self.rank == 0 else x.new_empty(0)
        outputs = [part.view(-1).view(torch.uint8) for part in parts]
        self._wait(self._open().gather(outputs, x.view(-1).view(torch.uint8), 0))
        return join_columns(parts) if self.rank == 0 else x

    def abort(self) -> None:
        self._is_aborted.set()

    def close(self) -> None:
        self._is_aborted.set()
        self._free()

    def _all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather x of all ranks on every rank: [size, *x.shape]"""
        parts = x.new_empty(self.size, *x.shape)
        self._wait(self._open()._allgather_base(parts.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)))
        return parts

    def _open(self) -> ProcessGroup:
        if self._is_aborted.is_set():
            self.close()
            raise CommunicationError("the communicator was aborted or closed")
        return self._group[0]

    def _wait(self, work: Work) -> None:
        """Wait for a call in short polls, so that Python can handle signals such as ^C between them."""
        self._works[:] = [work]
        while True:
            is_over = work.is_completed()  # read before the wait, because a call may complete just after the time-out
            try:
                work.wait(POLL)
                self._works.clear()
                return
            except RuntimeError as error:
                if is_over:
                    self.close()  # so that peers that wait for this rank, not for the dead one, fail too
                    raise CommunicationError(f"rank {self.rank} of {self.size} lost a peer") from error
            self._open()


def free_group(group: list[ProcessGroup], works: list[Work], pid: int) -> None:
    """End a group's threads, when its communicator is closed or collected, or at the latest at interpreter exit.

    The threads must end before the interpreter does. A thread that drops the last reference to a tensor takes Python's
    lock. During interpreter exit no thread can get the lock, and Python ends the thread instead. Because this happens
    in a destructor, it aborts the process.

    pid: the process that created the group; a fork does not have its threads.
    """
    is_at_end = not threading.main_thread().is_alive()
    if os.getpid() != pid:
        keep(group)
    elif is_at_end or all(work.is_completed() for work in works):
        clear_when_done(group, works, END_S if is_at_end else 0)
    else:
        threading.Thread(target=clear_when_done, args=(group, works)).start()


def clear_when_done(group: list[ProcessGroup], works: list[Work], patience_s: float = 0) -> None:
    """Keep the group until its calls have completed, then destroy it.

    A group's destructor waits for an aborted call, which completes when its peers end. After interpreter exit begins,
    wait for at most `patience_s`. The thread that runs this is not a daemon, because Python would end a daemon.
    """
    deadline = None
    while not all(work.is_completed() for work in works):
        if not threading.main_thread().is_alive():
            deadline = deadline or time.monotonic() + patience_s
            if time.monotonic() >= deadline:
                keep(group)
                return
        time.sleep(POLL.total_seconds() / 10)
    group.clear()


def keep(group: list[ProcessGroup]) -> None:
    """Keep the group alive for the rest of the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
