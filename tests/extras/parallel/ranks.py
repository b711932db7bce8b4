"""Ranks for tests: threads of this process with a communicator each, or children of it that can be killed."""

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed import HashStore

from nanovllm_extras.kernels.cpu.library import load_library
from nanovllm_extras.parallel.communicator import GlooCommunicator
from nanovllm_extras.parallel.shared_memory import SharedMemoryCommunicator
from tests.extras.kernels.processors import need_a_compiler

KINDS = ["gloo", "shared memory", "shared memory, asleep"]  # `asleep`: a rank that waits does not spin first


class Ranks:
    """Of one group; `join(rank)` makes the communicator of one of them, in any process that inherits this object."""

    def __init__(self, kind, size, folder=None, dtype=torch.float32):
        self.kind, self.size, self.dtype = kind, size, dtype
        if kind == "gloo":
            self.store = HashStore() if folder is None else torch.distributed.FileStore(str(folder / "store"), size)
        else:
            need_a_compiler(dtype)
            self.fd = SharedMemoryCommunicator.allocate(size)

    def join(self, rank):
        if self.kind == "gloo":
            return GlooCommunicator(self.store, rank, self.size)
        options = {"spin_ns": 0} if "asleep" in self.kind else {}
        return SharedMemoryCommunicator(self.fd, rank, self.size, load_library(self.dtype), **options)

    def free(self):
        if self.kind != "gloo":
            os.close(self.fd)


@contextlib.contextmanager
def threads_of(kind, size, dtype=torch.float32):
    """-> the communicators of all ranks, and `run(function)`: calls function(communicator) for each, in a thread of its
    own, and returns what each returned"""
    ranks = Ranks(kind, size, dtype=dtype)
    with ThreadPoolExecutor(size) as pool:
        together = list(pool.map(ranks.join, range(size)))
        ranks.free()
        try:
            yield together, lambda function: list(pool.map(function, together))
        finally:
            for communicator in together:
                communicator.abort()
            for communicator in together:
                communicator.close()


@contextlib.contextmanager
def child_of(ranks, rank, function):
    """A child process that calls function(communicator) as `rank`. -> its process id. It is killed in the end."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            function(ranks.join(rank))
        os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def after(seconds, function):
    """Calls it in a thread."""
    timer = threading.Timer(seconds, function)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
