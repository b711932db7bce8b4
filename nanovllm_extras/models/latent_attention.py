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

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.int8_kv import SCALE_BYTES, from_bytes, to_bytes
from nanovllm_extras.kernels.backend import AttentionBackend


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


class TorchLatentAttention(AttentionBackend):
    """The definition: a cache of one part, in which K and V are the same memory.

    `head_dim` counts the channels of a slot, `rank` those that are values; `num_kv_heads` is 1.
    """

    def __init__(self, *args: Any, rank: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.num_kv_heads == 1
        self.rank = rank

    def kv_cache_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        return (1, num_layers, num_blocks, self.block_size, 1, self.head_dim)

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, layer_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store k: [num_tokens, 1, head_dim]. `v` is a view of it, so it is not stored."""
        layer_cache[0].flatten(0, 1)[slot_mapping] = k

    def attend(
        self, q: torch.Tensor, layer_cache: torch.Tensor, metadata: AttentionMetadata, *options: Any
    ) -> torch.Tensor:
        """Attend with q: [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads, rank]"""
        kv = layer_cache.expand(2, *layer_cache.shape[1:])  # no copy
        return super().attend(q, kv, metadata, *options)[..., : self.rank]


class Int8LatentAttention(TorchLatentAttention):
    """A cache of 8 bits (`kv_cache_dtype="int8"`), which is widened to be read, block by block.

    The latent and the rotated key have a scale each: only the latent is normalised, so their magnitudes differ.
    """

    @property
    def sizes(self) -> tuple[int, int]:
        return self.rank, self.head_dim - self.rank

    def kv_cache_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        *shape, head_dim = super().kv_cache_shape(num_layers, num_blocks)
        return (*shape, head_dim + 2 * SCALE_BYTES)

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, layer_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        rows = torch.cat([to_bytes(part) for part in k.split(self.sizes, -1)], -1)
        super().store_kv(rows, rows, layer_cache, slot_mapping)

    def attend(
        self, q: torch.Tensor, layer_cache: torch.Tensor, metadata: AttentionMetadata, *options: Any
    ) -> torch.Tensor:
        used, tables = metadata.block_tables.unique(return_inverse=True)  # [num_used], [num_seqs, max_num_blocks]
        parts = layer_cache[:, used].split([size + SCALE_BYTES for size in self.sizes], -1)
        numbers = [from_bytes(part) for part in parts]  # each with its scale last
        read = torch.cat([part[..., :-1] * part[..., -1:] for part in numbers], -1).to(q.dtype)
        return super().attend(q, read, replace(metadata, block_tables=tables.int()), *options)
