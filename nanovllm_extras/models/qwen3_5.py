"""Qwen3.5 and 3.6, dense, text: three of four layers have a recurrent state, the fourth attends to all tokens.

    token ids → embedding → num_layers × [ x + mixer(norm(x)),  x + mlp(norm(x)) ] → norm → lm_head → logits

The mixer of most layers is Gated DeltaNet (`gated_delta.py`), which keeps one state for each sequence. That of the
others is attention as in Qwen3, with two differences: only the first part of each head is rotated, and a gate
multiplies the output. Weights of norms are stored as differences from one.

The vision part of a checkpoint is not loaded. The head for multi-token prediction (`mtp.py`) is loaded if it makes
drafts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.checks import check_int
from nanovllm.layers.attention import Attention, AttentionMetadata, TorchAttention
from nanovllm.layers.basic import FusedLinear, GatedMLP, Linear
from nanovllm.models.qwen3 import refuse
from nanovllm_extras.models.decoder import CausalLM, DecoderModel
from nanovllm_extras.models.gated_delta import GatedDeltaNet
from nanovllm_extras.models.gemma3 import UnitOffsetRMSNorm
from nanovllm_extras.models.layer_inputs import StateCaches, StateMetadata, StateShape
from nanovllm_extras.models.mtp import MtpHead
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_common, read_rope, read_rotary_dim
from nanovllm_extras.models.rope import ApplyPartialRotary
from nanovllm_extras.models.window_layers import FULL, layer_types_of
from nanovllm_extras.options.option_checks import first_given

LINEAR = "linear_attention"
LINEAR_SIZES = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
                "linear_value_head_dim": 128}  # fmt: skip


@dataclass(frozen=True)
class Qwen3_5Config(NetworkConfig):
    """By the names of config.json."""

    layer_types: tuple[str, ...] = ()
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    has_mtp: bool = False  # whether the head for multi-token prediction is loaded; config.json does not say so


def read_qwen3_5_config(raw: RawConfig) -> Qwen3_5Config:
    return Qwen3_5Config(**read_fields(raw, num_key_value_heads=4))


def read_fields(raw: RawConfig, num_key_value_heads: int) -> dict[str, Any]:
    """Read the fields of `Qwen3_5Config` from config.json. Missing fields get the defaults of transformers."""
    common = read_common(raw, 32768, num_key_value_heads=num_key_value_heads, head_dim=256)
    refuse("hidden_act", common["hidden_act"], ("silu", "swish"))
    refuse("attn_output_gate", raw.get("attn_output_gate"), (True, None))
    refuse("mamba_ssm_dtype", raw.get("mamba_ssm_dtype"), ("float32", None))
    linear: dict[str, Any] = {name: read_size(raw, name, default) for name, default in LINEAR_SIZES.items()}
    linear["linear_conv_kernel_dim"] = width = read_size(raw, "linear_conv_kernel_dim", 4, minimum=2)
    key_heads, value_heads = linear["linear_num_key_heads"], linear["linear_num_value_heads"]
    if value_heads % key_heads:
        raise ValueError(f"linear_num_value_heads must be a multiple of linear_num_key_heads, config.json has "
                         f"{value_heads} and {key_heads}")  # fmt: skip
    types = read_layer_types(raw, common["num_hidden_layers"])
    key_dim, value_dim = linear["linear_key_head_dim"], linear["linear_value_head_dim"]
    state_shape = StateShape(
        num_layers=types.count(LINEAR),
        conv=(width - 1, 2 * key_heads * key_dim + value_heads * value_dim),
        recurrent=(value_heads, key_dim, value_dim),
    )
    rotary_dim = read_rotary_dim(raw, common["head_dim"], share=0.25)
    rope = read_rope(raw, rotary_dim, common["max_position_embeddings"])
    positions = {"rope": rope, "rotary_dim": rotary_dim}
    return {**common, **linear, **positions, "layer_types": types, "state_shape": state_shape}


def read_layer_types(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """Read the type of each layer. Without `layer_types`, every `full_attention_interval`-th layer attends."""
    interval = read_size(raw, "full_attention_interval", 4)
    types = layer_types_of(raw, [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)])
    for one in types:
        refuse("layer_types", one, (LINEAR, FULL))
    if len(set(types)) < 2:
        raise ValueError(f"layer_types must name both {LINEAR} and {FULL}, config.json has {types[0]} for all layers")
    return tuple(types)


def read_size(raw: Mapping[str, object], name: str, default: int, minimum: int = 1) -> int:
    value = first_given(raw.get(name), default)
    check_int(f"config.json: {name}", value, minimum)
    return int(value)


class Qwen3_5Attention(nn.Module):
    """Attention whose output is gated. The projection of the queries gives the gate of each head too."""

    def __init__(self, config: Qwen3_5Config, backend: TorchAttention) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        parts = {"q_proj": 2 * q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, config.qkv_bias)
        self.q_norm = UnitOffsetRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = UnitOffsetRMSNorm(config.head_dim, config.rms_norm_eps)
        self.rotate = ApplyPartialRotary()
        self.attention = Attention(backend)
        self.o_proj = Linear(q_size, config.hidden_size, config.o_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: StateMetadata) -> Tensor:
        q_and_gate, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv_proj(x))
        # [num_tokens, num_heads, head_dim] each; kernels expect the heads of a token end to end
        q, gate = q_and_gate[:, ::2].contiguous(), q_and_gate[:, 1::2]
        q, k = self.rotate(q, cos, sin, self.q_norm), self.rotate(k, cos, sin, self.k_norm)
        attended = self.attention(q, k, v, layer_cache, metadata)  # [num_tokens, num_heads, head_dim]
        return self.o_proj((attended * torch.sigmoid(gate)).flatten(1))  # [num_tokens, hidden_size]


class Qwen3_5DecoderLayer(nn.Module):
    def __init__(self, config: Qwen3_5Config, backend: TorchAttention, layer: int) -> None:
        super().__init__()
        self.input_layernorm = UnitOffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.keeps_state = config.layer_types[layer] == LINEAR
        if self.keeps_state:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Qwen3_5Attention(config, backend)
        self.post_attention_layernorm = UnitOffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = self.make_mlp(config)

    def make_mlp(self, config: Qwen3_5Config) -> nn.Module:
        return GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, caches: StateCaches, place: int, metadata: StateMetadata
    ) -> Tensor:
        """Compute the layer: [num_tokens, hidden_size] -> the same shape. `place`: the index among its kind"""
        normed = self.input_layernorm(x)
        if self.keeps_state:
            x = x + self.linear_attn(normed, caches.conv[place], caches.recurrent[place], metadata)
        else:
            x = x + self.self_attn(normed, cos, sin, caches.kv[:, place], metadata)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3_5Model(DecoderModel):
    def __init__(self, config: Qwen3_5Config, backend: TorchAttention, layer_class: type[nn.Module]) -> None:
        super().__init__(config, backend, layer_class)
        self.norm = UnitOffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.places = [config.layer_types[:i].count(kind) for i, kind in enumerate(config.layer_types)]

    def forward(  # its layers have caches of two kinds
        self, input_ids: Tensor, positions: Tensor, metadata: StateMetadata, caches: StateCaches
    ) -> Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        cos, sin = self.rotary(positions, x.dtype)  # [num_tokens, 1, rotary_dim / 2] each
        for layer, place in zip(self.layers, self.places, strict=True):
            x = layer(x, cos, sin, caches, place, metadata)
        return self.norm(x)  # [num_tokens, hidden_size]


class Qwen3_5ForCausalLM(CausalLM):
    read_config = staticmethod(read_qwen3_5_config)
    layer_class = Qwen3_5DecoderLayer
    model_class = Qwen3_5Model

    def __init__(self, config: Qwen3_5Config, backend: TorchAttention) -> None:
        super().__init__(config, backend)
        self.mtp = MtpHead(config, backend, self.layer_class) if config.has_mtp else None

    def predict(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, kv: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Compute the hidden states of the head for multi-token prediction: [num_tokens, hidden_size]

        hidden: [num_tokens, hidden_size], of the tokens before `input_ids`; kv: the K and V of the head
        """
        assert self.mtp is not None
        cos, sin = self.model.rotary((positions - 1).clamp(min=0), hidden.dtype)
        head: Tensor = self.mtp(self.model.embed_tokens(input_ids), hidden, cos, sin, kv, metadata)
        return head

    def is_unused(self, name: str) -> bool:
        """Return whether a tensor belongs to the vision part, or to a head that is not used."""
        return name.startswith(("model.visual.", "visual.")) or (self.mtp is None and name.startswith("mtp."))


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The same network, from a checkpoint that has a vision part too."""
