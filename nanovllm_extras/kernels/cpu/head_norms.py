"""Attention layers that normalise and rotate the heads of the queries and keys in one call of C.

They serve models whose layers `cpu_decoder_layer.py` does not compute as a whole: Qwen3-MoE and Gemma 3.
`CpuAttention.make_fast` calls `fuse_head_norms` after single layers have been replaced by fast versions.
"""

from typing import Any

import torch
from torch import nn

from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.kernels.classes import is_one
from nanovllm_extras.kernels.cpu.cpu_layers import CpuRMSNorm
from nanovllm_extras.kernels.cpu.library import LANES

NORMED_ATTENTION = (
    "nanovllm.models.qwen3.Qwen3Attention",
    "nanovllm_extras.models.qwen3_variants.Qwen3VariantAttention",
    "nanovllm_extras.models.gemma3.Gemma3Attention",
)


class CpuNormedAttention(nn.Module):
    """A fast version of an attention layer of one of the classes above, with the same rounding."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.head_dim = attention.head_dim
        self.qkv_proj, self.o_proj = attention.qkv_proj, attention.o_proj
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.attention = attention.attention

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attend: x: [num_tokens, hidden_size] -> the same shape"""
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv_proj(x))  # [num_tokens, heads, head_dim]
        q, k = self.q_norm(q, cos, sin), self.k_norm(k, cos, sin)
        return self.o_proj(self.attention(q, k, v, layer_cache, metadata).flatten(1))


def fuse_head_norms(model: nn.Module) -> None:
    """Replace every supported attention layer of the model by `CpuNormedAttention`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if is_one(child, *NORMED_ATTENTION) and is_fast(child):
                setattr(module, name, CpuNormedAttention(child))


def is_fast(attention: Any) -> bool:
    """Return whether both norms have been replaced by fast versions and each half of a head is whole vectors."""
    norms = (attention.q_norm, attention.k_norm)
    return all(isinstance(norm, CpuRMSNorm) for norm in norms) and attention.head_dim % (2 * LANES) == 0
