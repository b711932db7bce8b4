"""The gated feed-forward network of a decoder layer (GLU variants, Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.linear import FusedLinear, Linear


class SiluAndMul(nn.Module):
    """The gate of SwiGLU."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up: [num_tokens, intermediate_size] -> silu(gate) * up, the same shape"""
        return F.silu(gate) * up


class GatedMLP(nn.Module):
    """x -> down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = FusedLinear(hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size})
        self.activation: nn.Module = SiluAndMul()
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape"""
        gate, up = self.gate_up_proj(x)  # [num_tokens, intermediate_size] each
        return self.down_proj(self.activation(gate, up))
