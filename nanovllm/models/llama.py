"""Llama 2, 3, 3.1 and 3.2 (Touvron et al. 2023, https://arxiv.org/abs/2302.13971; Llama 3: https://arxiv.org/abs/2407.21783),
and Mistral (Jiang et al. 2023, https://arxiv.org/abs/2310.06825), whose layers all have a sliding window.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + mlp(norm(x)) ] → norm → logits

The decoder that most others vary: what Qwen3 does to queries and keys before they are rotated is not done here.
"""

from typing import Any

import torch
from torch import nn

from nanovllm.checks import check_bool
from nanovllm.layers.attention import Attention, AttentionMetadata, Backend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import FusedLinear, Linear
from nanovllm.layers.masking import AttentionOptions
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import ApplyRotary, Rotary
from nanovllm.models.config import SLIDING, ModelConfig, read_common, read_windows
from nanovllm.models.rope_config import read_rope, refuse_partial_rotary


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
    windows = () if window is None else read_windows([SLIDING] * common["num_hidden_layers"], window)
    rope = read_rope(raw, common["head_dim"], common["max_position_embeddings"])
    return ModelConfig(**common, rope=rope, windows=windows)


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, backend: Backend, window: int | None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=config.qkv_bias)
        self.rotate = ApplyRotary()
        self.attention = Attention(backend, AttentionOptions(window=window))
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.o_bias)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv_proj(x))  # [num_tokens, heads, head_dim]
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        return self.o_proj(self.attention(q, k, v, layer_cache, metadata).flatten(1))  # [num_tokens, hidden_size]


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, backend: Backend, window: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, backend, window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))  # [num_tokens, hidden_size]


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope, config.max_position_embeddings)
        windows = (config.window(i) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, backend, window) for window in windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        cos, sin = self.rotary(positions, x.dtype)  # [num_tokens, 1, head_dim / 2] each
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, kv_cache[:, i], metadata)
        return self.norm(x)  # [num_tokens, hidden_size]


class LlamaForCausalLM(nn.Module):
    """Called as `model(input_ids, positions, metadata, kv_cache)`, as `CausalLM` in `registry.py` says."""

    read_config = staticmethod(read_llama_config)

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__()
        self.model = LlamaModel(config, backend)
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Embedding(config.vocab_size, config.hidden_size)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        return self.model(input_ids, positions, metadata, kv_cache)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size]"""
        return self.lm_head.logits(hidden)


class MistralForCausalLM(LlamaForCausalLM):
    """The same network; its config gives each layer a window."""

    read_config = staticmethod(read_mistral_config)
