"""A mixture of experts on CPU in one call of C: the fast version of `Experts` in `nanovllm_extras/models/moe.py`.

The experts' own fast layers have packed the weights, and C gets their addresses. `replace_layers` in `cpu_layers.py`
replaces the routers. `CpuAttention.make_fast` calls `fuse_experts` after single layers have been replaced.
"""

from ctypes import Structure, byref, c_long, c_void_p
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm_extras.kernels.classes import is_one
from nanovllm_extras.kernels.cpu.cpu_layers import CpuGate, CpuLinear
from nanovllm_extras.kernels.cpu.library import LANES, load_library

EXPERTS = "nanovllm_extras.models.moe.Experts"


class ExpertsStruct(Structure):
    """The C type `struct experts` of experts.h."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, c_long) for name in ("num_experts", "hidden_size", "intermediate_size", "gate")),
    ]


class CpuExperts(nn.Module):
    """Computes all experts in one call of C, one expert after another."""

    def __init__(self, experts: nn.ModuleList, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = experts
        self.library = load_library(dtype)
        gate_ups, downs = zip(*(parts_of(expert) for expert in experts), strict=True)
        addresses = [[part.packed.data_ptr() for part in parts] for parts in (gate_ups, downs)]
        addresses += [[address_of_bias(part) for part in parts] for parts in (gate_ups, downs)]
        self.addresses = torch.tensor(addresses, dtype=torch.int64)  # [4, num_experts]
        down = downs[0]
        pointers = (row.data_ptr() for row in self.addresses)
        first: Any = experts[0]
        sizes = (len(experts), down.out_features, down.in_features, first.activation.kind)
        self.struct = ExpertsStruct(*pointers, *sizes)

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Mix the experts' outputs: x: [num_tokens, hidden_size]; expert_ids, weights: [num_tokens, top_k] -> as x"""
        x, expert_ids, weights = x.contiguous(), expert_ids.contiguous(), weights.contiguous()
        y = torch.empty_like(x)
        tensors = (x, expert_ids, weights, y)
        self.library.mixture(byref(self.struct), *(t.data_ptr() for t in tensors), *expert_ids.shape)
        return y


def fuse_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace every `Experts` layer by `CpuExperts` if C supports all of its experts."""
    child: Any
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if is_one(child, EXPERTS) and all(is_fast(expert) for expert in child):
                setattr(module, name, CpuExperts(child, dtype))


def is_fast(expert: nn.Module) -> bool:
    """Return whether every part of the expert has a fast version and its rows are whole vectors."""
    parts = parts_of(expert)
    if not all(isinstance(part, CpuLinear) and part.other is None for part in parts):
        return False
    down = parts[1]
    return isinstance(expert.activation, CpuGate) and not (down.in_features % LANES or down.out_features % LANES)


def parts_of(expert: nn.Module) -> tuple[Any, Any]:
    return expert.gate_up_proj, expert.down_proj


def address_of_bias(part: CpuLinear) -> int:
    return 0 if part.bias is None else part.bias.data_ptr()
