"""From a runner with a loaded network to its `Adapters`, with products for its device.

CUDA with triton           one kernel for all adapters of a step (`kernels/cuda/adapter_kernels.py`)
CUDA without triton        PyTorch, with a mask
CPU with the C library     `kernels/cpu/adapters.h`
otherwise                  PyTorch, adapter by adapter
"""

from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from nanovllm_extras.kernels.adapter_rows import AdapterRows, LayerShape, MaskedProducts, Products, TorchProducts
from nanovllm_extras.kernels.cuda.requirements import why_no_triton
from nanovllm_extras.lora.adapter_config import VOCABULARY
from nanovllm_extras.lora.adapters import Adapters, Keep
from nanovllm_extras.weights.cut import Cutter


class Part(Protocol):
    """The part of the network that a rank has (`part` of the runner)."""

    rank: int
    num_ranks: int


class HasNetwork(Protocol):
    """A runner whose network is loaded."""

    config: Any
    folder: Path
    model: Any
    model_class: Any
    shape: Any
    whole_shape: Any
    part: Any
    backend: Any
    dtype: torch.dtype
    device: torch.device

    @property
    def backend_of_layers(self) -> Any:
        """Return what the network is made with."""


def make_adapters(runner: HasNetwork) -> Adapters:
    """Put layers that can have adapters into a runner's network, and return what loads adapters into them."""
    config = runner.config
    with torch.device("meta"):
        whole: nn.Module = runner.model_class(runner.whole_shape, runner.backend_of_layers)
        share: nn.Module = runner.model_class(runner.shape, runner.backend_of_layers)
    part: Part = runner.part
    cuts = Cutter(part.rank, part.num_ranks).cuts_of_checkpoint(whole, share) if part.num_ranks > 1 else {}
    max_rank = config.max_lora_rank
    keep: Keep = list
    if runner.device.type == "cuda" or config.attention_backend == "triton":  # which runs in an interpreter, too
        rows = AdapterRows()
        make: Any = partial(make_for_cuda, num_slots=config.max_loras, max_rank=max_rank, runner=runner)
    elif hasattr(runner.backend, "library") and not config.enforce_eager and not config.has_own_backend:
        from nanovllm_extras.kernels.cpu.cpu_adapters import CpuAdapterRows, in_huge_pages

        rows, keep = CpuAdapterRows(), in_huge_pages
        make = partial(make_for_cpu, num_slots=config.max_loras, dtype=runner.dtype)
    else:
        rows = AdapterRows()
        make = partial(TorchProducts, num_slots=config.max_loras, dtype=runner.dtype)
    sizes = config.max_loras, max_rank, runner.dtype
    adapters = Adapters(whole, share, cuts, *sizes, rows, keep, refused_by(runner))
    adapters.wrap(runner.model, make)
    return adapters


def refused_by(runner: HasNetwork) -> dict[str, str]:
    """Return which of the embeddings and the output layer can have no adapters, and why."""
    if runner.config.has_mtp_head:
        why = "with the method mtp it can have no adapter: the head computes rows of its own with this layer"
        return dict.fromkeys(VOCABULARY, why)
    return {} if runner.shape.has_head else {"lm_head": "the checkpoint has no output layer"}


def make_for_cpu(shape: LayerShape, rows: Any, num_slots: int, dtype: torch.dtype) -> Products:
    """Return products in C, or in PyTorch for a layer that C does not take."""
    from nanovllm_extras.kernels.cpu.cpu_adapters import CpuProducts, takes

    return (CpuProducts if takes(shape) else TorchProducts)(shape, rows, num_slots, dtype)


def make_for_cuda(shape: LayerShape, rows: AdapterRows, num_slots: int, max_rank: int, runner: HasNetwork) -> Products:
    """Return products by a kernel, or in PyTorch without triton."""
    sizes = (shape, rows, num_slots, runner.dtype, max_rank, runner.device)
    if why_no_triton() is not None:
        return MaskedProducts(*sizes)
    from nanovllm_extras.kernels.cuda.adapter_kernels import TritonProducts

    return TritonProducts(*sizes)
