"""Attention in PyTorch, on any device: the definition, with all decodes of a step as one padded batch.

A step of 256 decodes would call the definition 256 times in each layer. Here their K and V are gathered together, as
many at a time as fit the processor's caches. Prefill chunks are computed by the definition, one after the other.
"""

import torch

from nanovllm.layers import attention
from nanovllm.layers.attention import AttentionMetadata
from nanovllm.layers.backends import AttentionBackend
from nanovllm.layers.masking import PLAIN, AttentionOptions, is_visible, weigh

GATHERED_ELEMENTS = 1 << 20  # of K and V that are gathered at a time on CPU: as many as fit its L2 cache


class TorchAttention(AttentionBackend):
    """Any device, dtype and block size."""

    default_block_size = 16

    def attend(
        self,
        q: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        nd, tables = metadata.num_decodes, metadata.block_tables
        cu_seqlens, seq_lens = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
        for rows in slices_that_fit(nd, max(seq_lens), layer_cache):
            width = -(-max(seq_lens[rows]) // layer_cache.shape[2])
            out[rows] = attend_decodes(q[rows], layer_cache, tables[rows, :width], metadata.seq_lens[rows], options)
        for i in range(nd, len(seq_lens)):
            rows = slice(cu_seqlens[i], cu_seqlens[i + 1])
            out[rows] = attention.attend_chunk(q[rows], layer_cache, tables[i], seq_lens[i], options)
        return out


def attend_decodes(
    q: torch.Tensor, layer_cache: torch.Tensor, tables: torch.Tensor, seq_lens: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """One new token each of several sequences, as one padded batch. q: [num_decodes, num_heads, head_dim] -> as q"""
    kv = layer_cache[:, tables].flatten(2, 3)  # [2, n, len, num_kv_heads, head_dim], a copy
    n, num_slots, num_kv_heads, head_dim = kv.shape[1:]
    is_seen = is_visible(seq_lens[:, None] - 1, torch.arange(num_slots, device=q.device), options.window)  # [n, len]
    kv.masked_fill_(~is_seen[None, :, :, None, None], 0)  # a NaN behind a sequence's end must reach no output
    k, v = kv.transpose(2, 3)  # [n, num_kv_heads, len, head_dim] each
    # the heads of a group are rows of one K and V head; no mask among them: they see the same
    rows = q.view(n, num_kv_heads, -1, head_dim)  # [n, num_kv_heads, group, head_dim]
    return weigh(rows, k, v, is_seen[:, None, None], options).reshape(q.shape)


def slices_that_fit(num_decodes: int, max_len: int, layer_cache: torch.Tensor) -> list[slice]:
    """Decodes that are padded and gathered together: all of them on a GPU, as many as its caches hold on a CPU."""
    num_elements = 2 * max_len * layer_cache[0, 0, 0].numel()  # of one sequence's K and V
    num_at_once = num_decodes if layer_cache.is_cuda else GATHERED_ELEMENTS // num_elements
    step = max(1, num_at_once)
    return [slice(i, min(i + step, num_decodes)) for i in range(0, num_decodes, step)]
