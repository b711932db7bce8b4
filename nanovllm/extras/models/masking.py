"""Which tokens does a token see, and how do scores become weights? What layers of one model may do differently.

    window    of 3: a token sees itself and the two tokens before it (Longformer, https://arxiv.org/abs/2004.05150)
    softcap   of 50: a score s becomes 50 * tanh(s / 50), which stays below 50 (Gemma 2, https://arxiv.org/abs/2408.00118)

    position      0 1 2 3 4
    0             x
    1             x x
    2             x x x            with a window of 3
    3               x x x
    4                 x x x

A layer hands its `AttentionOptions` to the backend. PyTorch's attention calls them in the place of
`F.scaled_dot_product_attention`; the fast backends read them, and do the same in their kernels.
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

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_seen: torch.Tensor) -> torch.Tensor:
        """softmax(scores) v. q: [..., n, head_dim]; k, v: [..., len, head_dim] -> as q

        is_seen: [..., n, len] bool, in each row the positions up to the token's own
        """
        if self.window is not None:
            first = is_seen.sum(-1, keepdim=True) - self.window  # [..., n, 1]
            is_seen = is_seen & (torch.arange(is_seen.shape[-1], device=q.device) >= first)
            # blocks behind the window have been given back: a NaN in what stands there must reach no output
            is_unseen = ~is_seen.any(-2)[..., None]  # [..., len, 1]
            k, v = k.masked_fill(is_unseen, 0), v.masked_fill(is_unseen, 0)
        if self.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=is_seen, scale=self.scale)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = self.softcap * torch.tanh((q @ k.transpose(-1, -2)).float() * (scale / self.softcap))
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)  # [..., n, len] float32
        return weights.to(q.dtype) @ v


PLAIN = AttentionOptions()
