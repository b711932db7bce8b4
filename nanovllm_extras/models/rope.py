"""How fast each pair of a head's dimensions rotates, and the rotary layer. `rope_types.py` is for longer contexts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.checks import check_number
from nanovllm.layers.basic import ApplyRotary, Rotary

# "mrope" counts positions of texts and images apart, which are equal in a text
ALIASES = {"su": "longrope", "mrope": "default"}


@dataclass(frozen=True)
class Rope:
    """How fast each pair rotates. Models for longer contexts slow some pairs down: `models/rope_types.py`."""

    theta: float = 10000.0

    def frequencies(self, rotary_dim: int, max_len: int) -> tuple[Tensor, float]:
        """Return each pair's angle of one position: [rotary_dim / 2] float32, and a factor on cosine and sine.

        `max_len` is the longest sequence that the engine serves.
        """
        return 1.0 / self.wavelengths(rotary_dim), 1.0

    def longest(self, max_len: int, max_model_len: int | None) -> int:
        """Return the longest sequence that a model with `max_len` as max_position_embeddings takes.

        `max_model_len` is the engine's option of this name.
        """
        return max_len

    def wavelengths(self, rotary_dim: int) -> Tensor:
        """Return theta^(2i/rotary_dim) for each pair i: [rotary_dim / 2] float32, in units of 2 pi positions."""
        steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu")  # [rotary_dim / 2]
        return self.theta ** (steps / rotary_dim)


class ScaledRotary(Rotary):
    """The core's `Rotary` for any `Rope`: its frequencies, and a factor on cosine and sine."""

    def __init__(self, rotary_dim: int, rope: Rope, max_len: int) -> None:
        nn.Module.__init__(self)
        self.frequencies, self.factor = rope.frequencies(rotary_dim, max_len)  # [rotary_dim / 2] float32

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines: [num_tokens] int -> two of [num_tokens, 1, rotary_dim / 2], equal for all heads."""
        frequencies = self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None].float() * frequencies  # [num_tokens, rotary_dim / 2]
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


class ApplyPartialRotary(ApplyRotary):
    """Rotate the first dimensions of each head, two for each angle, and keep the others."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, norm: nn.Module | None = None) -> Tensor:
        """x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, 1, rotary_dim / 2] -> as x"""
        x = x if norm is None else norm(x)
        rotary_dim = 2 * cos.shape[-1]
        return torch.cat((super().forward(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)


def rope_type_of(parameters: dict[str, Any]) -> str:
    """Return the type by the name that it has here: early files have others for two of them."""
    found = parameters.get("rope_type") or parameters.get("type") or "default"
    return ALIASES.get(found, found) if isinstance(found, str) else found


def plain_rope(theta: float, rotary_dim: int) -> Rope:
    if rotary_dim % 2:
        raise ValueError(f"pairs of a head's dimensions are rotated, so their number must be even, it is {rotary_dim}")
    check_number("config.json: rope_theta", theta, 0, open_low=True)
    return Rope(float(theta))
