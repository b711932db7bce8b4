"""K and V in 8 bits: a KV cache of a quarter of float32's size, or half of bfloat16's, so that more sequences fit.

Each vector of K or V (one token, one head) is rounded to whole numbers with a scale of its own. KVQuant (Hooper et al.
2024, https://arxiv.org/abs/2401.18079) goes on to fewer bits, with scales of channels and exact outliers.

    scale = largest magnitude / 127        a vector in the cache: head_dim numbers of 1 byte | scale in 4 bytes
    x ≈ scale * q, q in -127 … 127         the error of each number is at most scale / 2

The cache is a tensor of the model's dtype, and its last dimension holds these bytes. `attend` dequantises the blocks
that a step reads and computes with PyTorch. That is a further copy of them in each layer: a kernel would dequantise
what it has loaded. So this saves memory, not time, and has no CUDA graphs.

    nanovllm bench compare examples/extensions/int8_kv.py
    LLM(model, extension="examples/extensions/int8_kv.py")
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nanovllm.layers.attention import AttentionMetadata, TorchAttention, softmax_attention

SCALE_BYTES = 4  # float32
MOST = 127
SMALLEST_SCALE = 1e-30  # of a vector of zeros


class Int8Attention(TorchAttention):
    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        return f"head_dim must be a multiple of 4, the model has {head_dim}" if head_dim % 4 else None

    def kv_cache_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        width = (self.head_dim + SCALE_BYTES) // self.dtype.itemsize  # in elements of the model's dtype
        return (2, num_layers, num_blocks, self.block_size, self.num_kv_heads, width)

    def store_kv(self, k: Tensor, v: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write k, v: [num_tokens, num_kv_heads, head_dim] to the slots slot_mapping: [num_tokens]."""
        k_slots, v_slots = layer_cache.view(torch.int8).flatten(1, 2)  # [num_slots, num_kv_heads, head_dim + 4] each
        k_slots[slot_mapping] = quantise(k)
        v_slots[slot_mapping] = quantise(v)

    def attend(
        self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata, weigh: Callable = softmax_attention
    ) -> Tensor:
        """Dequantise the blocks of the step, and attend with PyTorch: q [num_tokens, num_heads, head_dim] -> as q"""
        used, tables = metadata.block_tables.unique(return_inverse=True)  # [num_used], [num_seqs, max_num_blocks]
        floats = dequantise(layer_cache[:, used].view(torch.int8)).to(q.dtype)
        return super().attend(q, floats, replace(metadata, block_tables=tables.int()), weigh)


def quantise(x: Tensor) -> Tensor:
    """Round vectors: [num_tokens, num_kv_heads, head_dim] -> [num_tokens, num_kv_heads, head_dim + 4] int8"""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_SCALE) / MOST  # [num_tokens, num_kv_heads, 1]
    return torch.cat(((x / scale).round().to(torch.int8), scale.view(torch.int8)), dim=-1)


def dequantise(rows: Tensor) -> Tensor:
    """Read vectors: [..., head_dim + 4] int8 -> [..., head_dim] float32"""
    return rows[..., :-SCALE_BYTES] * rows[..., -SCALE_BYTES:].view(torch.float32)


attention_backend = Int8Attention
