"""`kv_cache_dtype="int8"`: K and V in 8 bits, with a scale for each token and head. The definition, in PyTorch.

A slot holds, for each head, `head_dim` whole numbers and the 4 bytes of their scale in float32:

    k ≈ scale · q        q in −127 … 127; the largest magnitude of the vector becomes 127, ties round to even

Nothing is dequantised to be multiplied: both products of attention are sums of whole numbers. For them a query is
rounded to 16 bits, with one scale, and so are the weights of each 16 tokens:

    score    = scale of the query · scale of k · Σ query's number · k's number       over head_dim
    weight   = softmax(scores) · scale of v
    out      = Σ scale of 16 weights · Σ weight's number · v's number                over tokens

Compared with the 8 bits of K and V, 16 bits cost very little. Sums of whole numbers are exact in any order, so a token
has the same bits in every batch and every chunk. `nanovllm_extras/kernels/cpu/int8_kv.c` does the same arithmetic.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.models.masking import PLAIN, AttentionOptions, scaled, softmax_with_sinks

MOST = 127  # of a K or V
MOST_OF_16_BITS = 32_767  # of a query or weight
TOKENS = 16  # whose weights share a scale
SCALE_BYTES = 4
SMALLEST = 1e-30  # a vector whose magnitudes are all below is zero: MOST / x could be infinite
SCORES = 1 << 24  # in memory at a time


def with_int8_cache(backend_class: type[Any]) -> type[Any]:
    """Return `backend_class` with a cache in which each vector is followed by its scale, in one row of bytes."""

    class Int8Attention(backend_class):
        def kv_cache_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
            *shape, head_dim = super().kv_cache_shape(num_layers, num_blocks)
            return (*shape, head_dim + SCALE_BYTES)

        def store_kv(self, k: Tensor, v: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
            super().store_kv(to_bytes(k), to_bytes(v), layer_cache, slot_mapping)

        def attend(
            self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata, options: AttentionOptions = PLAIN
        ) -> Tensor:
            used, tables = metadata.block_tables.unique(return_inverse=True)  # [num_used], [num_seqs, max_num_blocks]
            read = from_bytes(layer_cache[:, used])  # [2, num_used, block_size, num_kv_heads, head_dim + 1]
            rows = torch.cat(rounded(q, MOST_OF_16_BITS), dim=-1)  # [num_tokens, num_heads, head_dim + 1]
            metadata = replace(metadata, block_tables=tables.int())
            return super().attend(rows, read, metadata, WeighIn16Bits(options))[..., :-1].to(q.dtype)

    return Int8Attention


def rounded(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Round x: [..., size] -> whole numbers in −most … most: [..., size], and scales: [..., 1]; both float32"""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)  # NaN if one is
    inverse = torch.where(largest >= SMALLEST, torch.full_like(largest, most) / largest, 0)
    return (x * inverse).round(), largest / most


def to_bytes(x: Tensor) -> Tensor:
    """Pack vectors: [num_tokens, num_kv_heads, head_dim] -> [num_tokens, num_kv_heads, head_dim + 4] int8"""
    numbers, scale = rounded(x, MOST)  # of a vector with a NaN the scale is NaN
    return torch.cat((numbers.nan_to_num().to(torch.int8), scale.view(torch.int8)), dim=-1)


def from_bytes(rows: Tensor) -> Tensor:
    """Unpack rows: [..., head_dim + 4] int8 -> [..., head_dim + 1] float32: whole numbers, and last their scale"""
    numbers, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].contiguous()
    return torch.cat((numbers.float(), scale.view(torch.float32)), dim=-1)


class WeighIn16Bits:
    """Replaces `softmax_attention`, for vectors whose last number is the scale of the others."""

    def __init__(self, options: AttentionOptions) -> None:
        self.options = options

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor) -> Tensor:
        """Attend. q: [num_seqs, num_heads, n, head_dim + 1]; k, v: [num_seqs, num_kv_heads, len, head_dim + 1] -> as q

        is_seen: [num_seqs, 1, n, len]. The last channel of the result is 1.
        """
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if self.options.window is not None:
            first = is_seen.sum(-1, keepdim=True) - self.options.window  # [..., n, 1]
            is_seen = is_seen & (torch.arange(is_seen.shape[-1], device=q.device) >= first)
        is_seen = is_seen.expand(*is_seen.shape[:-2], q.shape[-2], -1)
        step = max(1, SCORES // (q[..., :1, 0].numel() * k.shape[-2]))  # rows at a time
        parts = zip(q.split(step, dim=-2), is_seen.split(step, dim=-2), strict=True)
        return torch.cat([self.weigh(rows, k, v, seen) for rows, seen in parts], dim=-2)

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor) -> Tensor:
        sums = q[..., :-1].double() @ k[..., :-1].double().transpose(-1, -2)  # exact, [..., n, len]
        scores = sums.float() * (k[..., -1:].transpose(-1, -2) * q[..., -1:])
        scale = (q.shape[-1] - 1) ** -0.5 if self.options.scale is None else self.options.scale
        scores = scaled(scores, scale, self.options.softcap).masked_fill(~is_seen, -torch.inf)
        weights = softmax_with_sinks(scores, self.options.sinks) * v[..., -1:].transpose(-1, -2)
        weights = weights.masked_fill(~is_seen, 0)  # the scale of an unseen V may be NaN
        out = in_16_bits(weights).double() @ v[..., :-1].double()  # [..., n, head_dim]
        return torch.cat((out.float(), torch.ones_like(q[..., -1:])), dim=-1)


def in_16_bits(weights: Tensor) -> Tensor:
    """Round weights: [..., len] by groups of 16 -> the same shape"""
    size = weights.shape[-1]
    groups = torch.nn.functional.pad(weights, (0, -size % TOKENS)).unflatten(-1, (-1, TOKENS))
    numbers, scale = rounded(groups, MOST_OF_16_BITS)
    return (numbers.double() * scale.double()).flatten(-2)[..., :size]
