"""Gated DeltaNet on CPU in one call of C between its projections: the fast version of `models/gated_delta.py`.

`CpuAttention.make_fast` calls `fuse_gated_delta` after single layers have been replaced by fast versions. C
computes decodes and prompts token by token, so a token has the same bits in every chunk. PyTorch's version computes
prompts in chunks, whose results differ in the last bits.
"""

from ctypes import Structure, byref, c_float, c_long, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nanovllm_extras.kernels.classes import is_one
from nanovllm_extras.kernels.cpu.library import LANES, load_library

GATED_DELTA_NET = "nanovllm_extras.models.gated_delta.GatedDeltaNet"


class DeltaStruct(Structure):
    """The C type `struct delta_layer` of gated_delta.h."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("taps", "rates", "dt_bias", "norm")),
        *((name, c_long) for name in ("num_key_heads", "num_heads", "key_dim", "value_dim", "width")),
        ("eps", c_float),
    ]


class CpuGatedDeltaNet(nn.Module):
    """Computes convolution, recurrence and gated norm of all sequences in one call of C."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_proj, self.out_proj = layer.in_proj, layer.out_proj
        self.library = load_library(dtype)
        self.value_size = layer.num_heads * layer.value_dim
        taps = layer.conv1d.weight[:, 0].T.float().contiguous()  # [width, num_channels]
        rates, dt_bias = -layer.A_log.float().exp(), layer.dt_bias.float().contiguous()  # [num_heads] each
        self.weights = (taps, rates, dt_bias, layer.norm.weight)
        sizes = (layer.num_key_heads, layer.num_heads, layer.key_dim, layer.value_dim, len(taps))
        self.struct = DeltaStruct(*(weight.data_ptr() for weight in self.weights), *sizes, layer.norm.eps)

    def forward(self, x: Tensor, conv: Tensor, recurrent: Tensor, metadata: Any) -> Tensor:
        """Compute the layer: [num_tokens, hidden_size] -> the same shape. Reads and writes the sequences' states."""
        parts = self.in_proj(x)  # q, k and v; z; b; a: [num_tokens, …] each, parts of one tensor
        y = torch.empty(len(x), self.value_size, dtype=x.dtype)
        step = (metadata.state_slots, metadata.state_sources, metadata.is_first, metadata.cu_seqlens_q)
        pointers = (t.data_ptr() for t in (*parts, *step, conv, recurrent, y))
        self.library.gated_delta(byref(self.struct), *pointers, len(metadata.state_slots), parts[0].stride(0))
        return self.out_proj(y)


def fuse_gated_delta(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace every Gated DeltaNet layer whose heads are whole vectors by `CpuGatedDeltaNet`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if is_one(child, GATED_DELTA_NET) and is_fast(child):
                setattr(module, name, CpuGatedDeltaNet(child, dtype))


def is_fast(layer: Any) -> bool:
    return not (layer.key_dim % LANES or layer.value_dim % LANES)
