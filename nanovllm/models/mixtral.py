"""Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088): Llama's decoder with experts.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + experts(norm(x)) ] → norm → logits

Attention is Llama's (`llama.py`). Each token goes through two of eight large experts; checkpoints call the three
matrices of an expert w1 (gate), w3 (up) and w2 (down).
"""

import torch
from torch import nn

from nanovllm.layers.activation import GATES
from nanovllm.layers.attention import AttentionMetadata, Backend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import FusedLinear
from nanovllm.layers.moe import Experts, Router, route_by_softmax
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import Rotary
from nanovllm.models.llama import LlamaAttention
from nanovllm.models.moe_config import MoeConfig, read_mixtral_config


class MixtralExpert(nn.Module):
    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        size = config.moe_intermediate_size
        self.gate_up_proj = FusedLinear(config.hidden_size, {"w1": size, "w3": size})
        self.activation = GATES[config.hidden_act]()
        self.down_proj = FusedLinear(size, {"w2": config.hidden_size})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = self.down_proj(self.activation(*self.gate_up_proj(x)))
        return y  # [n, hidden_size]


class MixtralBlock(nn.Module):
    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = Router(config.hidden_size, config.num_experts)
        self.experts = Experts(MixtralExpert(config) for _ in range(config.num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert_ids, weights = route_by_softmax(self.gate(x), self.top_k, is_normalised=True)  # [num_tokens, top_k]
        return self.experts(x, expert_ids, weights)  # [num_tokens, hidden_size]


class MixtralDecoderLayer(nn.Module):
    def __init__(self, config: MoeConfig, backend: Backend, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, backend, window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = MixtralBlock(config)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        return x + self.block_sparse_moe(self.post_attention_layernorm(x))  # [num_tokens, hidden_size]


class MixtralModel(nn.Module):
    def __init__(self, config: MoeConfig, backend: Backend) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope, config.max_position_embeddings)
        windows = (config.window(i) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(MixtralDecoderLayer(config, backend, window) for window in windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        cos, sin = self.rotary(positions, x.dtype)  # [num_tokens, 1, head_dim / 2] each
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, kv_cache[:, i], metadata)
        return self.norm(x)  # [num_tokens, hidden_size]


class MixtralForCausalLM(nn.Module):
    """Called as `model(input_ids, positions, metadata, kv_cache)`, as `CausalLM` in `registry.py` says."""

    read_config = staticmethod(read_mixtral_config)

    def __init__(self, config: MoeConfig, backend: Backend) -> None:
        super().__init__()
        self.model = MixtralModel(config, backend)
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Embedding(config.vocab_size, config.hidden_size)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        return self.model(input_ids, positions, metadata, kv_cache)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size]"""
        return self.lm_head.logits(hidden)
