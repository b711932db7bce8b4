"""The gated feed-forward network of a decoder layer (GLU variants, Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.linear import FusedLinear, Linear


class SiluAndMul(nn.Module):
    """SwiGLU's gate."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up: [num_tokens, intermediate_size] -> silu(gate) * up, the same shape"""
        return F.silu(gate) * up


class GeluAndMul(nn.Module):
    """GeGLU's gate, with the approximation of gelu by tanh."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up: [num_tokens, intermediate_size] -> gelu(gate) * up, the same shape"""
        return F.gelu(gate, approximate="tanh") * up


GATES = {"silu": SiluAndMul, "swish": SiluAndMul, "gelu_pytorch_tanh": GeluAndMul}  # by their names in config.json


class GatedMLP(nn.Module):
    """x -> down(act(gate(x)) * up(x)); `activation` is a name in `GATES`."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str = "silu", bias: bool = False) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = FusedLinear(hidden_size, parts, bias)
        self.activation = GATES[activation]()
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape"""
        gate, up = self.gate_up_proj(x)  # [num_tokens, intermediate_size] each
        return self.down_proj(self.activation(gate, up))
