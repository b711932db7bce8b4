"""The flash-attn library (Dao 2023, https://arxiv.org/abs/2307.08691) as an attention backend on CUDA."""

import torch

from nanovllm.batch import Batch
from nanovllm.kernels import is_installed
from nanovllm.layers.attention import AttentionBackend


class FlashAttention(AttentionBackend):
    """flash-attn 2: a decode kernel that splits long contexts, and a variable-length kernel for prefill chunks.

    A mixed batch is two calls, not one: split-KV and the packing of grouped heads apply only where every sequence
    has one query token.
    """

    default_block_size = 256
    block_size_multiple = 256
    instructions = "flash-attn"

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype = torch.bfloat16,
        kv_cache_dtype: str = "auto",
    ) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim, block_size, dtype)
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._decode, self._prefill = flash_attn_with_kvcache, flash_attn_varlen_func

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return f"it needs a CUDA device and float16 or bfloat16, got {device} and {dtype}"
        if head_dim % 8 or head_dim > 256:
            return f"the model's head_dim must be a multiple of 8 up to 256, it is {head_dim}"
        if block_size is not None and block_size % cls.block_size_multiple:
            return f"block_size must be a multiple of {cls.block_size_multiple}, got {block_size}"
        if not is_installed("flash_attn"):
            return "it needs the package flash-attn: pip install nanovllm[cuda]"
        return None

    def attend(self, q: torch.Tensor, layer_cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        k_cache, v_cache = layer_cache  # [num_blocks, block_size, num_kv_heads, head_dim] each
        nd = batch.num_decodes
        out = torch.empty_like(q)
        if nd:
            decodes = self._decode(
                q[:nd, None],  # [num_decodes, 1, num_heads, head_dim]
                k_cache,
                v_cache,
                cache_seqlens=batch.seq_lens[:nd],
                block_table=batch.block_tables[:nd],
                softmax_scale=self.scale,
                causal=True,
            )
            out[:nd] = decodes[:, 0]
        if batch.max_seqlen_q:
            out[nd:] = self._prefill(
                q[nd:],
                k_cache,
                v_cache,
                cu_seqlens_q=batch.prefill_cu_seqlens_q,
                cu_seqlens_k=batch.prefill_cu_seqlens_k,
                max_seqlen_q=batch.max_seqlen_q,
                max_seqlen_k=batch.max_seqlen_k,
                softmax_scale=self.scale,
                causal=True,  # aligned at the ends: the last query sees all keys, also where the chunk is not the first
                block_table=batch.block_tables[nd:],
            )
        return out
