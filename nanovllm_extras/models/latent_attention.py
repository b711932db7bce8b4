"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): a cache of one latent for each token.

K and V of all heads are computed from the latent, so only the latent is kept, beside one rotated key that all heads
share. To read the cache, K and V are never computed: with K = W_k c and V = W_v c for a cached latent c,

    q · (W_k c)  =  (W_k^T q) · c           the query takes up W_k: `UpProjection.absorb`
    Σ p (W_v c)  =  W_v (Σ p c)             W_v comes after the sum: `UpProjection.values`

so each head attends to the latents themselves. This is attention with one K and V head, whose values are the first
`rank` channels of its keys:

    key      [ c: rank channels | rotated key: rope_dim channels ]       what a slot holds
    value    [ c ]

Chunks of prefill are computed in the same way as decodes, not with K and V of each head: this takes more arithmetic for
long prompts, but no memory for K and V, and one token has the same bits in every batch.
"""

import torch
from torch import nn


class UpProjection(nn.Module):
    """W_k and W_v of all heads, in the checkpoint one matrix `kv_b_proj`: of each head the rows of W_k, then of W_v."""

    def __init__(self, num_heads: int, key_dim: int, value_dim: int, rank: int) -> None:
        super().__init__()
        self.num_heads, self.key_dim, self.value_dim, self.rank = num_heads, key_dim, value_dim, rank
        self.weight = nn.Parameter(torch.empty(num_heads * (key_dim + value_dim), rank))

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return W_k: [num_heads, key_dim, rank] and W_v: [num_heads, value_dim, rank], views of the weight."""
        heads = self.weight.view(self.num_heads, self.key_dim + self.value_dim, self.rank)
        return heads[:, : self.key_dim], heads[:, self.key_dim :]

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Multiply q: [num_tokens, num_heads, key_dim] -> W_k^T q: [num_tokens, num_heads, rank]"""
        return torch.einsum("nhk,hkr->nhr", q, self.parts()[0])

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        """Multiply latents: [num_tokens, num_heads, rank] by W_v -> [num_tokens, num_heads, value_dim]"""
        return torch.einsum("nhr,hvr->nhv", latents, self.parts()[1])


def deinterleave(x: torch.Tensor) -> torch.Tensor:
    """Move DeepSeek's pairs (0, 1), (2, 3), … to the pairs (0, size/2), … that `Rotary` rotates: [..., size] -> as x

    Queries and keys are reordered alike, so their products stay the same.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
