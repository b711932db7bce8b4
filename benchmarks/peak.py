"""The peak of this processor's arithmetic: multiply-adds of registers, with the instructions of the kernels.

    python -m benchmarks.peak [--dtype float32]

Compiles `peak.c` like the kernels. Prints the operations per second (a multiply-add is two) of one core, and of all
that the kernels use.
"""

import argparse
import ctypes
import functools
import platform
import shlex
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nanovllm_extras.kernels.cpu.library import FLAGS, SOURCE, load_library
from nanovllm_extras.kernels.cpu.library_cache import NoLibraryError
from nanovllm_extras.kernels.cpu.toolchain import find_compiler

PROBE = Path(__file__).with_name("peak.c")
ROUND_S, NUM_ROUNDS = 0.02, 12


@functools.cache
def load_probe(dtype: torch.dtype) -> ctypes.CDLL:
    """Compile `peak.c` for `dtype`. NoLibraryError if the kernels cannot be compiled either."""
    has_tiles = load_library(dtype).instructions() == b"AMX BF16"  # it also asks Linux for them
    defines = ["-DBFLOAT16"] * (dtype == torch.bfloat16) + ["-DAMX"] * has_tiles
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peak.so"
        compiler = shlex.split(find_compiler(platform.system()) or "cc")
        command = [*compiler, *FLAGS, *defines, f"-I{SOURCE.parent}", str(PROBE), "-o", str(path), "-lm"]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(path))
    library.multiply_often.argtypes = [ctypes.c_long]
    library.multiply_often.restype = ctypes.c_long
    return library


def measure_peak(dtype: torch.dtype, num_threads: int | None = None) -> float:
    """Return the operations per second of `num_threads` threads: the best of several rounds. Default: PyTorch's number.

    NoLibraryError if there is no C compiler, or if the kernels have no such dtype.
    """
    num_threads = num_threads or torch.get_num_threads()
    multiply = load_probe(dtype).multiply_often
    start = time.perf_counter()
    multiply(100_000)
    rounds = max(1, round(100_000 * ROUND_S / (time.perf_counter() - start)))
    best = 0.0
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(NUM_ROUNDS):
            start = time.perf_counter()
            operations = sum(threads.map(multiply, [rounds] * num_threads))  # without the interpreter's lock
            best = max(best, operations / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the peak of this processor's arithmetic.")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    dtype = getattr(torch, parser.parse_args().dtype)
    try:
        one, num_threads = measure_peak(dtype, 1), torch.get_num_threads()
        print(f"{load_library(dtype).description}, {dtype}: {one / 1e9:.1f} GFLOP/s with one core, "
              f"{measure_peak(dtype) / 1e9:.1f} with {num_threads}")  # fmt: skip
    except NoLibraryError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
