"""Paged attention: the one layer through which tokens see each other, and the only reader and writer of the KV cache.

`Attention` is the layer. It calls a backend, which owns the shape of the cache, stores K and V in it, and attends:

- `TorchAttention` runs anywhere, and is the readable definition that every other backend is tested against;
- `FlashAttention` calls the flash-attn library on CUDA (Dao 2023, https://arxiv.org/abs/2307.08691);
- `TritonAttention`, in `nanovllm/kernels`, has kernels of its own.

All store the K and V of the whole batch before anything attends: a sequence may share blocks that another sequence of
the same step fills. Which token goes where is decided in `batch.py`; `select_backend` is called by the engine, once.
"""

import importlib.util
import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.batch import Batch

GATHERED_ELEMENTS = 1 << 20  # of K and V that are gathered at a time on CPU: what its L2 cache holds


class AttentionBackend(ABC):
    """`num_kv_heads` divides `num_heads`: a group of query heads shares one K and V head (GQA, https://arxiv.org/abs/2305.13245)."""

    default_block_size: int
    supports_fp8_kv_cache = False  # such a backend takes kv_cache_dtype="fp8"
    kv_cache_dtype: torch.dtype | None = None  # the model's own

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.scale = 1 / math.sqrt(head_dim)

    def kv_cache_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """Begins with [2, num_layers, num_blocks] in every backend, so that others can copy whole blocks."""
        return (2, num_layers, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, layer_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """k, v: [num_tokens, num_kv_heads, head_dim], written to the slots slot_mapping: [num_tokens]"""
        k_slots, v_slots = layer_cache.view(
            2, -1, self.num_kv_heads, self.head_dim
        )  # [num_slots, num_kv_heads, head_dim]
        k_slots[slot_mapping] = k
        v_slots[slot_mapping] = v

    @abstractmethod
    def attend(self, q: torch.Tensor, layer_cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        """q: [num_tokens, num_heads, head_dim] over layer_cache: kv_cache[:, layer] -> as q

        Each new token attends to its sequence's tokens up to itself, all of which are in the cache by now.
        """


class TorchAttention(AttentionBackend):
    """Gather K and V through the block tables, then attend. Any device, dtype and block size."""

    default_block_size = 16

    def attend(self, q: torch.Tensor, layer_cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        out = torch.empty_like(q)
        nd = batch.num_decodes
        cu_seqlens, seq_lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
        elements = 2 * max(seq_lens) * self.num_kv_heads * self.head_dim  # of one sequence's K and V
        num_at_once = nd if q.is_cuda else max(1, GATHERED_ELEMENTS // elements)
        for i in range(0, nd, num_at_once or 1):
            rows = slice(i, min(i + num_at_once, nd))
            tables, max_len = batch.block_tables[rows], max(seq_lens[rows])
            out[rows] = self._attend_decodes(q[rows], layer_cache, tables, batch.seq_lens[rows], max_len)
        for i in range(nd, len(seq_lens)):
            rows = slice(cu_seqlens[i], cu_seqlens[i + 1])
            out[rows] = self._attend_chunk(q[rows], layer_cache, batch.block_tables[i], seq_lens[i])
        return out

    def _attend_chunk(
        self, q: torch.Tensor, layer_cache: torch.Tensor, block_table: torch.Tensor, seq_len: int
    ) -> torch.Tensor:
        """The last q.shape[0] of `seq_len` tokens of one sequence: paged attention in five steps."""
        n, group = q.shape[0], self.num_heads // self.num_kv_heads
        # 1. look up the blocks, and cut off what lies behind the last token
        num_blocks = -(-seq_len // self.block_size)
        kv = layer_cache[:, block_table[:num_blocks]]  # [2, num_blocks, block_size, num_kv_heads, head_dim]
        k, v = kv.flatten(1, 2)[:, :seq_len].transpose(1, 2)  # [num_kv_heads, seq_len, head_dim] each
        # 2. lay the query heads that share a K and V head below each other
        q = q.view(n, self.num_kv_heads, group, self.head_dim).permute(1, 2, 0, 3)  # [num_kv_heads, group, n, head_dim]
        q = q.reshape(self.num_kv_heads, group * n, self.head_dim)
        # 3. a token sees what is not behind it; its position is seq_len - n + its row
        positions = torch.arange(seq_len, device=q.device)
        mask = positions <= positions[seq_len - n :, None]  # [n, seq_len]
        # 4. softmax(q k^T / sqrt(head_dim) + mask) v
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.repeat(group, 1), scale=self.scale)
        # 5. back to one row a token
        return o.view(self.num_kv_heads, group, n, self.head_dim).permute(2, 0, 1, 3).reshape(n, -1, self.head_dim)

    def _attend_decodes(
        self,
        q: torch.Tensor,
        layer_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_len: int,
    ) -> torch.Tensor:
        """One new token each of several sequences, as one padded batch. q: [num_decodes, num_heads, head_dim]"""
        n, num_blocks = q.shape[0], -(-max_len // self.block_size)
        kv = layer_cache[:, block_tables[:, :num_blocks]].flatten(2, 3)[:, :, :max_len]
        is_padding = torch.arange(max_len, device=q.device) >= seq_lens[:, None]  # [n, max_len]
        mask = None
        if n > 1:  # one sequence alone has no padding; `kv` is a copy, so the cache itself is not touched
            kv.masked_fill_(is_padding[None, :, :, None, None], 0)  # a NaN behind the end must not reach anybody
            mask = ~is_padding[:, None, None]  # [n, 1, 1, max_len]
        k, v = kv.transpose(2, 3)  # [n, num_kv_heads, max_len, head_dim] each
        # the heads of a group are rows of one K and V head; no mask among them: they see the same
        q = q.view(n, self.num_kv_heads, -1, self.head_dim)  # [n, num_kv_heads, group, head_dim]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale).reshape(n, -1, self.head_dim)


class FlashAttention(AttentionBackend):
    """flash-attn 2: a decode kernel that splits long contexts, and a variable-length kernel for prefill chunks.

    A mixed batch is two calls, not one: split-KV and the packing of grouped heads apply only where every sequence
    has one query token.
    """

    default_block_size = 256
    block_size_multiple = 256

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim, block_size)
        if block_size % self.block_size_multiple:
            raise ValueError(
                f"block_size must be a multiple of {self.block_size_multiple} for attention_backend='flash_attn', "
                f"got {block_size}; leave block_size=None, or take attention_backend='torch'"
            )
        if head_dim % 8 or head_dim > 256:
            raise ValueError(f"flash_attn takes a head_dim that is a multiple of 8 up to 256, the model has {head_dim}")
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._decode, self._prefill = flash_attn_with_kvcache, flash_attn_varlen_func

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


class Attention(nn.Module):
    """Stores the new tokens' K and V of one layer, and attends to all of them."""

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__()
        self.backend = backend

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim] -> as q"""
        self.backend.store_kv(k, v, layer_cache, batch.slot_mapping)
        return self.backend.attend(q, layer_cache, batch)


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int = 128, kv_cache_dtype: str = "auto"
) -> type[AttentionBackend]:
    """The backend called `name`, or the best that runs here for `auto`."""
    is_fp8 = kv_cache_dtype == "fp8"
    if is_fp8 and name not in ("auto", "triton"):
        raise ValueError(f"kv_cache_dtype='fp8' needs attention_backend='triton', got {name!r}; take 'auto' for one")
    has_flash_attn = importlib.util.find_spec("flash_attn") is not None
    can_flash = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if name == "triton" or (name == "auto" and (is_fp8 or (can_flash and not has_flash_attn))):
        from nanovllm.kernels import why_not_triton  # an add-on: imported only where it is wanted

        reason = why_not_triton(device, head_dim)
        if reason is None:
            from nanovllm.kernels.triton_attention import TritonAttention

            return TritonAttention
        if name == "triton" or is_fp8:
            wish = "attention_backend='triton'" if name == "triton" else "kv_cache_dtype='fp8' (attention in Triton)"
            raise ValueError(f"{wish} {reason}; take attention_backend='torch' and kv_cache_dtype='auto'")
    if name == "torch" or (name == "auto" and not (can_flash and has_flash_attn)):
        return TorchAttention
    if not can_flash:
        raise ValueError(
            f"attention_backend='flash_attn' needs a CUDA device and float16 or bfloat16, got {device} and {dtype}; "
            "take attention_backend='torch'"
        )
    if not has_flash_attn:
        raise ValueError("attention_backend='flash_attn' needs the package flash-attn: pip install nanovllm[cuda]")
    return FlashAttention
