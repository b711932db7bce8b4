"""Gated feed-forward networks with other gates than the core's, and with biases."""

import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers import basic
from nanovllm.layers.basic import FusedLinear, Linear, SiluAndMul


class GeluAndMul(nn.Module):
    """The gate of GeGLU, with the approximation of gelu by tanh."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute gelu(gate) * up. gate, up: [num_tokens, intermediate_size] -> as gate"""
        return F.gelu(gate, approximate="tanh") * up


GATES = {"silu": SiluAndMul, "swish": SiluAndMul, "gelu_pytorch_tanh": GeluAndMul}  # by their names in config.json


class GatedMLP(basic.GatedMLP):
    """x -> down(act(gate(x)) * up(x)); `activation` is a name in `GATES`."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str = "silu", bias: bool = False) -> None:
        nn.Module.__init__(self)
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = FusedLinear(hidden_size, parts, bias)
        self.activation = GATES[activation]()
        self.down_proj = Linear(intermediate_size, hidden_size, bias)
