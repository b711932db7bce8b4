"""flash-attn 2 over block tables (Dao 2023, https://arxiv.org/abs/2307.08691): one call for the decodes of a batch, one
for its prefill chunks.

Decodes come first in a batch, so each call takes a slice of it. The new tokens' K and V are stored before
(`TorchAttention.store_kv`), so the library only reads the cache. The first function splits long contexts among the
GPU's processors, and the second one computes tiles of many queries.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from nanovllm.layers.attention import AttentionMetadata, TorchAttention


class FlashAttention(TorchAttention):
    """The attention backend for CUDA. K and V have the same layout as in PyTorch's."""

    default_block_size = 256  # the library requires a multiple of it
    supports_graphs = True

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        """Return the reason why the library cannot be used here for such a model, or None if it can."""
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return f"it needs a CUDA device and float16 or bfloat16, got {device} and {dtype}"
        if head_dim % 8 or head_dim > 256:
            return f"the model's head_dim must be a multiple of 8 up to 256, it is {head_dim}"
        if block_size is not None and block_size % 256:
            return f"block_size must be a multiple of 256, got {block_size}"
        return None if find_spec("flash_attn") else "the package flash-attn is not installed"

    def attend(self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:  # type: ignore[override]
        """Attend from each new token to its own and earlier positions: q [num_tokens, num_heads, head_dim] -> as q

        layer_cache: [2, num_blocks, block_size, num_kv_heads, head_dim]
        """
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        k_cache, v_cache = layer_cache
        out = torch.empty_like(q)
        n = metadata.num_decodes
        if n:
            out[:n] = flash_attn_with_kvcache(
                q[:n, None],  # [num_decodes, 1, num_heads, head_dim]: one new token of each sequence
                k_cache,
                v_cache,
                cache_seqlens=metadata.seq_lens[:n],  # how many tokens each sequence reads
                block_table=metadata.block_tables[:n],  # and where they are
                causal=True,
            )[:, 0]
        if metadata.max_seqlen_q:
            out[n:] = flash_attn_varlen_func(
                q[n:],  # all chunks end to end
                k_cache,
                v_cache,
                cu_seqlens_q=metadata.prefill_cu_seqlens_q,  # where each chunk begins in q
                cu_seqlens_k=metadata.prefill_cu_seqlens_k,  # running sums of the tokens that each one reads
                max_seqlen_q=metadata.max_seqlen_q,
                max_seqlen_k=metadata.max_seqlen_k,
                block_table=metadata.block_tables[n:],
                causal=True,  # aligned at the ends: the last query sees all keys, also those of earlier chunks
            )
        return out
