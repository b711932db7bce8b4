"""Paged attention: the one layer through which tokens see each other, by reading each other's K and V in the cache.

`Attention` is the layer. It calls a backend, which owns the shape of the cache, stores K and V in it, and attends:

- `TorchAttention` runs anywhere, and is the readable definition that every other backend is tested against;
- `kernels/` holds the fast ones: `flash_attn` and `triton` on CUDA, `cpu`.

All store the K and V of the whole batch before anything attends: a sequence may share blocks that another sequence of
the same step fills. Which token goes where is decided in `batch.py`; `select_backend` is called by `startup.py`, once.
"""

import importlib
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
    instructions = "PyTorch"  # what computes, in a word for the log
    supports_graphs = True  # for decodes, the host decides nothing by what only the device knows

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        self.kv_cache_dtype = torch.float8_e4m3fn if kv_cache_dtype == "fp8" else None  # None: the model's
        self.scale = 1 / math.sqrt(head_dim)

    @classmethod
    @abstractmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        """Why this backend cannot serve such a model on this machine; None if it can. `block_size` may be open."""

    @classmethod
    def why_no_fp8_kv_cache(cls) -> str | None:
        """As `why_not`, of `kv_cache_dtype="fp8"`."""
        return "it has no fp8 KV cache"

    @classmethod
    def why_slow(cls, device: torch.device, dtype: torch.dtype, kv_cache_dtype: str) -> str | None:
        """Why `auto` passes this backend by although it could serve; None if it does not."""
        return None

    def kv_cache_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """Begins with [2, num_layers, num_blocks] in every backend, so that others can copy whole blocks."""
        return (2, num_layers, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, layer_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """k, v: [num_tokens, num_kv_heads, head_dim], written to the slots slot_mapping: [num_tokens]"""
        k_slots, v_slots = layer_cache.view(2, -1, self.num_kv_heads, self.head_dim)
        k_slots[slot_mapping] = k  # k_slots, v_slots: [num_slots, num_kv_heads, head_dim]
        v_slots[slot_mapping] = v

    def replace_layers(self, model: nn.Module) -> None:  # noqa: B027 (most have none)
        """Put faster twins, where this backend comes with some, in the places of the model's other layers."""

    @abstractmethod
    def attend(self, q: torch.Tensor, layer_cache: torch.Tensor, batch: Batch) -> torch.Tensor:
        """q: [num_tokens, num_heads, head_dim] over layer_cache: kv_cache[:, layer] -> as q

        Each new token attends to its sequence's tokens up to itself, all of which are in the cache by now.
        """


class TorchAttention(AttentionBackend):
    """Gather K and V through the block tables, then attend. Any device, dtype and block size.

    An fp8 cache holds them in 8 bits (e4m3: 4 bits of exponent, 3 of mantissa); arithmetic is in the model's dtype.
    """

    default_block_size = 16
    supports_graphs = False

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        return None

    @classmethod
    def why_no_fp8_kv_cache(cls) -> str | None:
        return None

    @classmethod
    def why_slow(cls, device: torch.device, dtype: torch.dtype, kv_cache_dtype: str) -> str | None:
        is_slow = device.type == "cuda" and kv_cache_dtype == "fp8"
        return "there it is for comparisons, and slow" if is_slow else None

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, layer_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if self.kv_cache_dtype is not None:
            k, v = to_fp8(k).view(torch.uint8), to_fp8(v).view(torch.uint8)  # bytes, which any device can move
            layer_cache = layer_cache.view(torch.uint8)
        super().store_kv(k, v, layer_cache, slot_mapping)

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
        kv = self._gather(layer_cache, block_table[:num_blocks])  # [2, num_blocks, block_size, num_kv_heads, head_dim]
        k, v = kv.flatten(1, 2)[:, :seq_len].transpose(1, 2)  # [num_kv_heads, seq_len, head_dim] each
        # 2. the query heads of a group share a K and V head, which each of them sees through a view
        q = q.view(n, self.num_kv_heads, group, self.head_dim).permute(1, 2, 0, 3)  # [num_kv_heads, group, n, head_dim]
        k, v = k[:, None].expand(-1, group, -1, -1), v[:, None].expand(-1, group, -1, -1)
        # 3. a token sees what is not behind it; its position is seq_len - n + its row
        positions = torch.arange(seq_len, device=q.device)
        mask = positions <= positions[seq_len - n :, None]  # [n, seq_len]
        # 4. softmax(q k^T / sqrt(head_dim) + mask) v; of less than four dimensions PyTorch would keep all of q k^T
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        # 5. back to one row a token
        return o.permute(2, 0, 1, 3).reshape(n, -1, self.head_dim)

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
        kv = self._gather(layer_cache, block_tables[:, :num_blocks]).flatten(2, 3)[:, :, :max_len]
        is_padding = torch.arange(max_len, device=q.device) >= seq_lens[:, None]  # [n, max_len]
        mask = None
        if n > 1:  # one sequence alone has no padding; `kv` is a copy, so the cache itself is not touched
            kv.masked_fill_(is_padding[None, :, :, None, None], 0)  # a NaN behind the end must not reach anybody
            mask = ~is_padding[:, None, None]  # [n, 1, 1, max_len]
        k, v = kv.transpose(2, 3)  # [n, num_kv_heads, max_len, head_dim] each
        # the heads of a group are rows of one K and V head; no mask among them: they see the same
        q = q.view(n, self.num_kv_heads, -1, self.head_dim)  # [n, num_kv_heads, group, head_dim]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale).reshape(n, -1, self.head_dim)

    def _gather(self, layer_cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """A copy, in the model's dtype: [2, *blocks.shape, block_size, num_kv_heads, head_dim]"""
        if self.kv_cache_dtype is None:
            return layer_cache[:, blocks]
        return layer_cache.view(torch.uint8)[:, blocks].view(self.kv_cache_dtype).to(self.dtype)


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """In e4m3; what is beyond its largest number becomes that: as NaN it would spread to every later token."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-limit, limit).to(torch.float8_e4m3fn)


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


BACKENDS = {  # best first; a module is imported when its turn comes
    "flash_attn": "nanovllm.kernels.flash_attention.FlashAttention",
    "cpu": "nanovllm.kernels.cpu.CpuAttention",
    "triton": "nanovllm.kernels.triton_attention.TritonAttention",
    "torch": "nanovllm.layers.attention.TorchAttention",
}


def select_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int | None = None,
    kv_cache_dtype: str = "auto",
) -> tuple[type[AttentionBackend], str]:
    """The backend called `name`, or for `auto` the best that runs here; and a line that says why it was chosen."""
    reasons: list[str] = []
    for candidate, path in BACKENDS.items():
        if name not in ("auto", candidate):
            continue
        module, _, class_name = path.rpartition(".")
        backend_class: type[AttentionBackend] = getattr(importlib.import_module(module), class_name)
        reason = backend_class.why_not(device, dtype, head_dim, block_size)
        if kv_cache_dtype == "fp8":
            reason = reason or backend_class.why_no_fp8_kv_cache()
        if name == "auto":
            reason = reason or backend_class.why_slow(device, dtype, kv_cache_dtype)
        if reason is None:
            return backend_class, "; ".join([f"attention_backend={candidate}", *reasons])
        reasons.append(f"not {candidate}: {reason}")
    wanted, advice = f"attention_backend={name!r}", "take attention_backend='torch'"
    if kv_cache_dtype == "fp8":
        wanted, advice = f"{wanted} with kv_cache_dtype='fp8'", f"{advice}, or kv_cache_dtype='auto'"
    raise ValueError(f"{wanted} cannot be used ({'; '.join(reasons)}); {advice}")
