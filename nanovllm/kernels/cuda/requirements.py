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
    """Of the current GPU, like which the machine's others are taken to be; None if there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def why_too_old(least: tuple[int, int], generation: str) -> str | None:
    """What is missing for compute capability `least`; nothing where there is no GPU to ask."""
    if (found := gpu_capability()) is None or found >= least:
        return None
    wanted, has = ".".join(map(str, least)), ".".join(map(str, found))
    return f"it needs a GPU of compute capability {wanted} or later ({generation}), this one has {has}"
