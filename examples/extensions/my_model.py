"""A network of one's own: OLMo 2, from config.json to the first token.

OLMo 2 (Team OLMo 2024, https://arxiv.org/abs/2501.00656) is a decoder that this repository's packages lack. It differs
from Qwen3 in three things, and everything else is taken from `nanovllm/models/qwen3.py`, which is worth reading first:

                        Qwen3                                   OLMo 2
    a layer             x + attention(norm(x))                  x + norm(attention(x))
    queries and keys    each head is normalised                 all heads are normalised as one vector
    norms               round, then multiply by the weight      multiply by the weight, then round

What a network needs: `read_config`; modules with the names of the checkpoint, in which `FusedLinear` is several
projections as one product; `forward` over all tokens of a batch, whatever sequence they belong to; `compute_logits`.
Paging, batching, prefix caching and CUDA graphs then work without further code. Norms of one's own have no fast
versions, so each takes several launches.

    nanovllm serve allenai/OLMo-2-0425-1B --extension examples/extensions/my_model.py
    LLM("OLMo-2-0425-1B", extension="examples/extensions/my_model.py")
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.layers.basic import GatedMLP, RMSNorm
from nanovllm.models.qwen3 import ModelConfig, Qwen3Attention, Qwen3ForCausalLM, read_qwen3_config

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "num_key_value_heads": None}


def read_olmo2_config(raw: dict[str, Any]) -> ModelConfig:
    """Read a config.json. Missing fields get OLMo 2's defaults, and other fields are those of Qwen3."""
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return read_qwen3_config({**DEFAULTS, **raw, "head_dim": head_dim})


class Olmo2RMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normalised = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * normalised).to(x.dtype)


class Olmo2Attention(Qwen3Attention):
    def __init__(self, config: ModelConfig, backend: TorchAttention) -> None:
        super().__init__(config, backend)
        self.q_norm = Olmo2RMSNorm(config.num_attention_heads * config.head_dim, config.rms_norm_eps)
        self.k_norm = Olmo2RMSNorm(config.num_key_value_heads * config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        q, k, v = self.qkv_proj(x)  # [num_tokens, heads * head_dim] each
        parts = self.q_norm(q), self.k_norm(k), v
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in parts)  # [num_tokens, heads, head_dim] each
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        return self.o_proj(self.attention(q, k, v, layer_cache, metadata).flatten(1))  # [num_tokens, hidden_size]


class Olmo2DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, backend: TorchAttention) -> None:
        super().__init__()
        self.self_attn = Olmo2Attention(config, backend)
        self.post_attention_layernorm = Olmo2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.post_feedforward_layernorm = Olmo2RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, cos, sin, layer_cache, metadata))
        return x + self.post_feedforward_layernorm(self.mlp(x))  # [num_tokens, hidden_size]


class Olmo2ForCausalLM(Qwen3ForCausalLM):
    """The frame is that of Qwen3: embedding, rotary positions, a loop over layers, final norm, logits."""

    read_config = staticmethod(read_olmo2_config)

    def __init__(self, config: ModelConfig, backend: TorchAttention) -> None:
        super().__init__(config, backend)
        self.model.layers = nn.ModuleList(Olmo2DecoderLayer(config, backend) for _ in range(config.num_hidden_layers))
        self.model.norm = Olmo2RMSNorm(config.hidden_size, config.rms_norm_eps)


models = {"Olmo2ForCausalLM": Olmo2ForCausalLM}
