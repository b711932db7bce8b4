"""How the ranks of one engine speak: three collectives behind one seam, and Gloo as their definition.

A collective is a call that every rank makes, in the same order, with tensors of the same shape and dtype. Each
communicator is an object: nothing here is global, so two engines live in one process.
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
from torch.distributed import ProcessGroupGloo, Store, Work

# The longest that a rank may keep the others waiting. Gloo needs some limit; a peer that dies is noticed at once.
PATIENCE = timedelta(hours=24)
POLL = timedelta(seconds=0.2)  # how often a call that waits looks whether it was aborted
END_S = 2.0  # at the end of the interpreter, for a call whose peers have just ended


class CommunicationError(RuntimeError):
    """A peer is gone, or `abort` or `close` was called. The communicator is of no further use."""


class Communicator(ABC):
    """Rank `rank` of `size`. One thread makes the calls; any thread may call `abort`.

    A call blocks until it is done (on CUDA: until it is launched on the current stream). It raises CommunicationError
    when a peer is gone.
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x: contiguous, any shape -> x, changed in place to the sum over all ranks"""

    @abstractmethod
    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """x: contiguous, any shape and dtype -> x, changed in place to the contents on rank 0"""

    @abstractmethod
    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x: contiguous, [n, m] -> on rank 0: [n, size * m], columns in the order of ranks; elsewhere: x, unchanged"""

    @abstractmethod
    def abort(self) -> None:
        """From any thread: a call that waits in this process raises CommunicationError within a second."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the communicator holds. Later calls raise CommunicationError, except for this one."""


def sum_parts(parts: torch.Tensor) -> torch.Tensor:
    """parts: [size, ...] -> their sum: [...]. In the order of ranks; that of 16-bit floats in float32, rounded once.

    The same bits come out wherever an element lies in its tensor: a token's bits do not depend on its batch.
    """
    is_short = parts.is_floating_point() and parts.itemsize < 4
    total = parts[0].float() if is_short else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def join_columns(parts: torch.Tensor) -> torch.Tensor:
    """parts: [size, n, m] -> [n, size * m]"""
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
    """The definition: TCP between any machines, tensors on CPU.

    Every rank gets the parts of all and sums them itself: for two ranks these are as many bytes as in Gloo's own
    all-reduce, in one exchange and not two, and Gloo would add in an order that depends on the place in the tensor.
    """

    def __init__(self, store: Store, rank: int, size: int, host: str = "127.0.0.1") -> None:
        """Returns when all ranks have come. `host`: the address that this rank listens on, which its peers can reach.
        The store must hold nothing of another group: a PrefixStore gives it names of its own."""
        check_rank(rank, size)
        self.rank, self.size = rank, size
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = PATIENCE
        options._threads = 1  # one call at a time
        self._is_aborted = threading.Event()
        self._works: list[Work] = []  # the call that is waited for
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
        """x -> x of all ranks: [size, *x.shape]"""
        parts = x.new_empty(self.size, *x.shape)
        self._wait(self._open()._allgather_base(parts.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)))
        return parts

    def _open(self) -> Any:
        if self._is_aborted.is_set():
            self.close()
            raise CommunicationError("the communicator was aborted or closed")
        return self._group[0]

    def _wait(self, work: Work) -> None:
        """Also hears signals, as of ^C: Python handles them between two polls."""
        self._works[:] = [work]
        while True:
            is_over = work.is_completed()  # asked before: a call that ends just after its time is up has not failed
            try:
                work.wait(POLL)
                self._works.clear()
                return
            except RuntimeError as error:
                if is_over:
                    self.close()  # so that peers that wait for this rank and not for the dead one hear of it too
                    raise CommunicationError(f"rank {self.rank} of {self.size} lost a peer") from error
            self._open()


def free_group(group: list[Any], works: list[Work], pid: int) -> None:
    """End a group's threads: when its communicator is closed or garbage, at the latest when the interpreter ends.

    They must end before the interpreter does. A thread that drops the last reference to a tensor takes Python's lock.
    An interpreter that ends gives the lock to no thread: it ends the thread by force. That happens inside a
    destructor, and so aborts the process.
    pid: the process that made the group; a fork has none of its threads.
    """
    is_at_end = not threading.main_thread().is_alive()
    if os.getpid() != pid:
        keep(group)
    elif is_at_end or all(work.is_completed() for work in works):
        clear_when_done(group, works, END_S if is_at_end else 0)
    else:
        threading.Thread(target=clear_when_done, args=(group, works)).start()


def clear_when_done(group: list[Any], works: list[Work], patience_s: float = 0) -> None:
    """A group's destructor waits for the call that was aborted, which ends when its peers do: until then, keep it.

    When the interpreter ends, for `patience_s` more. No daemon does this: it would be ended by force.
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


def keep(group: list[Any]) -> None:
    """For ever."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
