"""Limit PyTorch to one thread for each CPU core. `extras/kernels/choices.py` calls `limit_threads`."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch

TOPOLOGY = Path("/sys/devices/system/cpu")  # Linux: cpu0/topology/thread_siblings_list, "0,4" for example


def limit_threads() -> None:
    """Use one thread for each core that this process may use, because hyperthreads share a core's units and caches.

    PyTorch built with MKL counts cores itself; other builds count hyperthreads. If the user has set `OMP_NUM_THREADS`,
    this function changes nothing.
    """
    if "OMP_NUM_THREADS" not in os.environ and hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(min(torch.get_num_threads(), count_cores(os.sched_getaffinity(0))))


def count_cores(cpus: Iterable[int], topology: Path = TOPOLOGY) -> int:
    """Count the cores of these logical processors, at least 1. A processor of unknown topology counts as one core."""
    cores = set()
    for cpu in cpus:
        try:
            siblings = (topology / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="utf-8").strip()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return max(1, len(cores))
