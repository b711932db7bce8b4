"""What the backends for CUDA need of this machine: packages, and how new its GPU is."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it is in sys.modules without a spec
        return sys.modules.get(package) is not None


def why_no_triton() -> str | None:
    """Why kernels in Triton cannot be launched on this machine; None if nothing is known to be missing.

    Triton compiles kernels by itself, but launches them through a module that it builds with a C compiler and Python's
    headers. Both are looked for where `triton/runtime/build.py` does. Without them, the first launch would fail.
    """
    if not is_installed("triton"):
        return "it needs the package triton, which comes with torch's CUDA build on Linux"
    if os.environ.get("TRITON_INTERPRET") == "1":  # nothing is launched
        return None
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"triton needs a C compiler, and there is no {' or '.join(compilers)}: install gcc, or set CC"
    scheme = sysconfig.get_default_scheme()
    include = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    folders = [include, *(os.environ.get(name, "") for name in ("CPATH", "C_INCLUDE_PATH"))]
    if not any((Path(folder) / "Python.h").is_file() for folder in ":".join(folders).split(":")):
        return f"triton needs Python's headers, and there is no {include}/Python.h: install python3-dev"
    return None


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the current GPU, and by assumption of the machine's others; None if there is no GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def why_too_old(least: tuple[int, int], generation: str) -> str | None:
    """Why the GPU is too old for code that needs compute capability `least`; None if it is not, or if there is none."""
    if (found := gpu_capability()) is None or found >= least:
        return None
    wanted, has = ".".join(map(str, least)), ".".join(map(str, found))
    return f"it needs a GPU of compute capability {wanted} or later ({generation}), this one has {has}"
