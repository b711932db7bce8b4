"""Qwen3 with experts (Qwen3 Technical Report 2025, https://arxiv.org/abs/2505.09388): Qwen3-30B-A3B, 235B-A22B.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + experts(norm(x)) ] → norm → logits

Attention is Qwen3's (`qwen3.py`). Many small feed-forward networks, the experts, replace the one of Qwen3. Each token
goes through `num_experts_per_tok` of them.
"""

from torch import Tensor, nn

from nanovllm.checks import check_bool
from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.layers.basic import RMSNorm
from nanovllm_extras.models.decoder import CausalLM
from nanovllm_extras.models.gated_mlp import GatedMLP
from nanovllm_extras.models.moe import Experts, MoeConfig, Router, make_config, read_experts, read_int, route_by_softmax
from nanovllm_extras.models.qwen3_variants import Qwen3VariantAttention
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_common


def read_qwen3_moe_config(raw: RawConfig) -> MoeConfig:
    common = read_common(raw, max_position_embeddings=32768, num_key_value_heads=4)
    num_layers = common["num_hidden_layers"]
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    experts = read_experts(raw, ("num_experts", "num_local_experts"), 128, 8)
    experts["moe_intermediate_size"] = read_int(raw, "moe_intermediate_size", 768)
    experts["norm_topk_prob"] = raw.get("norm_topk_prob") or False
    check_bool("config.json: norm_topk_prob", experts["norm_topk_prob"])
    step, dense = read_int(raw, "decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or [])
    experts["dense_layers"] = frozenset(i for i in range(num_layers) if i in dense or (i + 1) % step)
    return make_config(raw, common, experts, window, theta=10000.0)


class Qwen3MoeBlock(nn.Module):
    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.top_k, self.is_normalised = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Router(config.hidden_size, config.num_experts)
        size = (config.hidden_size, config.moe_intermediate_size, config.hidden_act)
        self.experts = Experts(GatedMLP(*size) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        expert_ids, weights = route_by_softmax(self.gate(x), self.top_k, self.is_normalised)  # [num_tokens, top_k]
        return self.experts(x, expert_ids, weights)  # [num_tokens, hidden_size]


class Qwen3MoeDecoderLayer(nn.Module):
    def __init__(self, config: MoeConfig, backend: TorchAttention, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3VariantAttention(config, backend, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        is_dense = layer in config.dense_layers
        dense = (config.hidden_size, config.intermediate_size, config.hidden_act)
        self.mlp = GatedMLP(*dense) if is_dense else Qwen3MoeBlock(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))  # [num_tokens, hidden_size]


class Qwen3MoeForCausalLM(CausalLM):
    read_config = staticmethod(read_qwen3_moe_config)
    layer_class = Qwen3MoeDecoderLayer
