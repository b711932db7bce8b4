"""Fast attention backends, and layers, as add-ons that the core can do without: `select_backend` alone knows them.

- `cpu.py` and `cpu.c`: all layers on CPU.
- `flash_attention.py`: the flash-attn library on CUDA.
- Kernels in Triton. Read `store_kv.py` (how a token gets into the cache), `paged_attention.py` (how it is read) and
  `launch.py` (how large the pieces are), then `triton_attention.py`, which calls them. The rest of a layer on CUDA is
  `decoder_layer.py`, with its kernels in `norm.py` and `activation.py`.

No library is imported before its backend is chosen.
"""

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
