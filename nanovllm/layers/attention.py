"""Paged attention: the only layer in which a token depends on other tokens. It reads their K and V from the cache.

`AttentionMetadata` says which token belongs to which sequence and where its K and V are stored; `batch.py` builds it.
`Attention` is the layer. `TorchAttention` computes it with PyTorch, on any device; `flash_attention.py` on a GPU.

A decode of sequence A, which has 6 tokens in the blocks [7, 2], with block_size 4:

    store_kv    k, v of position 5          -> slot 2*4 + 5%4 = 9       slot_mapping [9]
    attend      q of position 5             over the first 6 slots of the blocks 7 and 2: positions 0 … 5

The K and V of the whole batch are stored before any token attends, because a sequence may share blocks that another
sequence fills in the same step.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

logger = logging.getLogger(__name__)

GATHERED_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # of K and V, copied at a time: fits a CPU's L2 cache
MASK_ELEMENTS = 1 << 26  # of one call's mask, new tokens times all tokens: 8,192 of 8,192


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor) -> Tensor:
    """Compute softmax(q k^T / sqrt(head_dim)) v over the positions that each query sees.

    q: [num_seqs, num_heads, n, head_dim]; k, v: [num_seqs, num_kv_heads, len, head_dim] -> as q
    is_seen: [num_seqs, 1, n, len]
    """
    if q.is_cuda:
        return attend_on_cuda(q, k, v, is_seen, scale=None)
    return F.scaled_dot_product_attention(q, k, v, is_seen, enable_gqa=True)


def attend_on_cuda(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor, scale: float | None) -> Tensor:
    """Compute `softmax_attention` by the one fused kernel of PyTorch that takes a mask in all of its versions.

    Before 2026 it does not know groups of heads, so each head of K and V is repeated. cuDNN's kernel would do all of
    this too, but makes a new plan for each shape, which takes about 30 ms, and the shapes of steps differ.

    scale: the factor on the scores, None for 1 / sqrt(head_dim)
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, is_seen, scale=scale)


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's num_tokens new tokens of num_seqs sequences, end to end: decodes first, then prefill chunks."""

    slot_mapping: Tensor  # [num_tokens] int32, where the K and V of the new tokens are written
    block_tables: Tensor  # [num_seqs, max_num_blocks] int32, rows padded with the null block
    seq_lens: Tensor  # [num_seqs] int32, tokens to attend to, including the new ones
    cu_seqlens_q: Tensor  # [num_seqs + 1] int32, rows cu[i] … cu[i+1] belong to sequence i
    # for one call over all prefill chunks: offsets of their new tokens (q), and of all tokens they attend to (k)
    prefill_cu_seqlens_q: Tensor  # [num_seqs - num_decodes + 1] int32
    prefill_cu_seqlens_k: Tensor  # [num_seqs - num_decodes + 1] int32
    num_decodes: int  # the first `num_decodes` sequences have one new token each
    max_seqlen_q: int  # longest prefill chunk, 0 if there is none
    max_seqlen_k: int  # most tokens that a prefill chunk attends to
    num_prefix_tokens: int  # before all prefill chunks together; 0 if each begins its sequence

    @classmethod
    def of_decodes(
        cls, slots: Tensor, block_tables: Tensor, seq_lens: Tensor, offsets: Tensor, *more: Tensor
    ) -> "AttentionMetadata":
        """Return the metadata of a step without prefill chunks.

        offsets: [num_seqs + 1] int32, 0 … num_seqs; more: [num_seqs] each, the fields of a subclass
        """
        return cls(slots, block_tables, seq_lens, offsets, offsets[:1], offsets[:1], len(slots), 0, 0, 0, *more)


