"""Check whether this machine has the packages and the GPU that the CUDA backends need."""

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
    except ValueError:  # the package is in sys.modules without a spec
        return sys.modules.get(package) is not None


def why_no_triton() -> str | None:
    """Return why Triton kernels cannot be launched on this machine, or None if all known requirements are met.

    Triton compiles kernels itself, but launches them through a module that it builds with a C compiler and Python's
    headers. Without them, the first launch would fail. This function searches the same places as
    `triton/runtime/build.py`.
    """
    if not is_installed("triton"):
        return "it needs the package triton, which comes with torch's CUDA build on Linux"
    if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter launches no kernels
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
    """Return the current GPU's compute capability, or None without a GPU. Other GPUs are assumed to be equal."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def why_too_old(least: tuple[int, int], generation: str) -> str | None:
    """Return why the GPU is too old for compute capability `least`; None if it is new enough or there is no GPU."""
    if (found := gpu_capability()) is None or found >= least:
        return None
    wanted, has = ".".join(map(str, least)), ".".join(map(str, found))
    return f"it needs a GPU of compute capability {wanted} or later ({generation}), this one has {has}"
