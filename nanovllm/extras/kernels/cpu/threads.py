"""How many threads compute on a CPU: one for each core. Called by `extras/kernels/choices.py`."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch

TOPOLOGY = Path("/sys/devices/system/cpu")  # Linux: cpu0/topology/thread_siblings_list, "0,4" for example


def limit_threads() -> None:
    """One thread for each core that this process may use: hyperthreads share a core's multipliers and caches.

    torch counts cores itself where it was built with MKL, and hyperthreads elsewhere. `OMP_NUM_THREADS`, if it is set,
    is the user's decision.
    """
    if "OMP_NUM_THREADS" not in os.environ and hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(min(torch.get_num_threads(), count_cores(os.sched_getaffinity(0))))


def count_cores(cpus: Iterable[int], topology: Path = TOPOLOGY) -> int:
    """The cores that these logical processors belong to; one for each where Linux does not tell. At least 1."""
    cores = set()
    for cpu in cpus:
        try:
            siblings = (topology / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="utf-8").strip()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return max(1, len(cores))