class Attention(nn.Module):
    """Store the new tokens' K and V of one layer, and attend from each new token to its own and earlier positions."""

    def __init__(self, backend: "TorchAttention") -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim] -> as q"""
        self.backend.store_kv(k, v, layer_cache, metadata.slot_mapping)
        return self.backend.attend(q, layer_cache, metadata)


class BackendError(RuntimeError):
    """Raised by `replace_layers` if the backend would compute wrongly on this machine: the engine takes another one."""


@dataclass(frozen=True)
class LoadedModel:
    """A network with its weights, whose layers a backend may replace."""

    model: nn.Module
    shape: Any  # a `ModelConfig`
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    enforce_eager: bool  # all layers but attention stay as they are


class TorchAttention:
    """The attention backend in PyTorch. A backend defines the layout of the cache, and computes with it.

    Other backends are subclasses, or classes with the same methods: `FlashAttention`, and what `plugins.py` finds.
    `nanovllm_extras` registers faster ones there, which replace other layers too.

    `num_kv_heads` divides `num_heads`: a group of query heads shares one K and V head
    (GQA, https://arxiv.org/abs/2305.13245).
    """

    default_block_size = 16
    priority = 0
    """Of several plug-ins, `attention_backend="auto"` takes the one with the largest number that can be used."""
    supports_graphs = False
    """Whether `attend` can be recorded in a CUDA graph. PyTorch's attention reads lengths on the host, so it cannot."""

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        """Return the reason why this backend cannot be used here for such a model, or None if it can."""
        return None

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size or self.default_block_size
        self.dtype = dtype

    def replace_layers(self, loaded: LoadedModel) -> None:
        """Replace layers of a network by faster ones, if this backend has any. BackendError if it computes wrongly.

        PyTorch has none, so this says what is faster where its bfloat16 is slow: with AVX2 and without AVX-512.
        """
        is_bfloat16 = loaded.dtype == torch.bfloat16 and loaded.device.type == "cpu"
        if is_bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX2":
            logger.warning(
                "PyTorch has no fast bfloat16 on this processor: dtype='float32' computes prompts about four times as "
                "fast, and takes twice the memory for weights and KV cache"
            )

    def step_context(self) -> AbstractContextManager[None]:
        """Return a context for each step, for a backend that has threads of its own."""
        return nullcontext()

    def argmax(self, logits: Tensor) -> Tensor:
        """Return each row's most likely token: [num_samples, vocab_size] -> [num_samples] int64"""
        return logits.argmax(dim=-1)

    def kv_cache_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of the KV cache: [2 (K and V), num_layers, num_blocks, …]."""
        return (2, num_layers, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    def store_kv(self, k: Tensor, v: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write k, v: [num_tokens, num_kv_heads, head_dim] to the slots slot_mapping: [num_tokens]."""
        k_slots, v_slots = layer_cache.flatten(1, 2)  # [num_slots, num_kv_heads, head_dim] each
        k_slots[slot_mapping] = k
        v_slots[slot_mapping] = v

    def attend(
        self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata, weigh: Callable = softmax_attention
    ) -> Tensor:
        """Attend from each new token to its own and earlier positions: q [num_tokens, num_heads, head_dim] -> as q

        layer_cache: kv_cache[:, layer]. With cu_seqlens_q [0, 1, 4], row 0 is the new token of one sequence, and rows
        1 … 3 are a chunk of another.
        """
        out = torch.empty_like(q)
        tables, seq_lens, nd = metadata.block_tables, metadata.seq_lens, metadata.num_decodes
        lens, starts = seq_lens.tolist(), metadata.cu_seqlens_q.tolist()
        # decodes have one new token each: compute as many of them together as may be copied at a time
        step = max(1, GATHERED_ELEMENTS[q.device.type] // (2 * max(lens) * layer_cache.shape[3:].numel()))
        for i in range(0, nd, step):
            some = slice(i, min(i + step, nd))
            out[some] = attend_padded(q[some, None], layer_cache, tables[some], seq_lens[some], lens[some], weigh)[:, 0]
        for i in range(nd, len(lens)):  # prefill chunks, one by one, each in parts whose masks are not too large
            one, num_rows = slice(i, i + 1), max(1, MASK_ELEMENTS // lens[i])
            for start in range(starts[i], starts[i + 1], num_rows):
                rows = slice(start, min(start + num_rows, starts[i + 1]))
                num_later = starts[i + 1] - rows.stop  # tokens of the chunk that this part does not see
                some_lens = seq_lens[one] - num_later, [lens[i] - num_later]
                out[rows] = attend_padded(q[None, rows], layer_cache, tables[one], *some_lens, weigh)[0]
        return out


def attend_padded(
    q: Tensor, layer_cache: Tensor, tables: Tensor, seq_lens: Tensor, lens: list[int], weigh: Callable
) -> Tensor:
    """Attend from the last n tokens of each of several sequences: q [num_seqs, n, num_heads, head_dim] -> as q

    tables: [num_seqs, max_num_blocks]; seq_lens: [num_seqs], of which the last n are the new tokens; lens: the same as
    integers; weigh: `softmax_attention`, or a function with the same arguments
    """
    n, max_len, block_size = q.shape[1], max(lens), layer_cache.shape[2]
    # 1. follow the block tables, as far as the longest sequence needs
    kv = layer_cache[:, tables[:, : -(-max_len // block_size)]]  # [2, num_seqs, num_blocks, block_size, …], a copy
    k, v = kv.flatten(2, 3)[:, :, :max_len]  # [num_seqs, max_len, num_kv_heads, head_dim] each
    # 2. a token sees every position up to its own. After a sequence's end there may be anything, even NaN: clear it
    positions = torch.arange(max_len, device=q.device)  # [max_len]
    own = seq_lens[:, None] - n + torch.arange(n, device=q.device)  # [num_seqs, n], positions of the new tokens
    is_seen = positions <= own[:, :, None]  # [num_seqs, n, max_len]
    is_after = (positions >= seq_lens[:, None])[:, :, None, None]  # [num_seqs, max_len, 1, 1]
    k, v = k.masked_fill_(is_after, 0), v.masked_fill_(is_after, 0)
    # 3. heads before tokens: [num_seqs, heads, n or max_len, head_dim]
    out = weigh(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_seen[:, None])
    return out.transpose(1, 2)
