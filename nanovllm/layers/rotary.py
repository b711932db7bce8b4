"""Rotary position embedding (RoFormer, Su et al. 2021, https://arxiv.org/abs/2104.09864).

Pair i of a head, (x[i], x[i + rotary_dim/2]), is rotated by the angle position * frequency[i], so that the dot product
of a query and a key depends on the distance between them alone. `rope_types.py` has the frequencies; plain ones are
theta^(-2i/rotary_dim). With partial rotary, rotary_dim < head_dim, the rest of the head stays as it is.
"""

import torch
from torch import nn

from nanovllm.layers.norm import RMSNorm, UnitOffsetRMSNorm
from nanovllm.layers.rope_types import Rope, rope_frequencies


class Rotary(nn.Module):
    """Cosine and sine of every position's angles, computed once a step for all layers."""

    def __init__(self, rotary_dim: int, rope: Rope, max_len: int) -> None:
        super().__init__()
        self.rotary_dim, self.max_len = rotary_dim, max_len
        self.frequencies, self.factor = rope_frequencies(rope, rotary_dim, max_len)  # [rotary_dim / 2] float32

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [num_tokens] int -> two of [num_tokens, 1, rotary_dim / 2]; the 1 stands for the heads"""
        frequencies = self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None].float() * frequencies  # [num_tokens, rotary_dim / 2]
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [num_tokens, num_heads, head_dim] -> the same shape, rotated"""
    half = cos.shape[-1]  # rotary_dim / 2
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class ApplyRotary(nn.Module):
    """A layer of its own, so that a backend can put a fast twin in its place."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, num_heads, head_dim] -> the same shape"""
        return apply_rotary(x, cos, sin)


class RMSNormRotary(RMSNorm):
    """What Qwen3 does to each head of the queries and keys: normalise it, then rotate it."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x: [num_tokens, num_heads, head_dim] -> the same shape"""
        return apply_rotary(super().forward(x), cos, sin)


class UnitOffsetRMSNormRotary(UnitOffsetRMSNorm):
    """The same with Gemma's norm."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x: [num_tokens, num_heads, head_dim] -> the same shape"""
        return apply_rotary(super().forward(x), cos, sin)
