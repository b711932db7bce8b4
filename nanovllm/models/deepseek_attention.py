"""The attention of DeepSeek-V2 and V3 (https://arxiv.org/abs/2405.04434, figure 3): what is projected and cached.

    x → query of each head, by way of a latent of its own in the larger models
    x → latent, and one key that is rotated                               these two are cached

`layers/latent_attention.py` explains how heads attend to the latents themselves. A head's query and key have a part
that is rotated and one that is not. The rotated part of the keys is the same for all heads, the other comes from the
latent.
"""

import torch
from torch import nn

from nanovllm.layers.attention import Attention, AttentionMetadata, Backend
from nanovllm.layers.latent_attention import UpProjection, deinterleave
from nanovllm.layers.linear import Linear
from nanovllm.layers.masking import AttentionOptions
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import ApplyRotary
from nanovllm.models.deepseek_config import DeepseekConfig


class DeepseekAttention(nn.Module):
    def __init__(self, config: DeepseekConfig, backend: Backend) -> None:
        super().__init__()
        self.config, size, heads = config, config.hidden_size, config.num_attention_heads
        self.split = (config.qk_nope_head_dim, config.qk_rope_head_dim)
        q_rank, rank, bias = config.q_lora_rank, config.kv_lora_rank, config.o_bias
        if q_rank is None:
            self.q_proj = Linear(size, heads * sum(self.split))
        else:
            self.q_a_proj = Linear(size, q_rank, bias)
            self.q_a_layernorm = RMSNorm(q_rank, eps=1e-6)
            self.q_b_proj = Linear(q_rank, heads * sum(self.split))
        self.kv_a_proj_with_mqa = Linear(size, config.head_dim, bias)
        self.kv_a_layernorm = RMSNorm(rank, eps=1e-6)
        self.kv_b_proj = UpProjection(heads, config.qk_nope_head_dim, config.v_head_dim, rank)
        self.rotate = ApplyRotary()
        self.attention = Attention(backend, AttentionOptions(scale=config.score_scale))
        self.o_proj = Linear(heads * config.v_head_dim, size, bias)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, num_heads * (qk_nope_head_dim + qk_rope_head_dim)]"""
        if self.config.q_lora_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, num_heads, qk_rope_head_dim] -> the same shape"""
        return self.rotate(deinterleave(x) if self.config.rope_interleave else x.contiguous(), cos, sin)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        rank = self.config.kv_lora_rank
        q, q_rope = self.queries(x).unflatten(-1, (-1, sum(self.split))).split(self.split, dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((rank, self.split[1]), dim=-1)  # [num_tokens, rank | rope]
        q = torch.cat((self.kv_b_proj.absorb(q), self.rotated(q_rope, cos, sin)), dim=-1)
        k = torch.cat((self.kv_a_layernorm(latent)[:, None], self.rotated(k_rope[:, None], cos, sin)), dim=-1)
        # q: [num_tokens, num_heads, head_dim], k: [num_tokens, 1, head_dim], out: [num_tokens, num_heads, rank]
        out = self.attention(q, k, k[..., :rank], layer_cache, metadata)
        return self.o_proj(self.kv_b_proj.values(out).flatten(1))  # [num_tokens, hidden_size]
