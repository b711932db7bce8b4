"""Gemma 3, text (Gemma Team 2025, https://arxiv.org/abs/2503.19786).

    token ids → embedding · sqrt(hidden_size) → num_layers × [ x + norm(attention(norm(x))),  x + norm(mlp(norm(x))) ]
      → norm → logits, perhaps soft-capped

Most layers see a window only, every sixth sees all; each kind has rotary positions of its own. There is a norm before
and behind each half of a layer, queries and keys are normalised, and weights of norms are differences from one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.checks import check_int, check_number
from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.layers.basic import RMSNorm
from nanovllm.models.qwen3 import refuse
from nanovllm_extras.models.decoder import CausalLM, DecoderModel, LayerClass
from nanovllm_extras.models.gated_mlp import GATES, GatedMLP
from nanovllm_extras.models.layer_inputs import metadata_of
from nanovllm_extras.models.llama import LlamaAttention
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_common, refuse_partial_rotary
from nanovllm_extras.models.rope import Rope, ScaledRotary
from nanovllm_extras.models.rope_overrides import POSITIONS, check_read, override_positions
from nanovllm_extras.models.rope_types import make_rope
from nanovllm_extras.models.window_layers import FULL, SLIDING, layer_types_of, read_windows
from nanovllm_extras.options.option_checks import check_dict, first_given


@dataclass(frozen=True)
class Gemma3Config(NetworkConfig):
    """`rope` is that of the layers that see all tokens, `local_rope` that of the layers with a window."""

    local_rope: Rope = Rope()
    final_logit_softcapping: float | None = None


def read_gemma3_config(raw: RawConfig) -> Gemma3Config:
    """Read a Gemma 3 config.json. Raises ValueError for a field that `gemma3.py` would compute wrongly.

    `attn_logit_softcapping` is a field of Gemma 2. For Gemma 3 it has no effect, neither here nor in transformers.
    """
    raw = {**raw, "hidden_act": raw.get("hidden_activation") or "gelu_pytorch_tanh"}
    refuse("hidden_activation", raw["hidden_act"], tuple(GATES))
    common = read_common(raw, 131072, num_key_value_heads=4, head_dim=256, tie_word_embeddings=True)
    refuse("use_bidirectional_attention", raw.get("use_bidirectional_attention") or False, (False,))
    refuse_partial_rotary(raw)
    pattern = raw.get("sliding_window_pattern") or 6
    check_int("config.json: sliding_window_pattern", pattern, 1)
    default_types = [SLIDING if (i + 1) % pattern else FULL for i in range(common["num_hidden_layers"])]
    scalar = raw.get("query_pre_attn_scalar", 256)
    check_number("config.json: query_pre_attn_scalar", scalar, 0, open_low=True)
    cap = raw.get("final_logit_softcapping")
    if cap is not None:
        check_number("config.json: final_logit_softcapping", cap, 0, open_low=True)
    types, window = layer_types_of(raw, default_types), raw.get("sliding_window", 4096)
    rope, local_rope = read_ropes(raw, common["head_dim"], common["max_position_embeddings"])
    return Gemma3Config(
        **common,
        **read_windows(types, window, scalar**-0.5),
        rope=rope,
        local_rope=local_rope,
        final_logit_softcapping=cap,
    )


def read_ropes(raw: RawConfig, head_dim: int, max_len: int) -> tuple[Rope, Rope]:
    """Read the RoPE of layers that see all tokens, and of layers with a window (`rope_local_base_freq`).

    A `rope_scaling` stretches only the former.
    """
    parameters = raw.get("rope_parameters") or {}
    if unknown := set(parameters) - {FULL, SLIDING}:
        raise ValueError(f"rope_parameters must have {FULL} and {SLIDING}, config.json has {sorted(unknown)} in it")
    for name, value in parameters.items():
        if not isinstance(value, dict | None):
            raise TypeError(f"config.json: rope_parameters: {name} must be an object, got {value!r}")
        refuse_partial_rotary(value or {})
    full = {**(parameters.get(FULL) or {}), **(raw.get("rope_scaling") or {})}
    local = parameters.get(SLIDING) or {}
    full_theta = first_given(full.get("rope_theta"), raw.get("rope_theta"), 1_000_000.0)
    local_theta = first_given(local.get("rope_theta"), raw.get("rope_local_base_freq"), 10_000.0)
    return make_rope(full, full_theta, head_dim, max_len), make_rope(local, local_theta, head_dim, max_len)


def override_ropes(raw: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the fields `given` of the two RoPEs, all in `rope_parameters`."""
    check_read(
        given, ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
    )
    old, new = raw.get("rope_parameters") or {}, given.get("rope_parameters") or {}
    is_replaced = "rope_parameters" in given
    ropes = dict(new if is_replaced else old)  # with what does not belong there, which is refused
    for kind, theta in ((FULL, "rope_theta"), (SLIDING, "rope_local_base_freq")):
        check_dict(f"config.json: rope_parameters: {kind}", old.get(kind))
        check_dict(f"hf_overrides: rope_parameters: {kind}", new.get(kind))
        scaling = (raw.get("rope_scaling") or {}) if kind == FULL else {}
        fields = {"rope_parameters": {**(old.get(kind) or {}), **scaling}, "rope_theta": raw.get(theta)}
        others = {"rope_theta": given[theta]} if theta in given else {}
        others |= {"rope_parameters": new.get(kind)} if is_replaced else {}
        others |= {"rope_scaling": given["rope_scaling"]} if kind == FULL and "rope_scaling" in given else {}
        found = override_positions(fields, others)
        ropes[kind] = {**(found.pop("rope_parameters") or {}), **found}
    merged = {name: value for name, value in raw.items() if name not in POSITIONS}
    share = first_given(given.get("partial_rotary_factor"), raw.get("partial_rotary_factor"))
    return {**merged, "partial_rotary_factor": share, "rope_parameters": ropes}


