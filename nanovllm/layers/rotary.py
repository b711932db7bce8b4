"""Rotary position embedding (RoFormer, Su et al. 2021, https://arxiv.org/abs/2104.09864).

Pair i of a head, (x[i], x[i + rotary_dim/2]), is rotated by the angle position * frequency[i], so that the dot product
of a query and a key depends only on the distance between them. With partial rotary, rotary_dim < head_dim, the rest of
the head stays as it is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Rope:
    """How fast each pair rotates. Models for longer contexts slow some pairs down: `extras/models/rope_types.py`."""

    theta: float = 10000.0

    def frequencies(self, rotary_dim: int, max_len: int) -> tuple[Tensor, float]:
        """(angle of one position for each pair: [rotary_dim / 2] float32, factor on cosine and sine)

        `max_len` is the longest sequence that the engine serves.
        """
        return 1.0 / self.wavelengths(rotary_dim), 1.0

    def wavelengths(self, rotary_dim: int) -> Tensor:
        """theta^(2i/rotary_dim) for each pair i: [rotary_dim / 2] float32, in units of 2 pi positions"""
        steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu")  # [rotary_dim / 2]
        return self.theta ** (steps / rotary_dim)


class Rotary(nn.Module):
    """Cosine and sine of every position's angles, computed once a step for all layers."""

    def __init__(self, rotary_dim: int, rope: Rope, max_len: int) -> None:
        super().__init__()
        self.rotary_dim, self.max_len = rotary_dim, max_len
        self.frequencies, self.factor = rope.frequencies(rotary_dim, max_len)  # [rotary_dim / 2] float32

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions: [num_tokens] int -> two of [num_tokens, 1, rotary_dim / 2]; the 1 stands for the heads"""
        frequencies = self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None].float() * frequencies  # [num_tokens, rotary_dim / 2]
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


class ApplyRotary(nn.Module):
    """A layer of its own, so that a backend can replace it by a fast version."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [num_tokens, num_heads, head_dim] -> the same shape, rotated"""
        return apply_rotary(x, cos, sin)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]  # rotary_dim / 2
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
