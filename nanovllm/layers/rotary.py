"""Rotary position embedding (RoFormer, Su et al. 2021, https://arxiv.org/abs/2104.09864).

Pair i of a head, (x[i], x[i + head_dim/2]), is rotated by the angle position * theta^(-2i/head_dim). Then the dot
product of a query and a key depends only on the distance between their positions.
"""

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Cosine and sine of the angles of each position, computed once a step for all layers."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")  # [head_dim / 2]
        self.frequencies = 1.0 / theta ** (steps / head_dim)  # [head_dim / 2] float32

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions: [num_tokens] int -> cosine and sine, [num_tokens, 1, head_dim / 2] each; 1 is for the heads"""
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None].float() * self.frequencies  # [num_tokens, head_dim / 2]
        return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


class ApplyRotary(nn.Module):
    """Rotate queries or keys by the angles of their positions."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [num_tokens, num_heads, head_dim] -> the same shape, rotated"""
        first, second = x.chunk(2, dim=-1)  # [num_tokens, num_heads, head_dim / 2] each
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
