"""A whole decoder layer on CPU in one call of C, for layers whose parts all have twins in `layers.py`.

The same functions run in the same order as when each part is called by itself, and give the same bits. What is saved is
the way through Python between 17 operations, in each of 28 layers.
`CpuAttention.replace_layers` calls `fuse_layers`; the model file knows nothing of it.
"""

from ctypes import Structure, byref, c_float, c_long, c_void_p
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.kernels.cpu.layers import CpuLinear, CpuRMSNorm, CpuSiluAndMul
from nanovllm.kernels.cpu.library import LANES, load_library
from nanovllm.layers.attention import AttentionMetadata
from nanovllm.layers.backends import AttentionBackend
from nanovllm.models.qwen3 import Qwen3DecoderLayer


class Layer(Structure):
    """`struct layer` of cpu.c"""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, c_void_p) for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "qkv_bias", "o_bias")),
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_attention_norm")),
        *((name, c_long) for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")),
        *((name, c_long) for name in ("head_dim", "block_size")),
        *((name, c_float) for name in ("eps", "scale")),
    ]


class Step(Structure):
    """`struct step` of cpu.c"""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, c_void_p) for name in ("cos", "sin", "slot_mapping", "block_tables", "seq_lens", "cu_seqlens_q")),
        *((name, c_long) for name in ("num_tokens", "num_seqs", "max_num_blocks")),
    ]


class CpuDecoderLayer(nn.Module):
    """Does what `layer` does, part by part, in one call."""

    def __init__(self, layer: Qwen3DecoderLayer, backend: AttentionBackend) -> None:
        super().__init__()
        self.layer = layer
        self.library = load_library(backend.dtype)
        products, norms = parts_of(layer)
        down_proj = products[-1]
        biases = (product.bias for product in products[:2])
        self.struct = Layer(
            *(product.packed.data_ptr() for product in products),
            *(None if bias is None else bias.data_ptr() for bias in biases),
            *(norm.weight.data_ptr() for norm in norms),
            *(down_proj.out_features, down_proj.in_features, backend.num_heads, backend.num_kv_heads),
            *(backend.head_dim, backend.block_size, norms[0].eps, backend.scale),
        )

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """x: [num_tokens, hidden_size] -> the same tensor, changed in place

        Nobody misses the old x: it comes from the embedding, which makes a new tensor, or from the layer before.
        """
        tables = (metadata.slot_mapping, metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q)
        step = Step(*(t.data_ptr() for t in (cos, sin, *tables)), len(x), *metadata.block_tables.shape)
        k_cache = layer_cache.data_ptr()
        v_cache = k_cache + layer_cache.stride(0) * layer_cache.itemsize
        self.library.decoder_layer(byref(self.struct), byref(step), x.data_ptr(), k_cache, v_cache)
        return x


def fuse_layers(model: nn.Module, backend: AttentionBackend) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Qwen3DecoderLayer) and is_fast(child):
                setattr(module, name, CpuDecoderLayer(child, backend))


def is_fast(layer: Qwen3DecoderLayer) -> bool:
    """Whether every part of it has a twin for its shape."""
    products, norms = parts_of(layer)
    have_twins = all(isinstance(p, CpuLinear) for p in products) and all(isinstance(n, CpuRMSNorm) for n in norms)
    return have_twins and isinstance(layer.mlp.activation, CpuSiluAndMul) and products[-1].in_features % LANES == 0


def parts_of(layer: Qwen3DecoderLayer) -> tuple[list[Any], list[Any]]:
    """Its matrix products and its norms, in the order of `Layer`"""
    attention, mlp = layer.self_attn, layer.mlp
    products = [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    return products, [layer.input_layernorm, attention.q_norm, attention.k_norm, layer.post_attention_layernorm]
