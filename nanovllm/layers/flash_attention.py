"""flash-attn 2 over block tables (Dao 2023, https://arxiv.org/abs/2307.08691): one call for the decodes of a batch, one
for its prefill chunks.

Decodes come first in a batch, so each call takes a slice of it. The new tokens' K and V are stored before
(`TorchAttention.store_kv`), so the library only reads the cache. The first function splits long contexts among the
GPU's processors, and the second one computes tiles of many queries.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.layers.attention import AttentionMetadata, LoadedModel, TorchAttention

logger = logging.getLogger(__name__)


class FlashAttention(TorchAttention):
    """The attention backend for CUDA. K and V have the same layout as in PyTorch's."""

    default_block_size = 256  # the library requires a multiple of it
    supports_graphs = True
    store: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None
    """Writes K and V instead of PyTorch's two operations."""

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        """Return the reason why the library cannot be used here for such a model, or None if it can."""
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return f"it needs a CUDA device and float16 or bfloat16, got {device} and {dtype}"
        if head_dim % 8 or head_dim > 256:
            return f"the model's head_dim must be a multiple of 8 up to 256, it is {head_dim}"
        if block_size is not None and block_size % 256:
            return f"block_size must be a multiple of 256, got {block_size}"
        try:
            import flash_attn  # noqa: F401
        except ImportError as error:  # not installed, or built for another torch
            return f"the package flash-attn cannot be imported: {error}"
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"flash-attn needs a GPU of compute capability 8.0 (Ampere) or later, this one has {capability}"
        return None

    def replace_layers(self, loaded: LoadedModel) -> None:
        """Replace layers by Triton's, which take fewer launches, if Triton works and PyTorch's are not asked for."""
        if loaded.enforce_eager or loaded.device.type != "cuda":
            return
        try:
            from nanovllm.layers import triton_layers

            triton_layers.silu_and_mul(*torch.zeros(2, 1, 16, dtype=loaded.dtype, device=loaded.device))
        except Exception as error:  # Triton, a C compiler or Python's headers are missing
            logger.warning("PyTorch's layers compute, which take many launches: Triton does not work: %s", error)
            return
        triton_layers.replace_layers(loaded.model)
        self.store = triton_layers.store_kv

    def store_kv(self, k: Tensor, v: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        (self.store or super().store_kv)(k, v, layer_cache, slot_mapping)

    def attend(self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:  # type: ignore[override]
        """Attend from each new token to its own and earlier positions: q [num_tokens, num_heads, head_dim] -> as q

        layer_cache: [2, num_blocks, block_size, num_kv_heads, head_dim]
        """
        n = metadata.num_decodes
        if n == len(q):
            return self.decode(q, layer_cache, metadata)
        if n == 0:
            return self.prefill(q, layer_cache, metadata)
        return torch.cat((self.decode(q[:n], layer_cache, metadata), self.prefill(q[n:], layer_cache, metadata)))

    def decode(self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Attend from one new token of each decode: q [num_decodes, num_heads, head_dim] -> as q"""
        from flash_attn import flash_attn_with_kvcache

        n = len(q)
        out = flash_attn_with_kvcache(
            q[:, None],  # [num_decodes, 1, num_heads, head_dim]: one new token of each sequence
            *layer_cache,  # K and V
            cache_seqlens=metadata.seq_lens[:n],  # how many tokens each sequence reads
            block_table=metadata.block_tables[:n],  # and where they are
            causal=True,
        )
        return out[:, 0]

    def prefill(self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Attend from all chunks, which are end to end: q [num_prefill_tokens, num_heads, head_dim] -> as q"""
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q,
            *layer_cache,  # K and V
            cu_seqlens_q=metadata.prefill_cu_seqlens_q,  # where each chunk begins in q
            cu_seqlens_k=metadata.prefill_cu_seqlens_k,  # running sums of the tokens that each one reads
            max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_seqlen_k,
            block_table=metadata.block_tables[metadata.num_decodes :],
            causal=True,  # aligned at the ends: the last query sees all keys, also those of earlier chunks
        )