class UnitOffsetRMSNorm(RMSNorm):
    """The weight is stored as its difference from one, and only the product is rounded."""

    neutral_weight = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normalised = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normalised * (1.0 + self.weight.float())).to(x.dtype)


class Gemma3Attention(LlamaAttention):
    def __init__(self, config: Gemma3Config, backend: TorchAttention, layer: int) -> None:
        super().__init__(config, backend, layer)
        self.q_norm = UnitOffsetRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = UnitOffsetRMSNorm(config.head_dim, config.rms_norm_eps)


class Gemma3DecoderLayer(nn.Module):
    def __init__(self, config: Gemma3Config, backend: TorchAttention, layer: int) -> None:
        super().__init__()
        self.input_layernorm = UnitOffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Gemma3Attention(config, backend, layer)
        self.post_attention_layernorm = UnitOffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = UnitOffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.post_feedforward_layernorm = UnitOffsetRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3Model(DecoderModel):
    def __init__(self, config: Gemma3Config, backend: TorchAttention, layer_class: LayerClass) -> None:
        super().__init__(config, backend, layer_class)
        self.embed_scale = math.sqrt(config.hidden_size)
        self.local_rotary = ScaledRotary(config.head_dim, config.local_rope, config.max_position_embeddings)
        self.windows = [options.window for options in config.attention_options]
        self.norm = UnitOffsetRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        x = x * torch.tensor(self.embed_scale, dtype=x.dtype)  # rounded to the model's dtype before the product
        global_angles, local_angles = self.rotary(positions, x.dtype), self.local_rotary(positions, x.dtype)
        for i, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            cos, sin = global_angles if window is None else local_angles  # [num_tokens, 1, head_dim / 2] each
            x = layer(x, cos, sin, kv_cache[:, i], metadata_of(metadata, i))
        return self.norm(x)  # [num_tokens, hidden_size]


class SoftCappedLM(CausalLM):
    """A network whose logits may be bounded, as those of Gemma 3 and 4."""

    read_config: Callable[..., NetworkConfig]
    is_length_scaled = True

    def __init__(self, config: Any, backend: TorchAttention) -> None:
        super().__init__(config, backend)
        self.softcap = config.final_logit_softcapping

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: [num_rows, hidden_size] -> [num_rows, vocab_size], bounded by the softcap if there is one"""
        logits = super().compute_logits(hidden)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class Gemma3ForCausalLM(SoftCappedLM):
    read_config = staticmethod(read_gemma3_config)
    override_positions = staticmethod(override_ropes)
    layer_class = Gemma3DecoderLayer
    model_class = Gemma3Model
