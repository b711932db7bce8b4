"""Phi-3 and Phi-4-mini (Abdin et al. 2024, https://arxiv.org/abs/2404.14219).

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + mlp(norm(x)) ] → norm → logits

Three things differ from `llama.py`: q, k and v are one tensor in the checkpoint, and so are gate and up; only the
first part of each head may be rotated (partial rotary); long contexts have LongRoPE's factors.
"""

from typing import Any

from torch import Tensor, nn

from nanovllm.checks import check_number
from nanovllm.extras.models.window_layers import SLIDING, read_windows
from nanovllm.layers.attention import Attention, AttentionMetadata
from nanovllm.layers.backends import AttentionBackend
from nanovllm.layers.linear import FusedLinear, Linear
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import ApplyRotary
from nanovllm.models.config import ModelConfig, read_common, read_rope, rope_type_of
from nanovllm.models.decoder import CausalLM


def read_phi3_config(raw: dict[str, Any]) -> ModelConfig:
    common = read_common(raw, max_position_embeddings=4096, rms_norm_eps=1e-5)
    common["qkv_bias"] = common["o_bias"] = False  # Phi-3 has none, whatever the file says
    window = raw.get("sliding_window")
    windows = {} if window is None else read_windows([SLIDING] * common["num_hidden_layers"], window)
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    share = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    check_number("config.json: partial_rotary_factor", share, 0, 1, open_low=True)
    rotary_dim = int(common["head_dim"] * share)
    if rope_type_of(parameters) in ("su", "yarn"):  # what early files call LongRoPE
        raw = {**raw, "rope_scaling": {**parameters, "rope_type": "longrope"}}
    raw = {"original_max_position_embeddings": 4096, **raw}
    rope = read_rope(raw, rotary_dim, common["max_position_embeddings"])
    return ModelConfig(**common, rope=rope, rotary_dim=rotary_dim, **windows)


class Phi3Attention(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, layer: int) -> None:
        super().__init__()
        self.head_dim, self.rotary_dim = config.head_dim, config.rotary_dim or config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts)
        self.qkv_proj.is_stored_fused = True
        self.rotate = ApplyRotary()
        self.attention = Attention(backend, *config.options(layer))
        self.o_proj = Linear(q_size, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv_proj(x))  # [num_tokens, heads, head_dim]
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        return self.o_proj(self.attention(q, k, v, layer_cache, metadata).flatten(1))  # [num_tokens, hidden_size]


class Phi3DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend, layer: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Phi3Attention(config, backend, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.mlp.gate_up_proj.is_stored_fused = True

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))  # [num_tokens, hidden_size]


class Phi3ForCausalLM(CausalLM):
    read_config = staticmethod(read_phi3_config)
    layer_class = Phi3DecoderLayer
