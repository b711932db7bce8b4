"""Measure all-reduce between ranks (processes of one thread each), through Gloo and through shared memory.

    python -m benchmarks.all_reduce
    python -m benchmarks.all_reduce --ranks 2 --kilobytes 64 --dtype float32

Prints medians in microseconds on rank 0, measured in turns. `memcpy` copies a tensor of the same size once, on all
ranks at the same time. An all-reduce in shared memory copies its tensor once, then reads the tensors of all ranks and
writes their sum.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeAlias

import torch
from torch.distributed import FileStore

from benchmarks.common import describe_machine
from nanovllm.config import DTYPES
from nanovllm_extras.kernels.cpu.library import load_library
from nanovllm_extras.parallel.communicator import GlooCommunicator
from nanovllm_extras.parallel.shared_memory import SPIN_NS, SharedMemoryCommunicator

ROOT = Path(__file__).resolve().parents[1]
Operation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
COLUMNS = ("ranks", "KB", "Gloo", "shared", "memcpy")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure all-reduces of tensors on CPU.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[2, 16, 64, 256, 1024, 4096])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each; one turn is up to 50 calls")
    parser.add_argument("--spin-us", type=float, default=SPIN_NS / 1000)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)  # RANK SIZE FD FOLDER
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.rank:
        run_rank(args, int(args.rank[0]), int(args.rank[1]), int(args.rank[2]), Path(args.rank[3]))
        return
    load_library(DTYPES[args.dtype])  # compiled once
    print(describe_machine("cpu"))
    print(f"{os.cpu_count()} processors; {args.dtype}; a rank that waits spins for {args.spin_us:g} us")
    print(" ".join(f"{name:>8}" for name in COLUMNS), " microseconds")
    for size in args.ranks:
        for row in run_ranks(size):
            print(" ".join(f"{row[name]:>8.3g}" if row[name] < 100 else f"{row[name]:>8.0f}" for name in COLUMNS))


def run_ranks(size: int) -> list[dict[str, float]]:
    """One row for each number of kilobytes, as rank 0 has measured it."""
    fd = SharedMemoryCommunicator.allocate(size)
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            command = [sys.executable, "-m", "benchmarks.all_reduce", *sys.argv[1:]]
            command += ["--rank", str(rank), str(size), str(fd), folder]
            output = subprocess.PIPE if rank == 0 else None
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, stdout=output, pass_fds=[fd], cwd=ROOT, env=environment))
        os.close(fd)
        result = processes[0].communicate()[0]
        codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    return json.loads(result)


def run_rank(args: argparse.Namespace, rank: int, size: int, fd: int, folder: Path) -> None:
    dtype = DTYPES[args.dtype]
    library, spin_ns = load_library(dtype), int(args.spin_us * 1000)
    gloo = GlooCommunicator(FileStore(str(folder / "store"), size), rank, size)
    shared = SharedMemoryCommunicator(fd, rank, size, library, spin_ns)
    rows = []
    for kilobytes in args.kilobytes:
        x = torch.zeros(kilobytes * 1024 // dtype.itemsize, dtype=dtype)
        y = torch.empty_like(x)
        contenders: dict[str, Operation] = {"Gloo": gloo.all_reduce, "shared": shared.all_reduce, "memcpy": y.copy_}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(args.rounds):
            for name, function in contenders.items():
                times[name] += time_calls(function, x, min(50, max(5, 4096 // kilobytes)))
        rows.append({"ranks": size, "KB": kilobytes, **{name: median(values) for name, values in times.items()}})
    if rank == 0:
        print(json.dumps(rows))
    gloo.all_reduce(y)  # nobody closes while others measure
    gloo.close()
    shared.close()


def time_calls(function: Operation, x: torch.Tensor, count: int) -> list[float]:
    """Return the microseconds of each call except the first, in which the ranks wait for each other."""
    times = []
    for _ in range(count + 1):
        start = time.perf_counter()
        function(x)
        times.append((time.perf_counter() - start) * 1e6)
    return times[1:]


if __name__ == "__main__":
    main()
