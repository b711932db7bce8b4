"""Which tokens does a token see, and how do scores become weights? What layers of one model may do differently.

    window    of 3: a token sees itself and the two tokens before it (Longformer, https://arxiv.org/abs/2004.05150)
    softcap   of 50: a score s becomes 50 * tanh(s / 50), which stays below 50 (Gemma 2, https://arxiv.org/abs/2408.00118)

    position      0 1 2 3 4
    0             x
    1             x x
    2             x x x            with a window of 3
    3               x x x
    4                 x x x

Used by the PyTorch definition in `attention.py`; the fast backends do the same in their kernels.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class AttentionOptions:
    """How one layer attends."""

    scale: float | None = None
    """Factor on the scores q k^T; None is 1 / sqrt(head_dim)."""
    window: int | None = None
    """Tokens that a token sees, itself included; None is all of them."""
    softcap: float | None = None
    """Bound of the scaled scores; None is no bound."""


PLAIN = AttentionOptions()


def first_visible(position: int, window: int | None) -> int:
    """The first position that the token at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def is_visible(positions: torch.Tensor, others: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether the tokens at `positions` see those at `others`, both int tensors, broadcast against each other."""
    is_seen = others <= positions
    return is_seen if window is None else is_seen & (others > positions - window)


def weigh(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_seen: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """softmax(scores) v. q: [..., n, head_dim]; k, v: [..., len, head_dim]; is_seen: [..., n, len] bool -> as q"""
    if options.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=is_seen, scale=options.scale)
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = options.softcap * torch.tanh((q @ k.transpose(-1, -2)).float() * (scale / options.softcap))
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)  # [..., n, len] float32
    return weights.to(q.dtype) @ v
