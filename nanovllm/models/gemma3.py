"""Gemma 3, text (Gemma Team 2025, https://arxiv.org/abs/2503.19786).

    token ids → embedding · sqrt(hidden_size) → num_layers × [ x + norm(attention(norm(x))),  x + norm(mlp(norm(x))) ]
      → norm → logits, perhaps soft-capped

Most layers see a window only, every sixth sees all; each kind has rotary positions of its own. There is a norm before
and behind each half of a layer, queries and keys are normalised, and weights of norms are differences from one.
"""

import math

import torch
from torch import nn

from nanovllm.layers.attention import Attention, AttentionMetadata, Backend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import FusedLinear, Linear
from nanovllm.layers.masking import AttentionOptions
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import UnitOffsetRMSNorm
from nanovllm.layers.rotary import Rotary, UnitOffsetRMSNormRotary
from nanovllm.models.gemma3_config import Gemma3Config, read_gemma3_config


class Gemma3Attention(nn.Module):
    def __init__(self, config: Gemma3Config, backend: Backend, window: int | None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = UnitOffsetRMSNormRotary(config.head_dim, config.rms_norm_eps)
        self.k_norm = UnitOffsetRMSNormRotary(config.head_dim, config.rms_norm_eps)
        scale = config.query_pre_attn_scalar**-0.5
        self.attention = Attention(backend, AttentionOptions(scale, window))

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv_proj(x))  # [num_tokens, heads, head_dim]
        q, k = self.q_norm(q, cos, sin), self.k_norm(k, cos, sin)
        return self.o_proj(self.attention(q, k, v, layer_cache, metadata).flatten(1))  # [num_tokens, hidden_size]


class Gemma3DecoderLayer(nn.Module):
    def __init__(self, config: Gemma3Config, backend: Backend, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = UnitOffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Gemma3Attention(config, backend, window)
        self.post_attention_layernorm = UnitOffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = UnitOffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.post_feedforward_layernorm = UnitOffsetRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3Model(nn.Module):
    def __init__(self, config: Gemma3Config, backend: Backend) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.embed_scale = math.sqrt(config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope, config.max_position_embeddings)
        self.local_rotary = Rotary(config.head_dim, config.local_rope, config.max_position_embeddings)
        self.windows = [config.window(i) for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(Gemma3DecoderLayer(config, backend, window) for window in self.windows)
        self.norm = UnitOffsetRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        x = x * torch.tensor(self.embed_scale, dtype=x.dtype)  # rounded to the model's dtype before the product
        global_angles, local_angles = self.rotary(positions, x.dtype), self.local_rotary(positions, x.dtype)
        for i, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            cos, sin = global_angles if window is None else local_angles  # [num_tokens, 1, head_dim / 2] each
            x = layer(x, cos, sin, kv_cache[:, i], metadata)
        return self.norm(x)  # [num_tokens, hidden_size]


class Gemma3ForCausalLM(nn.Module):
    """Called as `model(input_ids, positions, metadata, kv_cache)`, as `CausalLM` in `registry.py` says."""

    read_config = staticmethod(read_gemma3_config)

    def __init__(self, config: Gemma3Config, backend: Backend) -> None:
        super().__init__()
        self.softcap = config.final_logit_softcapping
        self.model = Gemma3Model(config, backend)
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Embedding(config.vocab_size, config.hidden_size)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        return self.model(input_ids, positions, metadata, kv_cache)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size], between -softcap and softcap, if there is one"""
        logits = self.lm_head.logits(hidden)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap
