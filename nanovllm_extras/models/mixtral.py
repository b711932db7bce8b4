"""Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088): Llama's decoder with experts.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + experts(norm(x)) ] → norm → logits

Attention is Llama's (`llama.py`). Each token goes through two of eight large experts; checkpoints call the three
matrices of an expert w1 (gate), w3 (up) and w2 (down).
"""

from torch import Tensor, nn

from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.layers.basic import FusedLinear, RMSNorm
from nanovllm_extras.models.decoder import CausalLM
from nanovllm_extras.models.gated_mlp import GATES
from nanovllm_extras.models.llama import LlamaAttention
from nanovllm_extras.models.moe import Experts, MoeConfig, Router, make_config, read_experts, route_by_softmax
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_common


def read_mixtral_config(raw: RawConfig) -> MoeConfig:
    common = read_common(raw, max_position_embeddings=131072, rms_norm_eps=1e-5, num_key_value_heads=8)
    common["qkv_bias"] = common["o_bias"] = False  # Mixtral has none, whatever the file says
    experts = read_experts(raw, ("num_local_experts", "num_experts"), 8, 2)
    experts |= {"moe_intermediate_size": common["intermediate_size"], "norm_topk_prob": True}
    return make_config(raw, common, experts, raw.get("sliding_window"), theta=1e6)


class MixtralExpert(nn.Module):
    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        size = config.moe_intermediate_size
        self.gate_up_proj = FusedLinear(config.hidden_size, {"w1": size, "w3": size})
        self.activation = GATES[config.hidden_act]()
        self.down_proj = FusedLinear(size, {"w2": config.hidden_size})

    def forward(self, x: Tensor) -> Tensor:
        (y,) = self.down_proj(self.activation(*self.gate_up_proj(x)))
        return y  # [n, hidden_size]


class MixtralBlock(nn.Module):
    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = Router(config.hidden_size, config.num_experts)
        self.experts = Experts(MixtralExpert(config) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        expert_ids, weights = route_by_softmax(self.gate(x), self.top_k, is_normalised=True)  # [num_tokens, top_k]
        return self.experts(x, expert_ids, weights)  # [num_tokens, hidden_size]


class MixtralDecoderLayer(nn.Module):
    def __init__(self, config: MoeConfig, backend: TorchAttention, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, backend, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = MixtralBlock(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        return x + self.block_sparse_moe(self.post_attention_layernorm(x))  # [num_tokens, hidden_size]


class MixtralForCausalLM(CausalLM):
    read_config = staticmethod(read_mixtral_config)
    layer_class = MixtralDecoderLayer
