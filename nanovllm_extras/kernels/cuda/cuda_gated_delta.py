"""Gated DeltaNet on CUDA in three to five launches between its projections, as in `models/gated_delta.py`.

`replace_layers` in `cuda_decoder_layer.py` puts it in place.
"""

from typing import Any

import torch
from torch import nn

from nanovllm_extras.kernels.classes import is_one
from nanovllm_extras.kernels.cuda.delta_kernels import causal_conv, gated_delta, gated_norm

GATED_DELTA_NET = "nanovllm_extras.models.gated_delta.GatedDeltaNet"
MAX_KEY_DIM = 128  # larger states would spill registers


class TritonGatedDeltaNet(nn.Module):
    """Shares the weights of the layer that it replaces."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_proj, self.out_proj = layer.in_proj, layer.out_proj
        self.conv1d, self.norm = layer.conv1d, layer.norm
        self.A_log, self.dt_bias = layer.A_log, layer.dt_bias
        self.num_key_heads = layer.num_key_heads

    def forward(self, x: torch.Tensor, conv: torch.Tensor, recurrent: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Compute the layer: [num_tokens, hidden_size] -> the same shape. Reads and writes the sequences' states."""
        qkv, z, b, a = self.in_proj(x)  # [num_tokens, …] each, parts of one tensor
        mixed = causal_conv(qkv, conv, self.conv1d.weight, metadata)  # [num_tokens, num_channels]
        out = gated_delta(mixed, b, a, self.A_log, self.dt_bias, recurrent, self.num_key_heads, metadata)
        return self.out_proj(gated_norm(out, z, self.norm.weight, self.norm.eps).flatten(1))


def has_fast_delta(layer: Any) -> bool:
    """Return whether `TritonGatedDeltaNet` can replace this layer."""
    return is_one(layer, GATED_DELTA_NET) and layer.key_dim <= MAX_KEY_DIM
