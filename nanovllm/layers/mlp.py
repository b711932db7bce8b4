"""The gated feed-forward network of a decoder layer, the same in all dense models."""

import torch
from torch import nn

from nanovllm.layers.activation import GATES
from nanovllm.layers.linear import FusedLinear, Linear


class GatedMLP(nn.Module):
    """x -> down(act(gate(x)) * up(x)); `activation` is a name in `GATES`.

    With `is_stored_fused` the checkpoint holds `gate_up_proj`, else `gate_proj` and `up_proj`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        is_stored_fused: bool = False,
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = FusedLinear(hidden_size, parts, bias, is_stored_fused)
        self.activation = GATES[activation]()
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same shape"""
        gate, up = self.gate_up_proj(x)  # [num_tokens, intermediate_size] each
        return self.down_proj(self.activation(gate, up))
