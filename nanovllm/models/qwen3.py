"""Qwen3, dense (Qwen3 Technical Report 2025, https://arxiv.org/abs/2505.09388): a decoder with grouped-query attention,
RMS-normalised queries and keys, rotary positions, and a SwiGLU feed-forward network.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + mlp(norm(x)) ] → norm → logits

Reads from top to bottom: attention, the layer, the model. All tokens of a batch lie end to end in one dimension,
whatever sequence they belong to: only `Attention` tells them apart, by `metadata`. The modules have the names that
they have in the checkpoint. The loader fills in the weights; `ModelRunner` calls the model.
"""

import torch
from torch import nn

from nanovllm.layers.attention import Attention, AttentionMetadata, Backend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import FusedLinear, Linear
from nanovllm.layers.masking import AttentionOptions
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RMSNormRotary, Rotary
from nanovllm.models.config import ModelConfig
from nanovllm.models.qwen_config import read_qwen3_config


class Qwen3Attention(nn.Module):
    def __init__(self, config: ModelConfig, backend: Backend, window: int | None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNormRotary(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNormRotary(config.head_dim, config.rms_norm_eps)
        self.attention = Attention(backend, AttentionOptions(window=window))

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


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, backend: Backend, window: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, backend, window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)

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


class Qwen3Model(nn.Module):
    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope, config.max_position_embeddings)
        windows = (config.window(i) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, backend, window) for window in windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        cos, sin = self.rotary(positions, x.dtype)  # [num_tokens, 1, head_dim / 2] each
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, kv_cache[:, i], metadata)
        return self.norm(x)  # [num_tokens, hidden_size]


class Qwen3ForCausalLM(nn.Module):
    """Called as `model(input_ids, positions, metadata, kv_cache)`; see `forward`."""

    read_config = staticmethod(read_qwen3_config)

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__()
        self.model = Qwen3Model(config, backend)
        # with tied embeddings both names stand for one module, and so for one tensor
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Embedding(config.vocab_size, config.hidden_size)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """input_ids, positions: [num_tokens]; kv_cache: [2, num_layers, num_blocks, …], as the backend shapes it

        Returns hidden states [num_tokens, hidden_size], and writes the K and V of all new tokens to the cache.
        """
        return self.model(input_ids, positions, metadata, kv_cache)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size]; a method of its own, because few tokens need logits"""
        return self.lm_head.logits(hidden)
