"""Decoder layers that one kernel can compute as a whole: those of the form x + attention(norm(x)), x + mlp(norm(x)),
perhaps with a factor on what is added to x.

`DENSE_LAYERS` are the classes whose `forward` is just that; `dense_parts` names what such a layer is made of, by what
it does rather than by its class, so that kernels in `cpu/` and `cuda/` do not depend on architectures. In attention,
each head of the queries and keys is normalised, if there are `q_norm` and `k_norm`, and then rotated.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from nanovllm_extras.kernels.classes import is_one
from nanovllm_extras.models.masking import AttentionOptions, options_of

DENSE_LAYERS = (
    "nanovllm_extras.models.granite.GraniteDecoderLayer",
    "nanovllm_extras.models.llama.LlamaDecoderLayer",
    "nanovllm_extras.models.phi3.Phi3DecoderLayer",
    "nanovllm.models.qwen3.Qwen3DecoderLayer",
)


@dataclass(frozen=True)
class DenseParts:
    """Modules as they are now: some may be fast versions already."""

    input_norm: Any
    qkv_proj: Any
    q_norm: Any
    """Normalises each head, before it is rotated; None where heads are only rotated. As `k_norm`."""
    k_norm: Any
    is_partly_rotated: bool
    """Whether only the first part of each head is rotated."""
    options: tuple[AttentionOptions, ...]
    """As `Attention` has them: none, or one."""
    o_proj: Any
    post_attention_norm: Any
    gate_up_proj: Any
    activation: Any
    down_proj: Any
    residual_factor: float
    """Factor on the outputs of attention and of the feed-forward network."""

    @property
    def products(self) -> list[Any]:
        return [self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj]

    @property
    def norms(self) -> list[Any]:
        return [self.input_norm, self.q_norm, self.k_norm, self.post_attention_norm]


def norm_or_none(module: nn.Module) -> nn.Module | None:
    return None if isinstance(module, nn.Identity) else module


def dense_parts(layer: Any) -> DenseParts | None:
    """Return the parts of a dense layer, or None for any other layer."""
    if not is_one(layer, *DENSE_LAYERS):
        return None
    attention, mlp = layer.self_attn, layer.mlp
    return DenseParts(
        layer.input_layernorm,
        attention.qkv_proj,
        norm_or_none(attention.q_norm),
        norm_or_none(attention.k_norm),
        getattr(attention, "rotary_dim", attention.head_dim) != attention.head_dim,
        options_of(attention.attention),
        attention.o_proj,
        layer.post_attention_layernorm,
        mlp.gate_up_proj,
        mlp.activation,
        mlp.down_proj,
        getattr(layer, "residual_multiplier", 1.0),
    )
