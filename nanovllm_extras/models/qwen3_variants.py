"""Qwen3 with a sliding window in some layers, or with rotary positions for longer contexts.

A checkpoint with neither is computed by the core's own `models/qwen3.py`.
"""

from torch import nn

from nanovllm.layers.attention import TorchAttention
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3ForCausalLM
from nanovllm_extras.models.decoder import CausalLM
from nanovllm_extras.models.gated_mlp import GatedMLP
from nanovllm_extras.models.masking import make_attention
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_common, read_rope, refuse_partial_rotary
from nanovllm_extras.models.rope import Rope
from nanovllm_extras.models.window_layers import read_qwen_windows


def read_qwen3_config(raw: RawConfig, head_dim: int | None = 128) -> NetworkConfig:
    """Read a Qwen3 config.json. Missing fields get the defaults of transformers."""
    common = read_common(raw, max_position_embeddings=32768, num_key_value_heads=32, head_dim=head_dim)
    refuse_partial_rotary(raw)
    rope = read_rope(raw, common["head_dim"], common["max_position_embeddings"])
    all_full = ["full_attention"] * common["num_hidden_layers"]
    layer_types = raw.get("layer_types") or all_full
    has_windows = bool(raw.get("use_sliding_window")) or layer_types[: len(all_full)] != all_full
    windows = read_qwen_windows(raw) if has_windows else {}
    return NetworkConfig(**common, rope=rope, rope_theta=rope.theta, **windows)  # the core's network reads `rope_theta`


def choose_qwen3(config: NetworkConfig) -> type[nn.Module]:
    """Return the core's network if it computes all that `config` asks for, else the one below."""
    is_plain = type(config.rope) is Rope and config.hidden_act == "silu" and not config.attention_options
    return Qwen3ForCausalLM if is_plain else Qwen3VariantForCausalLM


class Qwen3VariantAttention(Qwen3Attention):
    def __init__(self, config: NetworkConfig, backend: TorchAttention, layer: int) -> None:
        super().__init__(config, backend)
        self.attention = make_attention(backend, config.options(layer))


class Qwen3VariantDecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config: NetworkConfig, backend: TorchAttention, layer: int = 0) -> None:
        super().__init__(config, backend)
        self.self_attn = Qwen3VariantAttention(config, backend, layer)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)


class Qwen3VariantForCausalLM(CausalLM):
    read_config = staticmethod(read_qwen3_config)
    choose = staticmethod(choose_qwen3)
    layer_class = Qwen3VariantDecoderLayer
