"""Attention to cached latents (`models/latent_attention.py`), in PyTorch: the definition, and a cache of 8 bits."""

from dataclasses import replace
from typing import Any

import torch

from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.kernels.backend import AttentionBackend
from nanovllm_extras.kernels.int8_kv import SCALE_BYTES, from_bytes, to_bytes
from nanovllm_extras.models.masking import AttentionOptions


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
        self, q: torch.Tensor, layer_cache: torch.Tensor, metadata: AttentionMetadata, *options: AttentionOptions
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
        self, q: torch.Tensor, layer_cache: torch.Tensor, metadata: AttentionMetadata, *options: AttentionOptions
    ) -> torch.Tensor:
        used, tables = metadata.block_tables.unique(return_inverse=True)  # [num_used], [num_seqs, max_num_blocks]
        parts = layer_cache[:, used].split([size + SCALE_BYTES for size in self.sizes], -1)
        numbers = [from_bytes(part) for part in parts]  # each with its scale last
        read = torch.cat([part[..., :-1] * part[..., -1:] for part in numbers], -1).to(q.dtype)
        return super().attend(q, read, replace(metadata, block_tables=tables.int()), *options)
