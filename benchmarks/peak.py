"""The peak of this processor's arithmetic: multiply-adds of registers, with the instructions of the kernels.

    python -m benchmarks.peak [--dtype float32]     # int8: products with quantised weights

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

PROBE = Path(__file__).with_name("peak.c")
KERNELS = PROBE.parent.parent / "nanovllm_extras" / "kernels" / "cpu"
ROUND_S, NUM_ROUNDS = 0.02, 12


@functools.cache
def load_probe(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Compile `peak.c` for `dtype`, or return None if there is no compiler, or no such product in the kernels."""
    try:
        from nanovllm_extras.kernels.cpu.toolchain import ask_for_tiles, find_compiler, flags, has_tiles
    except ImportError:  # an environment of another engine, without this project's packages
        return None
    compiler = find_compiler(platform.system())
    if compiler is None or dtype not in (torch.bfloat16, torch.float32, torch.int8):
        return None
    defines = ["-DBFLOAT16"] * (dtype != torch.float32) + ["-DBYTES"] * (dtype == torch.int8)
    defines += ["-DAMX"] * (dtype != torch.float32 and has_tiles() and ask_for_tiles() is None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peak.so"
        command = [*shlex.split(compiler), *flags(platform.system(), platform.machine()), *defines, f"-I{KERNELS}"]
        subprocess.run([*command, str(PROBE), "-o", str(path), "-lm"], check=True)
        library = ctypes.CDLL(str(path))
    library.multiply_often.argtypes = [ctypes.c_long]
    library.multiply_often.restype = ctypes.c_long
    return library


def measure_peak(dtype: torch.dtype, num_threads: int | None = None) -> float:
    """Return the operations per second of `num_threads` threads, by default of as many as PyTorch has, or 0 if unknown.

    It is the best of several rounds.
    """
    num_threads = num_threads or torch.get_num_threads()
    library = load_probe(dtype)
    if library is None:
        return 0.0
    start = time.perf_counter()
    library.multiply_often(100_000)
    rounds = max(1, round(100_000 * ROUND_S / (time.perf_counter() - start)))
    best = 0.0
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(NUM_ROUNDS):
            start = time.perf_counter()
            operations = sum(threads.map(library.multiply_often, [rounds] * num_threads))  # without Python's lock
            best = max(best, operations / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the peak of this processor's arithmetic.")
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "int8"], default="bfloat16")
    name = parser.parse_args().dtype
    dtype, num_threads = getattr(torch, name), torch.get_num_threads()
    if load_probe(dtype) is None:
        parser.error("there is no C compiler (cc, gcc, clang or $CC) on this machine")
    one, most = measure_peak(dtype, 1), measure_peak(dtype)
    print(f"{name}: {one / 1e9:.1f} billion operations/s with one core, {most / 1e9:.1f} with {num_threads}")


if __name__ == "__main__":
    main()
