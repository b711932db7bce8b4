"""Granite, dense (IBM 2024, https://huggingface.co/ibm-granite/granite-3.0-8b-base): Llama's decoder with four factors.

    token ids → embedding · a → num_layers × [ x + b · attention(norm(x)),  x + b · mlp(norm(x)) ] → norm → logits / c

Attention multiplies its scores by a fourth factor instead of 1 / sqrt(head_dim).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanovllm.checks import check_bool, check_number
from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm_extras.models.decoder import CausalLM, DecoderModel, LayerClass
from nanovllm_extras.models.layer_inputs import metadata_of
from nanovllm_extras.models.llama import LlamaDecoderLayer
from nanovllm_extras.models.masking import AttentionOptions
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_common, read_rope, refuse_partial_rotary

FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


@dataclass(frozen=True)
class GraniteConfig(NetworkConfig):
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0


def read_granite_config(raw: RawConfig) -> GraniteConfig:
    common = read_common(raw, max_position_embeddings=2048)
    refuse_partial_rotary(raw)
    factors: dict[str, Any] = {name: raw.get(name, 1.0) for name in FACTORS}
    for name, factor in factors.items():
        check_number(f"config.json: {name}", factor, 0, open_low=True)
    mlp_bias = raw.get("mlp_bias") or False
    check_bool("config.json: mlp_bias", mlp_bias)
    options = (AttentionOptions(float(factors["attention_multiplier"])),) * common["num_hidden_layers"]
    rope = read_rope(raw, common["head_dim"], common["max_position_embeddings"])
    return GraniteConfig(**common, **factors, rope=rope, mlp_bias=mlp_bias, attention_options=options)


class GraniteDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: GraniteConfig, backend: TorchAttention, layer: int = 0) -> None:
        super().__init__(config, backend, layer)
        self.residual_multiplier = config.residual_multiplier

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        x = x + attended * self.residual_multiplier
        return x + self.mlp(self.post_attention_layernorm(x)) * self.residual_multiplier  # [num_tokens, hidden_size]


class GraniteModel(DecoderModel):
    def __init__(self, config: GraniteConfig, backend: TorchAttention, layer_class: LayerClass) -> None:
        super().__init__(config, backend, layer_class)
        self.embedding_multiplier = config.embedding_multiplier

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids) * self.embedding_multiplier  # [num_tokens, hidden_size]
        cos, sin = self.rotary(positions, x.dtype)  # [num_tokens, 1, head_dim / 2] each
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, kv_cache[:, i], metadata_of(metadata, i))
        return self.norm(x)  # [num_tokens, hidden_size]


class GraniteForCausalLM(CausalLM):
    read_config = staticmethod(read_granite_config)
    layer_class = GraniteDecoderLayer
    model_class = GraniteModel

    def __init__(self, config: GraniteConfig, backend: TorchAttention) -> None:
        super().__init__(config, backend)
        self.logits_scaling = config.logits_scaling

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: [num_rows, hidden_size] -> [num_rows, vocab_size]"""
        return super().compute_logits(hidden) / self.logits_scaling
