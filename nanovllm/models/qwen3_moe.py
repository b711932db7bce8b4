"""Qwen3 with experts (Qwen3 Technical Report 2025, https://arxiv.org/abs/2505.09388): Qwen3-30B-A3B, 235B-A22B.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + experts(norm(x)) ] → norm → logits

Attention is Qwen3's (`qwen3.py`). In the place of one feed-forward network are many small ones, of which each token
goes through `num_experts_per_tok`.
"""

import torch
from torch import nn

from nanovllm.layers.attention import AttentionMetadata, Backend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.moe import Experts, Router, route_by_softmax
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import Rotary
from nanovllm.models.moe_config import MoeConfig, read_qwen3_moe_config
from nanovllm.models.qwen3 import Qwen3Attention


class Qwen3MoeBlock(nn.Module):
    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.top_k, self.is_normalised = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Router(config.hidden_size, config.num_experts)
        size = (config.hidden_size, config.moe_intermediate_size, config.hidden_act)
        self.experts = Experts(GatedMLP(*size) for _ in range(config.num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert_ids, weights = route_by_softmax(self.gate(x), self.top_k, self.is_normalised)  # [num_tokens, top_k]
        return self.experts(x, expert_ids, weights)  # [num_tokens, hidden_size]


class Qwen3MoeDecoderLayer(nn.Module):
    def __init__(self, config: MoeConfig, backend: Backend, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, backend, config.window(layer))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        is_dense = layer in config.dense_layers
        dense = (config.hidden_size, config.intermediate_size, config.hidden_act)
        self.mlp = GatedMLP(*dense) if is_dense else Qwen3MoeBlock(config)

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


class Qwen3MoeModel(nn.Module):
    def __init__(self, config: MoeConfig, backend: Backend) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope, config.max_position_embeddings)
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(Qwen3MoeDecoderLayer(config, backend, i) for i in numbers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        cos, sin = self.rotary(positions, x.dtype)  # [num_tokens, 1, head_dim / 2] each
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, kv_cache[:, i], metadata)
        return self.norm(x)  # [num_tokens, hidden_size]


class Qwen3MoeForCausalLM(nn.Module):
    """Called as `model(input_ids, positions, metadata, kv_cache)`, as `CausalLM` in `registry.py` says."""

    read_config = staticmethod(read_qwen3_moe_config)

    def __init__(self, config: MoeConfig, backend: Backend) -> None:
        super().__init__()
        self.model = Qwen3MoeModel(config, backend)
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Embedding(config.vocab_size, config.hidden_size)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        return self.model(input_ids, positions, metadata, kv_cache)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size]"""
        return self.lm_head.logits(hidden)
