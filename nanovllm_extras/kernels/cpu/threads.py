"""How many threads a process uses, and on which processors: one for each performance core that it may use.

`execution/choices.py` calls `limit_threads`. The kernels have threads of their own (`team.h`): those of PyTorch's
operations are kept out of the kernels' steps by `on_one_thread` (`one_thread.py`).
"""

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from nanovllm_extras.kernels.cpu.toolchain import openmp_of_torch
from nanovllm_extras.machine.machine_limits import cpu_quota, read_number, read_text

DEVICES = Path("/sys/devices")  # Linux: cpu_core/cpus of hybrid processors of Intel, "0-11" for example
TOPOLOGY = DEVICES / "system/cpu"  # cpu0/topology/thread_siblings_list, "0,4" for example


def limit_threads() -> None:
    """Use one thread for each performance core that this process may use.

    Hyperthreads share a core's units and caches. Efficiency cores compute at about a third of the speed, and they share
    the memory's bandwidth and the power with the others, which a laptop needs for its other programs.

    PyTorch built with MKL counts cores itself; other builds count hyperthreads. If the user has set `OMP_NUM_THREADS`,
    this function changes nothing.
    """
    if "OMP_NUM_THREADS" not in os.environ and (allowed := allowed_threads()) is not None:
        torch.set_num_threads(min(torch.get_num_threads(), allowed))


def allowed_threads() -> int | None:
    """Return the number of performance cores that this process may use, or None if it is unknown.

    A container may have less CPU time than cores. With more threads than that, all threads wait for one that is paused.
    """
    quota = cpu_quota()
    found = [] if quota is None else [max(1, int(quota + 0.5))]
    with contextlib.suppress(AttributeError, OSError):  # not on this system, or refused by the rules of a container
        found.append(count_cores(performance_cpus(places() or os.sched_getaffinity(0))))
    return min(found) if found else None


def places() -> set[int]:
    """Return the processors to which OpenMP binds its threads (`OMP_PROC_BIND`, `OMP_PLACES`, ...), or an empty set.

    When torch loads libgomp, it binds the main thread to one processor: `os.sched_getaffinity` returns only this one.
    """
    path = openmp_of_torch()
    if platform.system() != "Linux" or path is None:
        return set()
    openmp = ctypes.CDLL(str(path))  # torch has loaded it already
    found: set[int] = set()
    for place in range(openmp.omp_get_num_places()):
        ids = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
        openmp.omp_get_place_proc_ids(place, ids)
        found.update(ids)
    return found


BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")  # variables that bind OpenMP's threads


@contextlib.contextmanager
def on_all_places() -> Iterator[None]:
    """Let the calling thread run on all of OpenMP's places during the `with` block, so that a new process can too.

    A new process inherits the processors of the thread that starts it. OpenMP may have bound this thread to one.
    """
    cpus = places()
    if not cpus:
        yield
        return
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def performance_cpus(cpus: Iterable[int], devices: Path = DEVICES) -> set[int]:
    """Return the logical processors that are on performance cores, or all if they have none or are all alike.

    Linux lists those of Intel's hybrid processors in `cpu_core/cpus`. Elsewhere, `cpu_capacity` is a processor's speed
    relative to the fastest, 1024: an efficiency core has less than half of the largest.
    """
    cpus = set(cpus)
    listed = cpus & parse_cpu_list(read_text(devices / "cpu_core/cpus"))
    if listed:
        return listed
    capacities = {cpu: read_number(devices / f"system/cpu/cpu{cpu}/cpu_capacity") or 1024 for cpu in cpus}
    return {cpu for cpu in cpus if 2 * capacities[cpu] >= max(capacities.values(), default=0)}


def parse_cpu_list(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8", as Linux writes it."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return found


def describe_cores() -> str:
    """Return the number of threads, and the cores and processors among which they were counted."""
    text = f"{allowed_threads() or os.cpu_count()}"
    try:
        cpus = places() or os.sched_getaffinity(0)
    except (AttributeError, OSError):  # as above
        return f"{text} of {os.cpu_count()}"
    fast = performance_cpus(cpus)
    slow = cpus - fast
    kinds = (
        f"{count_cores(fast)} performance cores and {count_cores(slow)} efficiency cores"
        if slow
        else (f"{count_cores(fast)} cores")
    )
    return f"{text} of {kinds} ({len(cpus)} of {os.cpu_count()} processors may be used)"


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
