"""Find the machine's C compiler and its flags, and PyTorch's own libraries.

`library.py` calls these functions. They support Linux and macOS. The code for macOS has not run on a Mac yet: tests
cross-compile `cpu.c` with clang.
"""

import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
from ctypes import c_long
from pathlib import Path

import torch

from nanovllm_extras.machine.machine_limits import read_text

SYSTEMS = ("Linux", "Darwin")
COMMON = ("-std=gnu11", "-O3", "-fPIC", "-pthread", "-Wno-psabi")
TORCH = Path(torch.__file__).parent


def flags(system: str, machine: str) -> tuple[str, ...]:
    """Return the compiler flags for a shared library with threads and all instructions of this processor.

    `system` and `machine` are the results of `platform.system()` and `platform.machine()`.
    """
    native = "-mcpu=native" if machine in ("aarch64", "arm64") else "-march=native"
    return (*COMMON, native, "-dynamiclib" if system == "Darwin" else "-shared")


def find_compiler(system: str) -> str | None:
    """Return `$CC`, or the first C compiler that is installed, or None. Linux prefers gcc, which is tested most."""
    names = ("clang", "cc") if system == "Darwin" else ("gcc", "cc", "clang")
    return os.environ.get("CC") or next(filter(None, map(shutil.which, names)), None)


def openmp_of_torch(torch_folder: Path = TORCH) -> Path | None:
    """Return PyTorch's own OpenMP library on Linux, or None if it has none.

    Some wheels have the library in `torch/lib`, others in `torch.libs` next to `torch`.
    """
    found = [path for name in ("torch/lib", "torch.libs") for path in (torch_folder.parent / name).glob("libgomp*.so*")]
    return min(found) if found else None


def thread_counter() -> int | None:
    """Return the address of PyTorch's C++ function `int at::get_num_threads()`, or None if there is none."""
    for path in sorted((TORCH / "lib").glob("libtorch_cpu.*")):
        with contextlib.suppress(OSError, AttributeError):
            return ctypes.cast(ctypes.CDLL(str(path))._ZN2at15get_num_threadsEv, ctypes.c_void_p).value
    return None


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


def has_tiles() -> bool:
    """Return whether Linux shows AMX for bfloat16 and bytes (an old kernel or a hypervisor may hide it)."""
    return {"amx_tile", "amx_bf16", "amx_int8"} <= set(cpu_flags())


def ask_for_tiles(feature: int = 18) -> str | None:
    """Request permission to use AMX; return None, or the reason why Linux refuses.

    Linux requires the request because the tiles are expensive to save on a context switch. `feature` is
    XFEATURE_XTILE_DATA of Linux's <asm/fpu/types.h>.
    """
    arch_prctl, arch_req_xcomp_perm = 158, 0x1023  # of <asm/unistd_64.h>, <asm/prctl.h>
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(c_long(arch_prctl), c_long(arch_req_xcomp_perm), c_long(feature)) == 0:
        return None
    return f"Linux does not allow it: {os.strerror(ctypes.get_errno())}"
