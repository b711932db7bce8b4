"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434) and V3 (https://arxiv.org/abs/2412.19437): latent attention, whose
cache holds one small latent for each token, and experts, some of which every token goes through.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + experts(norm(x)) ] → norm → logits

Attention is in `deepseek_attention.py`; `layers/group_routing.py` explains how experts are chosen.
"""

import re
from typing import Any

import torch
from torch import nn

from nanovllm.layers.attention import AttentionMetadata, Backend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.group_routing import SigmoidRouter, route_by_sigmoid_in_groups, route_by_softmax_in_groups
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.moe import Experts, Router
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import Rotary
from nanovllm.models.deepseek_attention import DeepseekAttention
from nanovllm.models.deepseek_config import DeepseekConfig, read_deepseek_v2_config, read_deepseek_v3_config

ROUTERS = {"softmax": Router, "sigmoid": SigmoidRouter}  # by `scoring_func`


class DeepseekBlock(nn.Module):
    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        size, inner, activation = config.hidden_size, config.moe_intermediate_size, config.hidden_act
        self.gate: Any = ROUTERS[config.scoring_func](size, config.num_experts)
        self.experts = Experts(GatedMLP(size, inner, activation) for _ in range(config.num_experts))
        self.shared_experts = GatedMLP(size, inner * config.n_shared_experts, activation, config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c, scores = self.config, self.gate(x)  # [num_tokens, num_experts]
        groups = (c.num_experts_per_tok, c.n_group, c.topk_group)
        if c.scoring_func == "softmax":  # V2
            expert_ids, weights = route_by_softmax_in_groups(scores, *groups)  # [num_tokens, top_k] each
        else:  # V3
            bias = self.gate.e_score_correction_bias
            expert_ids, weights = route_by_sigmoid_in_groups(scores, bias, *groups, c.norm_topk_prob)
        weights = weights * c.routed_scaling_factor
        return self.experts(x, expert_ids, weights) + self.shared_experts(x)  # [num_tokens, hidden_size]


class DeepseekDecoderLayer(nn.Module):
    def __init__(self, config: DeepseekConfig, backend: Backend, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DeepseekAttention(config, backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = (config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)
        self.mlp = GatedMLP(*dense) if layer < config.first_k_dense_replace else DeepseekBlock(config)

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


class DeepseekModel(nn.Module):
    def __init__(self, config: DeepseekConfig, backend: Backend) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.qk_rope_head_dim, config.rope, config.max_position_embeddings)
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(DeepseekDecoderLayer(config, backend, i) for i in numbers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        cos, sin = self.rotary(positions, x.dtype)  # [num_tokens, 1, qk_rope_head_dim / 2] each
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, kv_cache[:, i], metadata)
        return self.norm(x)  # [num_tokens, hidden_size]


class DeepseekV2ForCausalLM(nn.Module):
    """Called as `model(input_ids, positions, metadata, kv_cache)`, as `CausalLM` in `registry.py` says."""

    read_config = staticmethod(read_deepseek_v2_config)

    def __init__(self, config: DeepseekConfig, backend: Backend) -> None:
        super().__init__()
        self.model = DeepseekModel(config, backend)
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Embedding(config.vocab_size, config.hidden_size)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        return self.model(input_ids, positions, metadata, kv_cache)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size]"""
        return self.lm_head.logits(hidden)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """The same network; its config has another routing rule, and may rotate other pairs of channels."""

    read_config = staticmethod(read_deepseek_v3_config)

    def is_unused(self, name: str) -> bool:
        """Whether a tensor belongs to the layers behind the last, which predict further tokens and are not run here."""
        number = re.match(r"model\.layers\.(\d+)\.", name)
        return number is not None and int(number[1]) >= len(self.model.layers)
