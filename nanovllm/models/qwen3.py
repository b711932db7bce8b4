"""Qwen3, dense (Qwen3 Technical Report 2025, https://arxiv.org/abs/2505.09388): a decoder with grouped-query attention,
RMS-normalised queries and keys, rotary positions, and a SwiGLU feed-forward network.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + mlp(norm(x)) ] → norm → logits

Reads from top to bottom: config, attention, layer, model; what surrounds the layers is in `decoder.py`. All tokens of a
batch lie end to end in one dimension, whatever sequence they belong to: only `Attention` tells them apart, by
`metadata`.
"""

from typing import Any

from torch import Tensor, nn

from nanovllm.checks import extra
from nanovllm.layers.attention import Attention, AttentionMetadata
from nanovllm.layers.backends import AttentionBackend
from nanovllm.layers.linear import FusedLinear, Linear
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import ApplyRotary
from nanovllm.models.config import ModelConfig, read_common, read_rope, refuse_partial_rotary
from nanovllm.models.decoder import CausalLM


def read_qwen3_config(raw: dict[str, Any], head_dim: int | None = 128) -> ModelConfig:
    """What config.json leaves out means what it means to transformers."""
    common = read_common(raw, max_position_embeddings=32768, num_key_value_heads=32, head_dim=head_dim)
    refuse_partial_rotary(raw)
    rope = read_rope(raw, common["head_dim"], common["max_position_embeddings"])
    all_full = ["full_attention"] * common["num_hidden_layers"]
    layer_types = raw.get("layer_types") or all_full
    if not raw.get("use_sliding_window") and layer_types[: len(all_full)] == all_full:
        return ModelConfig(**common, rope=rope)
    with extra("extras/models/window_layers.py", "a layer that sees only a window of tokens"):
        from nanovllm.extras.models.window_layers import read_qwen_windows
    return ModelConfig(**common, rope=rope, **read_qwen_windows(raw))


class Qwen3Attention(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=config.qkv_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.rotate = ApplyRotary()
        self.attention = Attention(backend, *config.options(layer))
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.o_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv_proj(x))  # [num_tokens, heads, head_dim]
        q, k = self.q_norm(q), self.k_norm(k)  # each head by itself
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        return self.o_proj(self.attention(q, k, v, layer_cache, metadata).flatten(1))  # [num_tokens, hidden_size]


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, layer: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, backend, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))  # [num_tokens, hidden_size]


class Qwen3ForCausalLM(CausalLM):
    read_config = staticmethod(read_qwen3_config)
    layer_class = Qwen3DecoderLayer
