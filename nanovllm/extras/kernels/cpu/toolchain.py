"""The C compiler of this machine, its flags, and the OpenMP library that `cpu.c` shares with PyTorch.

Called by `library.py`. Linux and macOS are known. Nothing here has run on a Mac: clang compiles `cpu.c` for one in the
tests, and PyTorch's wheel says where its OpenMP lies.
"""

import ctypes
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch

SYSTEMS = ("Linux", "Darwin")
COMMON = ("-std=gnu11", "-O3", "-fPIC", "-Wno-psabi")
TORCH = Path(torch.__file__).parent


def flags(system: str, machine: str) -> tuple[str, ...]:
    """For a shared library with OpenMP that uses all of this processor; `system` and `machine` as `platform` says."""
    native = "-mcpu=native" if machine in ("aarch64", "arm64") else "-march=native"
    if system == "Darwin":  # Apple's clang knows OpenMP, and has neither its header nor its library
        openmp = ("-Xclang", "-fopenmp", "-idirafter", str(TORCH / "include"))
        return (*COMMON, native, *openmp, "-dynamiclib", "-Wl,-undefined,dynamic_lookup")
    return (*COMMON, native, "-fopenmp", "-shared")


def find_compiler(system: str) -> str | None:
    """`CC`, or the first that is installed. On Linux gcc: its OpenMP is PyTorch's, that of clang would be a second."""
    names = ("clang", "cc") if system == "Darwin" else ("gcc", "cc", "clang")
    return os.environ.get("CC") or next(filter(None, map(shutil.which, names)), None)


def openmp_of_torch(torch_folder: Path = TORCH) -> list[str]:
    """Linked first on Linux, so that torch and `cpu.c` share one pool of threads: two wait for each other's cores.

    Some wheels keep it in `torch/lib`, some in `torch.libs` beside it."""
    found = [path for name in ("torch/lib", "torch.libs") for path in (torch_folder.parent / name).glob("libgomp*.so*")]
    return ["-Wl,--as-needed", str(min(found))] if found else []


def offer_openmp(torch_folder: Path = TORCH) -> None:
    """On macOS, let `cpu.c` find its OpenMP functions in the library that torch has loaded. OSError if there is none.

    That library cannot be linked by its path: the name that is written in it is of a folder that users do not have."""
    ctypes.CDLL(str(torch_folder / "lib" / "libomp.dylib"), mode=ctypes.RTLD_GLOBAL)


def loaded_openmp(maps: str) -> list[str]:
    """The OpenMP libraries among a process' mapped files (`/proc/self/maps`): more than one are several pools."""
    return sorted(set(re.findall(r"/.*/lib(?:g|i)?omp\d*\b[^/\n]*\.so[^/\n]*$", maps, re.MULTILINE)))


def describe_processor(system: str) -> str:
    """Changes with what `-mcpu=native` may use."""
    if system == "Darwin":
        run = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return f"{platform.machine()} {run.stdout.strip()}"
    return " ".join([platform.machine(), *cpu_flags()])


def cpu_flags() -> list[str]:
    """What Linux says that the first processor can do."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8") if platform.system() == "Linux" else ""
    line = next((line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))), "")
    return line.partition(":")[2].split()
