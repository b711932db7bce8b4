"""Qwen3, dense (Qwen3 Technical Report 2025, https://arxiv.org/abs/2505.09388): a decoder with grouped-query attention,
RMS-normalised queries and keys, rotary positions, and a SwiGLU feed-forward network.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + mlp(norm(x)) ] → norm → logits

Reads from top to bottom: the configuration, the two halves of a layer, the layer, the model. All tokens of a batch lie
end to end in one dimension, whatever sequence they belong to: only `Attention` tells them apart. The modules
have the names that they have in the checkpoint. Weights are filled in by `loader.py`; called by `ModelRunner`.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import nn

from nanovllm.batch import Batch
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import FusedLinear, Linear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RMSNormRotary, Rotary


@dataclass(frozen=True)
class Qwen3Config:
    """The shape of the network, by the names of config.json. What a file leaves out is as in transformers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    initializer_range: float = 0.02
    dtype: str = "float32"

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Qwen3Config":
        """Read config.json as transformers 4 or 5 writes it; ValueError for what this model would compute wrongly."""
        known = {f.name: raw[f.name] for f in fields(cls) if raw.get(f.name) is not None}
        if missing := [f.name for f in fields(cls) if f.default is MISSING and f.name not in known]:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        if raw.get("num_key_value_heads", 0) is None:  # present and null: every head has its own
            known["num_key_value_heads"] = known["num_attention_heads"]
        # transformers 5 keeps theta inside rope_parameters; 4 keeps it outside, and scaling in rope_scaling
        rope = raw.get("rope_parameters") or {}
        for one in (rope, raw.get("rope_scaling") or {}):
            rope_type = one.get("rope_type", one.get("type", "default"))
            if rope_type != "default" or one.get("partial_rotary_factor", 1.0) != 1.0:
                raise ValueError(f"rope scaling is not supported, only rope_type 'default'; config.json has {one}")
        if raw.get("use_sliding_window") or set(raw.get("layer_types") or []) - {"full_attention"}:
            raise ValueError("sliding-window attention is not supported; config.json asks for it")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act must be 'silu', config.json has {raw['hidden_act']!r}")
        known["rope_theta"] = float(rope.get("rope_theta", known.get("rope_theta", cls.rope_theta)))
        known["dtype"] = str(raw.get("dtype") or raw.get("torch_dtype") or cls.dtype).removeprefix("torch.")
        config = cls(**known)
        if config.num_attention_heads % config.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"config.json has {config.num_attention_heads} and {config.num_key_value_heads}"
            )
        return config


class Qwen3Attention(nn.Module):
    def __init__(self, config: Qwen3Config, backend: AttentionBackend) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=config.attention_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNormRotary(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNormRotary(config.head_dim, config.rms_norm_eps)
        self.attention = Attention(backend)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv_proj(x))  # [num_tokens, heads, head_dim]
        q, k = self.q_norm(q, cos, sin), self.k_norm(k, cos, sin)
        return self.o_proj(self.attention(q, k, v, layer_cache, batch).flatten(1))  # [num_tokens, hidden_size]


class Qwen3MLP(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts)
        self.activation = SiluAndMul()
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(*self.gate_up_proj(x)))  # [num_tokens, hidden_size]


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config: Qwen3Config, backend: AttentionBackend) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer_cache: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, batch)
        return x + self.mlp(self.post_attention_layernorm(x))  # [num_tokens, hidden_size]


class Qwen3Model(nn.Module):
    def __init__(self, config: Qwen3Config, backend: AttentionBackend) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, backend) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: Batch, kv_cache: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(batch.input_ids)  # [num_tokens, hidden_size]
        cos, sin = self.rotary(batch.positions, x.dtype)  # [num_tokens, 1, head_dim / 2] each
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, kv_cache[:, i], batch)
        return self.norm(x)  # [num_tokens, hidden_size]


class Qwen3ForCausalLM(nn.Module):
    """`model(batch, kv_cache)` -> hidden [num_tokens, hidden_size], and the K and V of all new tokens in the cache."""

    config_class = Qwen3Config

    def __init__(self, config: Qwen3Config, backend: AttentionBackend) -> None:
        super().__init__()
        self.model = Qwen3Model(config, backend)
        # with tied embeddings both names stand for one module, and so for one tensor
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Embedding(config.vocab_size, config.hidden_size)

    def forward(self, batch: Batch, kv_cache: torch.Tensor) -> torch.Tensor:
        return self.model(batch, kv_cache)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size]; apart, since few tokens of a batch need it"""
        return self.lm_head.logits(hidden)
