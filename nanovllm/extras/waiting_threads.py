"""OpenMP's threads, for PyTorch's own operations: how long a waiting thread spins, and work that needs no threads.

This module is imported before torch, if possible, because libgomp reads the setting once, when torch loads it. A thread
that waits for others then sleeps after about 0.3 ms instead of the 4 ms that 300,000 turns take: next to another busy
process, it would spin while the others need its core. The CPU kernels have threads of their own (`team.h`). Where torch
comes first, they would share their cores with OpenMP's: `on_one_thread` keeps those out of the kernels' steps.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "20000"
    import torch  # noqa: F401

    del os.environ["GOMP_SPINCOUNT"]  # programs that this process starts decide for themselves


def on_one_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function whose PyTorch operations are too small for threads, and return its result."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # 0.1 us; OpenMP counts them for each thread that calls it
    try:
        return function(*arguments)
    finally:
        torch.set_num_threads(num_threads)


first_process = functools.cache(os.getpid)  # the process that called it first: forked processes inherit the result


def check_process() -> None:
    """Raise EngineDeadError if this process was forked after an engine was made.

    A forked process has none of its parent's threads, but OpenMP waits for them, so a step would never end.
    """
    if first_process() != os.getpid():
        from nanovllm.extras.dead import forked

        raise forked(first_process())
