"""Fast attention backends, layers and draws, as add-ons that the core can do without.

`select_backend` imports backends, which bring their layers; `startup.choose_draw` imports `sample.py`.

- `cpu.py` and `cpu.c`: all layers on CPU.
- `flash_attention.py`: the flash-attn library on CUDA.
- Kernels in Triton. Begin with `decoder_layer.py`, a whole layer in nine launches. Its kernels are in `norm.py`, which
  also puts K and V into the cache, `activation.py` and, for up to 16 tokens, `few_tokens.py`. Attention reads the cache
  in `paged_attention.py`; `launch.py` says how large the pieces are, `triton_attention.py` makes the calls. `sample.py`
  draws tokens. `store_kv.py` fills the cache where PyTorch's layers are wanted (`enforce_eager=True`).

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


def why_too_old(least: tuple[int, int], generation: str) -> str | None:
    """What is missing for compute capability `least`; nothing where there is no GPU to ask."""
    if (found := gpu_capability()) is None or found >= least:
        return None
    wanted, has = ".".join(map(str, least)), ".".join(map(str, found))
    return f"it needs a GPU of compute capability {wanted} or later ({generation}), this one has {has}"
