"""The gate of the feed-forward network: act(gate) * up (GLU variants, Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

import torch
import torch.nn.functional as F
from torch import nn


class SiluAndMul(nn.Module):
    """SwiGLU."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """gate, up: [num_tokens, intermediate_size] -> silu(gate) * up, the same shape"""
        return F.silu(gate) * up


class GeluAndMul(nn.Module):
    """GeGLU, with the approximation of gelu by tanh."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """gate, up: [num_tokens, intermediate_size] -> gelu(gate) * up, the same shape"""
        return F.gelu(gate, approximate="tanh") * up


GATES = {"silu": SiluAndMul, "swish": SiluAndMul, "gelu_pytorch_tanh": GeluAndMul}  # by their names in config.json
