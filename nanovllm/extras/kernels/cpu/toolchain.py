"""Find the machine's C compiler, its flags, and the OpenMP library that `cpu.c` shares with PyTorch.

`library.py` calls these functions. They support Linux and macOS. The code for macOS has not run on a Mac yet: tests
cross-compile `cpu.c` with clang, and the path of OpenMP is that in PyTorch's wheel.
"""

import ctypes
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch

from nanovllm.extras.machine_limits import read_text

SYSTEMS = ("Linux", "Darwin")
COMMON = ("-std=gnu11", "-O3", "-fPIC", "-Wno-psabi")
TORCH = Path(torch.__file__).parent


def flags(system: str, machine: str) -> tuple[str, ...]:
    """Return the compiler flags for a shared library with OpenMP and all instructions of this processor.

    `system` and `machine` are the results of `platform.system()` and `platform.machine()`.
    """
    native = "-mcpu=native" if machine in ("aarch64", "arm64") else "-march=native"
    if system == "Darwin":  # Apple's clang compiles OpenMP, but has neither its header nor its library
        openmp = ("-Xclang", "-fopenmp", "-idirafter", str(TORCH / "include"))
        return (*COMMON, native, *openmp, "-dynamiclib", "-Wl,-undefined,dynamic_lookup")
    return (*COMMON, native, "-fopenmp", "-shared")


def find_compiler(system: str) -> str | None:
    """Return `$CC`, or the first C compiler that is installed, or None.

    Linux prefers gcc, because it uses the same OpenMP library as PyTorch; clang would load a second one.
    """
    names = ("clang", "cc") if system == "Darwin" else ("gcc", "cc", "clang")
    return os.environ.get("CC") or next(filter(None, map(shutil.which, names)), None)


def openmp_of_torch(torch_folder: Path = TORCH) -> list[str]:
    """Return linker arguments for PyTorch's own OpenMP library on Linux, or [] if it has none.

    With this library, PyTorch and `cpu.c` share one pool of threads. Two pools would wait for each other's cores. Some
    wheels have the library in `torch/lib`, others in `torch.libs` next to `torch`.
    """
    found = [path for name in ("torch/lib", "torch.libs") for path in (torch_folder.parent / name).glob("libgomp*.so*")]
    return ["-Wl,--as-needed", str(min(found))] if found else []


def offer_openmp(torch_folder: Path = TORCH) -> None:
    """On macOS, make the OpenMP functions of PyTorch's library visible to `cpu.c`. Raises OSError if it is missing.

    The library cannot be linked by its path, because its install name is in a folder that users do not have.
    """
    ctypes.CDLL(str(torch_folder / "lib" / "libomp.dylib"), mode=ctypes.RTLD_GLOBAL)


def loaded_openmp(maps: str) -> list[str]:
    """Return the OpenMP libraries among a process's mapped files (`/proc/self/maps`). Each has its own thread pool."""
    return sorted(set(re.findall(r"/.*/lib(?:g|i)?omp\d*\b[^/\n]*\.so[^/\n]*$", maps, re.MULTILINE)))


def describe_processor(system: str) -> str:
    """Return a text that differs between processors for which `-march=native` or `-mcpu=native` differs."""
    if system == "Darwin":
        run = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return f"{platform.machine()} {run.stdout.strip()}"
    return " ".join([platform.machine(), *(cpu_flags() or [platform.node()])])


def cpu_flags() -> list[str]:
    """Return the features of the first processor from `/proc/cpuinfo`, or [] on other systems and without `/proc`."""
    cpuinfo = read_text(Path("/proc/cpuinfo")) if platform.system() == "Linux" else ""
    line = next((line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))), "")
    return line.partition(":")[2].split()
