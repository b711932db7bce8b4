"""What the backends for CUDA need of this machine: packages, and how new its GPU is."""

import importlib.util
import sys

import torch


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it is in sys.modules without a spec
        return sys.modules.get(package) is not None


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the current GPU, and by assumption of the machine's others; None if there is no GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def why_too_old(least: tuple[int, int], generation: str) -> str | None:
    """Why the GPU is too old for code that needs compute capability `least`; None if it is not, or if there is none."""
    if (found := gpu_capability()) is None or found >= least:
        return None
    wanted, has = ".".join(map(str, least)), ".".join(map(str, found))
    return f"it needs a GPU of compute capability {wanted} or later ({generation}), this one has {has}"
