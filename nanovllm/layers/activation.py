"""The gate of the feed-forward network (SwiGLU, Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

import torch
import torch.nn.functional as F
from torch import nn


class SiluAndMul(nn.Module):
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """gate, up: [num_tokens, intermediate_size] -> silu(gate) * up, the same shape"""
        return F.silu(gate) * up
