"""Llama 2, 3, 3.1 and 3.2 (Touvron et al. 2023, https://arxiv.org/abs/2302.13971; Llama 3: https://arxiv.org/abs/2407.21783),
and Mistral (Jiang et al. 2023, https://arxiv.org/abs/2310.06825), whose layers all have a sliding window.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + mlp(norm(x)) ] → norm → logits

The decoder that most others vary: what Qwen3 does to queries and keys before they are rotated is not done here.
"""

from typing import Any

from torch import Tensor, nn

from nanovllm.checks import check_bool
from nanovllm.extras.models.window_layers import SLIDING, read_windows
from nanovllm.layers.attention import Attention, AttentionMetadata
from nanovllm.layers.backends import AttentionBackend
from nanovllm.layers.linear import FusedLinear, Linear
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import ApplyRotary
from nanovllm.models.config import ModelConfig, read_common, read_rope, refuse_partial_rotary
from nanovllm.models.decoder import CausalLM


def read_llama_config(raw: dict[str, Any]) -> ModelConfig:
    common = read_common(raw, max_position_embeddings=2048)
    refuse_partial_rotary(raw)
    rope = read_rope(raw, common["head_dim"], common["max_position_embeddings"])
    mlp_bias = raw.get("mlp_bias") or False
    check_bool("config.json: mlp_bias", mlp_bias)
    return ModelConfig(**common, rope=rope, mlp_bias=mlp_bias)


def read_mistral_config(raw: dict[str, Any]) -> ModelConfig:
    common = read_common(raw, max_position_embeddings=131072, num_key_value_heads=8)
    common["qkv_bias"] = common["o_bias"] = False  # Mistral has none, whatever the file says
    refuse_partial_rotary(raw)
    window = raw.get("sliding_window", 4096)
    windows = {} if window is None else read_windows([SLIDING] * common["num_hidden_layers"], window)
    rope = read_rope(raw, common["head_dim"], common["max_position_embeddings"])
    return ModelConfig(**common, rope=rope, **windows)


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=config.qkv_bias)
        self.rotate = ApplyRotary()
        self.attention = Attention(backend, *config.options(layer))
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.o_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv_proj(x))  # [num_tokens, heads, head_dim]
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        return self.o_proj(self.attention(q, k, v, layer_cache, metadata).flatten(1))  # [num_tokens, hidden_size]


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, layer: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, backend, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))  # [num_tokens, hidden_size]


class LlamaForCausalLM(CausalLM):
    read_config = staticmethod(read_llama_config)
    layer_class = LlamaDecoderLayer


class MistralForCausalLM(LlamaForCausalLM):
    """The same network; its config gives each layer a window."""

    read_config = staticmethod(read_mistral_config)
