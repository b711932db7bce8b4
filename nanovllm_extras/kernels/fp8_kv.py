"""`kv_cache_dtype="fp8"` with PyTorch's attention: K and V in 8-bit floats, e4m3 (4 bits of exponent, 3 of mantissa).

An fp8 cache holds twice the tokens. Arithmetic stays in the model's dtype: what a step reads is widened first. The
kernels for CUDA have an fp8 cache of their own, and are tested against this one.
"""

from dataclasses import replace
from typing import Any

import torch

from nanovllm.layers.attention import AttentionMetadata


def with_fp8_cache(backend_class: type[Any]) -> type[Any]:
    """Return `backend_class` with a cache in fp8. PyTorch cannot index fp8, so the cache is indexed as bytes."""

    class Fp8Attention(backend_class):
        def store_kv(
            self, k: torch.Tensor, v: torch.Tensor, layer_cache: torch.Tensor, slot_mapping: torch.Tensor
        ) -> None:
            k_bytes, v_bytes = to_fp8(k).view(torch.uint8), to_fp8(v).view(torch.uint8)
            super().store_kv(k_bytes, v_bytes, layer_cache.view(torch.uint8), slot_mapping)

        def attend(
            self, q: torch.Tensor, layer_cache: torch.Tensor, metadata: AttentionMetadata, *options: Any
        ) -> torch.Tensor:
            used, tables = metadata.block_tables.unique(return_inverse=True)  # [num_used], [num_seqs, max_num_blocks]
            read = layer_cache.view(torch.uint8)[:, used].view(torch.float8_e4m3fn).to(q.dtype)
            return super().attend(q, read, replace(metadata, block_tables=tables.int()), *options)

    return Fp8Attention


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Convert to e4m3, clamped to its largest number. A larger value would become NaN and reach all later tokens."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-limit, limit).to(torch.float8_e4m3fn)
