"""Rotary position embedding (RoFormer, Su et al. 2021, https://arxiv.org/abs/2104.09864).

Pair i of a head, (x[i], x[i + head_dim/2]), is rotated by the angle position * theta^(-2i/head_dim), so that the dot
product of a query and a key depends on the distance between them alone.
"""

import torch
from torch import nn

from nanovllm.layers.norm import RMSNorm


class Rotary(nn.Module):
    """Cosine and sine of every position's angles, computed once a step for all layers."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [num_tokens] int -> two of [num_tokens, 1, head_dim / 2]; the 1 stands for the heads"""
        steps = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float32)  # [head_dim / 2]
        frequencies = 1.0 / self.theta ** (steps / self.head_dim)  # [head_dim / 2]
        angles = positions[:, None].float() * frequencies  # [num_tokens, head_dim / 2]
        return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [num_tokens, num_heads, head_dim] -> the same shape, rotated"""
    first, second = x.chunk(2, dim=-1)  # [num_tokens, num_heads, head_dim / 2] each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RMSNormRotary(RMSNorm):
    """What Qwen3 does to each head of the queries and keys: normalise it, then rotate it."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x: [num_tokens, num_heads, head_dim] -> the same shape"""
        return apply_rotary(super().forward(x), cos, sin)
