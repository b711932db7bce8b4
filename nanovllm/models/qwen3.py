"""Qwen3, dense (Qwen3 Technical Report 2025, https://arxiv.org/abs/2505.09388): a decoder with grouped-query attention,
RMS-normalised queries and keys, rotary positions, and a SwiGLU feed-forward network.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + mlp(norm(x)) ] → norm → lm_head → logits

Reads from top to bottom: the shape of the network, which config.json describes, then attention, layer, model. All
tokens of a batch are end to end in one dimension, whatever sequence they belong to. Only `Attention` distinguishes
sequences, by `metadata`. The modules have the names that they have in the checkpoint. `loader.py` fills in the weights,
and `ModelRunner` calls the model.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.checks import check_bool, check_int, check_number
from nanovllm.layers.attention import Attention, AttentionMetadata, TorchAttention
from nanovllm.layers.basic import ApplyRotary, Embedding, FusedLinear, GatedMLP, Linear, RMSNorm, Rotary


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a network. The fields have the names of config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str

    def why_not(self, backend: type[TorchAttention], device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why an attention backend cannot compute the layers of this network, or None if it can."""
        return None

    @property
    def supports_graphs(self) -> bool:
        """Whether the forward pass of decodes can be recorded in a CUDA graph."""
        return True


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DEFAULTS = {"head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            "attention_bias": False}  # fmt: skip
SUPPORTED = {"hidden_act": ("silu", None), "use_sliding_window": (False, None), "quantization_config": (None,)}


def read_qwen3_config(raw: dict[str, Any]) -> ModelConfig:
    """Read a Qwen3 config.json. Missing fields get the defaults of transformers.

    ValueError for a field with a value that `qwen3.py` does not compute, such as a sliding window.
    """
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}  # in this order, as transformers
    for name, allowed in SUPPORTED.items():
        refuse(name, raw.get(name), allowed)
    refuse("rope_type", rope.get("rope_type") or rope.get("type"), ("default", None))
    refuse("partial_rotary_factor", rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor"), (1.0, None))
    for layer_type in raw.get("layer_types") or ():
        refuse("layer_types", layer_type, ("full_attention",))
    if missing := [name for name in REQUIRED if raw.get(name) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    values: dict[str, Any] = {name: raw[name] for name in REQUIRED}
    values |= {name: default if raw.get(name) is None else raw[name] for name, default in DEFAULTS.items()}
    values["num_key_value_heads"] = raw.get("num_key_value_heads", 32) or raw["num_attention_heads"]  # null: all heads
    for name in (*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        check_int(f"config.json: {name}", values[name], 1)
    values["rope_theta"] = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    for name in ("rope_theta", "rms_norm_eps"):
        check_number(f"config.json: {name}", values[name], 0, open_low=name == "rope_theta")
    for name in ("tie_word_embeddings", "attention_bias"):
        check_bool(f"config.json: {name}", values[name])
    values["dtype"] = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if values["head_dim"] % 2 or values["num_attention_heads"] % values["num_key_value_heads"]:
        raise ValueError(
            f"config.json: head_dim must be even, and num_attention_heads a multiple of num_key_value_heads, got "
            f"{values['head_dim']}, {values['num_attention_heads']} and {values['num_key_value_heads']}"
        )
    return ModelConfig(**values)


def refuse(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError unless `value` of the field `name` is one of those that the network computes."""
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(repr(one) for one in allowed)}, config.json has {value!r}; "
                         f"nanovllm_extras.LLM may serve it")  # fmt: skip


# ---- the network


class Qwen3Attention(nn.Module):
    def __init__(self, config: ModelConfig, backend: TorchAttention) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, config.attention_bias)
        self.q_norm: nn.Module = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm: nn.Module = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.rotate = ApplyRotary()
        self.attention = Attention(backend)
        self.o_proj = Linear(q_size, config.hidden_size, config.attention_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv_proj(x))  # [num_tokens, heads, head_dim]
        q, k = self.rotate(q, cos, sin, self.q_norm), self.rotate(k, cos, sin, self.k_norm)
        return self.o_proj(self.attention(q, k, v, layer_cache, metadata).flatten(1))  # [num_tokens, hidden_size]


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, backend: TorchAttention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))  # [num_tokens, hidden_size]


class Qwen3Model(nn.Module):
    def __init__(self, config: ModelConfig, backend: TorchAttention) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, backend) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        cos, sin = self.rotary(positions, x.dtype)  # [num_tokens, 1, head_dim / 2] each
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, kv_cache[:, i], metadata)
        return self.norm(x)  # [num_tokens, hidden_size]


class Qwen3ForCausalLM(nn.Module):
    """The interface of a network: read its config, compute hidden states of all tokens, and logits of some."""

    read_config = staticmethod(read_qwen3_config)

    def __init__(self, config: ModelConfig, backend: TorchAttention) -> None:
        super().__init__()
        self.model = Qwen3Model(config, backend)
        # with tied embeddings both names are one module, and so one tensor
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        """Compute hidden states [num_tokens, hidden_size], and write the K and V of all new tokens to the cache.

        input_ids, positions: [num_tokens]; kv_cache: [2, num_layers, num_blocks, …], with the backend's layout
        """
        return self.model(input_ids, positions, metadata, kv_cache)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[num_samples, hidden_size] -> [num_samples, vocab_size]; a separate method, because few tokens need logits"""
        return self.lm_head.logits(hidden)
