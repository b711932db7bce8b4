"""Kernels in Triton, as an attention backend that the core can do without: `select_backend` alone knows this package.

Read `store_kv.py` (how a token gets into the cache), `paged_attention.py` (how it is read) and `launch.py` (how large
the pieces are), then `triton_attention.py`, which calls them. Nothing here is imported before the backend is chosen,
and this file must not import triton: it says whether one could.
"""

import importlib.util
import os

import torch


def why_not_triton(device: torch.device, head_dim: int) -> str | None:
    """What keeps the backend `triton` from running here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which comes with torch's CUDA build on Linux"
    if head_dim & (head_dim - 1) or not 16 <= head_dim <= 256:
        return f"takes a head_dim that is a power of two from 16 to 256, the model has {head_dim}"
    if device.type == "cuda" or runs_in_interpreter():
        return None
    return f"needs a CUDA device, got {device} (TRITON_INTERPRET=1 runs the kernels on cpu, slowly, for tests)"


def runs_in_interpreter() -> bool:
    """Triton's own switch, read when triton is imported: kernels run as numpy code on the host."""
    return os.environ.get("TRITON_INTERPRET") == "1"
