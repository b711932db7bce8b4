"""Paged attention: the one layer through which tokens see each other, by reading each other's K and V in the cache.

`Attention` is the layer. `AttentionMetadata` says which token belongs to which sequence, and where its K and V lie;
`batch.py` builds it. `store_kv` and `attend` are the definition in PyTorch: readable, right on any device,
and what every fast backend is tested against. `backends.py` says what a backend is.

A decode of sequence A, which has 6 tokens in the blocks [7, 2], with block_size 4:

    store_kv    k, v of position 5          -> slot 2*4 + 5%4 = 9       slot_mapping [9]
    attend      q of position 5             over the first 6 slots of the blocks 7 and 2: positions 0 … 5

The K and V of the whole batch are stored before any token attends: a sequence may share blocks that another sequence
fills in the same step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:  # it imports this file
    from nanovllm.layers.backends import AttentionBackend

Weigh = Callable[..., Tensor]
"""softmax(q k^T / sqrt(head_dim) + mask) v, or another function of the same arguments (`extras/models/masking.py`)"""


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's num_tokens new tokens of num_seqs sequences, end to end: decodes first, then prefill chunks."""

    slot_mapping: Tensor  # [num_tokens] int32, where the K and V of the new tokens are written
    block_tables: Tensor  # [num_seqs, max_num_blocks] int32, rows filled up with the null block
    seq_lens: Tensor  # [num_seqs] int32, tokens attended to, the new ones included
    cu_seqlens_q: Tensor  # [num_seqs + 1] int32, rows cu[i] … cu[i+1] belong to sequence i
    # for a varlen call over the prefill chunks only: offsets of their new tokens (q), and of all they attend to (k)
    prefill_cu_seqlens_q: Tensor  # [num_seqs - num_decodes + 1] int32
    prefill_cu_seqlens_k: Tensor  # [num_seqs - num_decodes + 1] int32
    num_decodes: int  # the first so many sequences have one new token each
    max_seqlen_q: int  # longest prefill chunk, 0 if there is none
    max_seqlen_k: int  # most tokens that a prefill chunk attends to
    num_prefix_tokens: int  # before the prefill chunks, all of them together; 0 if each begins its sequence


class Attention(nn.Module):
    """Stores the new tokens' K and V of one layer, and attends to the tokens up to each new one.

    A layer that attends in another way has `options`, which the backend gets (`extras/models/masking.py`).
    """

    def __init__(self, backend: "AttentionBackend", *options: Any) -> None:
        super().__init__()
        self.backend = backend
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim] -> as q"""
        self.backend.store_kv(k, v, layer_cache, metadata.slot_mapping)
        return self.backend.attend(q, layer_cache, metadata, *self.options)


# ---- the definition; layer_cache: [2, num_blocks, block_size, num_kv_heads, head_dim]


def store_kv(k: Tensor, v: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
    """k, v: [num_tokens, num_kv_heads, head_dim], written to the slots slot_mapping: [num_tokens]"""
    k_slots, v_slots = layer_cache.flatten(1, 2)  # [num_slots, num_kv_heads, head_dim] each
    k_slots[slot_mapping] = k
    v_slots[slot_mapping] = v


def attend(
    q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata, weigh: Weigh = F.scaled_dot_product_attention
) -> Tensor:
    """q: [num_tokens, num_heads, head_dim] -> as q: each new token attends to its sequence's tokens up to itself

    With cu_seqlens_q [0, 1, 4], row 0 is the new token of one sequence; rows 1 … 3 are a chunk of another.
    """
    out = torch.empty_like(q)
    cu_seqlens, seq_lens = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
    for i, block_table in enumerate(metadata.block_tables):
        rows = slice(cu_seqlens[i], cu_seqlens[i + 1])
        out[rows] = attend_chunk(q[rows], layer_cache, block_table, seq_lens[i], weigh)
    return out


def attend_chunk(q: Tensor, layer_cache: Tensor, block_table: Tensor, seq_len: int, weigh: Weigh) -> Tensor:
    """The last q.shape[0] of `seq_len` tokens of one sequence: paged attention in five steps."""
    block_size, num_kv_heads, head_dim = layer_cache.shape[2:]
    n, group = q.shape[0], q.shape[1] // num_kv_heads
    # 1. look up the blocks, and cut off what lies behind the last token
    kv = layer_cache[:, block_table[: -(-seq_len // block_size)]]  # [2, num_blocks, block_size, …], a copy
    k, v = kv.flatten(1, 2)[:, :seq_len].transpose(1, 2)  # [num_kv_heads, seq_len, head_dim] each
    # 2. the query heads of a group share a K and V head; `expand` shares it without a copy
    q = q.view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)  # [num_kv_heads, group, n, head_dim]
    k, v = k[:, None].expand(-1, group, -1, -1), v[:, None].expand(-1, group, -1, -1)
    # 3. a token sees every position up to its own
    positions = torch.arange(seq_len, device=q.device)  # [seq_len]
    is_seen = positions <= positions[-n:, None]  # [n, seq_len]
    # 4. softmax(q k^T / sqrt(head_dim) + mask) v. Keep 4-D: for 3-D inputs PyTorch stores the whole score matrix
    o = weigh(q, k, v, is_seen)
    # 5. back to one row a token
    return o.permute(2, 0, 1, 3).reshape(n, -1, head_dim)
