"""OpenMP's threads, for PyTorch's own operations: how long a waiting thread spins, and processes without threads.

This module is imported before torch, if possible, because libgomp reads the setting once, when torch loads it. A thread
that waits for others then sleeps after about 0.3 ms instead of the 4 ms that 300,000 turns take: next to another busy
process, it would spin while the others need its core. The CPU kernels have threads of their own (`team.h`).
"""

import functools
import os
import sys

if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "20000"
    import torch  # noqa: F401

    del os.environ["GOMP_SPINCOUNT"]  # programs that this process starts decide for themselves


first_process = functools.cache(os.getpid)  # the process that called it first: forked processes inherit the result


def check_process() -> None:
    """Raise EngineDeadError if this process was forked after an engine was made.

    A forked process has none of its parent's threads, but OpenMP waits for them, so a step would never end.
    """
    if first_process() != os.getpid():
        from nanovllm_extras.dead import forked

        raise forked(first_process())
