"""Run small operations of PyTorch on one thread, so that its other threads do not disturb those of the kernels."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

Result = TypeVar("Result")


def on_one_thread(function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function whose PyTorch operations are too small for threads, and return its result.

    After an operation with threads, those of OpenMP spin on the kernels' cores: for 0.03 ms, or for 4 ms in a program
    that has imported torch before nanovllm (`nanovllm/waiting_threads.py`).
    """
    with one_thread():
        return function(*arguments)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let the calling thread run PyTorch's operations alone within the context."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # takes 0.1 us, and holds for the calling thread
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
