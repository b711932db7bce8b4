"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434) and V3 (https://arxiv.org/abs/2412.19437): latent attention, whose
cache holds one small latent for each token, and experts, some of which every token goes through.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + experts(norm(x)) ] → norm → logits

`latent_attention.py` explains how heads attend to the latents themselves, `group_routing.py` how experts are chosen.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.checks import check_bool, check_number
from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.layers.basic import ApplyRotary, Linear, RMSNorm
from nanovllm.models.qwen3 import refuse
from nanovllm_extras.models.decoder import CausalLM
from nanovllm_extras.models.gated_mlp import GatedMLP
from nanovllm_extras.models.group_routing import SigmoidRouter, route_by_sigmoid_in_groups, route_by_softmax_in_groups
from nanovllm_extras.models.latent_attention import UpProjection, deinterleave
from nanovllm_extras.models.masking import AttentionOptions, MaskedAttention
from nanovllm_extras.models.moe import Experts, Router, read_experts, read_int
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_common, read_rope, refuse_partial_rotary
from nanovllm_extras.models.rope_types import ScaledRope, yarn_mscale

ROUTERS = {"softmax": Router, "sigmoid": SigmoidRouter}  # by `scoring_func`


@dataclass(frozen=True)
class DeepseekConfig(NetworkConfig):
    """By the names of config.json. `num_key_value_heads` is 1 and `head_dim` the size of what a slot holds: the latent
    of kv_lora_rank channels, and the rotated key of qk_rope_head_dim. `latent_rank` is kv_lora_rank."""

    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    """Queries come from a latent too; None: from the token itself."""
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True
    """Whether neighbouring channels are rotated together, or those half a head apart."""
    first_k_dense_replace: int = 0
    """Number of layers, from the first on, that have one feed-forward network instead of experts."""
    num_experts: int = 64
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 1407
    n_shared_experts: int = 2
    """Experts that every token goes through; together they are one network, `n_shared_experts` times as wide."""
    n_group: int = 1
    topk_group: int = 1
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0

    @property
    def score_scale(self) -> float:
        """Return the factor on q k^T. Yarn increases it for models that were trained with it."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        parameters = self.rope.parameters if isinstance(self.rope, ScaledRope) else {}
        mscale = parameters.get("mscale_all_dim")
        return scale * yarn_mscale(parameters["factor"], mscale) ** 2 if mscale else scale


def read_deepseek_v2_config(raw: RawConfig) -> DeepseekConfig:
    refuse("scoring_func", raw.get("scoring_func") or "softmax", ["softmax"])
    refuse("norm_topk_prob", raw.get("norm_topk_prob") or False, [False])  # implementations do not agree on it
    method = raw.get("topk_method") or "greedy"
    refuse("topk_method", method, ["greedy", "group_limited_greedy"])
    experts = read_experts(raw, ("n_routed_experts",), 64, read_int(raw, "num_experts_per_tok"))
    experts["n_shared_experts"] = read_int(raw, "n_shared_experts", 2)
    if method == "group_limited_greedy":
        experts |= read_groups(raw, experts, None, None, best_per_group=1)
    config = {"max_position_embeddings": 2048, "first_k_dense_replace": 0, "moe_intermediate_size": 1407}
    mlp_bias = raw.get("mlp_bias") or False
    check_bool("config.json: mlp_bias", mlp_bias)
    return read_config(raw, {**config, "routed_scaling_factor": 1.0}, {**experts, "mlp_bias": mlp_bias})


def read_deepseek_v3_config(raw: RawConfig) -> DeepseekConfig:
    refuse("scoring_func", raw.get("scoring_func") or "sigmoid", ["sigmoid"])
    refuse("topk_method", raw.get("topk_method") or "noaux_tc", ["noaux_tc"])
    experts = {**read_experts(raw, ("n_routed_experts",), 256, 8), "scoring_func": "sigmoid"}
    experts["n_shared_experts"] = read_int(raw, "n_shared_experts", 1)
    experts |= read_groups(raw, experts, 8, 4, best_per_group=2)
    for name in ("norm_topk_prob", "rope_interleave"):
        experts[name] = raw.get(name, True) or False  # null is False, as in transformers
        check_bool(f"config.json: {name}", experts[name])
    config = {"max_position_embeddings": 4096, "first_k_dense_replace": 3, "moe_intermediate_size": 2048}
    return read_config(raw, {**config, "routed_scaling_factor": 2.5}, experts)


def read_groups(
    raw: RawConfig, experts: dict[str, Any], num_groups: int | None, num_chosen: int | None, best_per_group: int
) -> dict[str, int]:
    """Read the number of groups of experts, and how many groups a token chooses experts from."""
    found = read_int(raw, "n_group", num_groups), read_int(raw, "topk_group", num_chosen)
    num_experts, top_k = experts["num_experts"], experts["num_experts_per_tok"]
    size = num_experts // found[0]
    if num_experts % found[0] or size < best_per_group or found[1] > found[0] or top_k > found[1] * size:
        raise ValueError(
            f"n_group must divide the {num_experts} experts into groups of at least {best_per_group}, of which "
            f"topk_group hold num_experts_per_tok {top_k}; config.json has {found[0]} and {found[1]}"
        )
    return {"n_group": found[0], "topk_group": found[1]}


def read_config(raw: RawConfig, defaults: dict[str, Any], found: dict[str, Any]) -> DeepseekConfig:
    """Read the fields that V2 and V3 have in common. `found` are the fields that have been read already."""
    common = read_common(raw, defaults["max_position_embeddings"])
    refuse("num_key_value_heads", common["num_key_value_heads"], [common["num_attention_heads"]])
    refuse("moe_layer_freq", raw.get("moe_layer_freq") or 1, [1])
    refuse_partial_rotary(raw)
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    found |= {name: read_int(raw, name, default) for name, default in sizes.items()}
    found["moe_intermediate_size"] = read_int(raw, "moe_intermediate_size", defaults["moe_intermediate_size"])
    found["first_k_dense_replace"] = read_int(raw, "first_k_dense_replace", defaults["first_k_dense_replace"], 0)
    q_lora_rank = raw.get("q_lora_rank", 1536)  # null means none
    found["q_lora_rank"] = None if q_lora_rank is None else read_int(raw, "q_lora_rank", q_lora_rank)
    scaling = raw.get("routed_scaling_factor")
    found["routed_scaling_factor"] = defaults["routed_scaling_factor"] if scaling is None else scaling
    check_number("config.json: routed_scaling_factor", found["routed_scaling_factor"], 0)
    rank, rope_dim = read_int(raw, "kv_lora_rank", 512), found["qk_rope_head_dim"]
    rope = read_rope(raw, rope_dim, common["max_position_embeddings"])
    common |= {"num_key_value_heads": 1, "head_dim": rank + rope_dim, "latent_rank": rank}
    return DeepseekConfig(**common, **found, rope=rope, rotary_dim=rope_dim, kv_lora_rank=rank)


class DeepseekAttention(nn.Module):
    """What is projected and cached (https://arxiv.org/abs/2405.04434, figure 3):

        x → query of each head, by way of a latent of its own in the larger models
        x → latent, and one key that is rotated                               these two are cached

    A head's query and key have a part that is rotated and one that is not. The rotated part of the keys is the same for
    all heads, the other comes from the latent.
    """

    def __init__(self, config: DeepseekConfig, backend: TorchAttention) -> None:
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
        self.attention = MaskedAttention(backend, AttentionOptions(scale=config.score_scale))
        self.o_proj = Linear(heads * config.v_head_dim, size, bias)

    def queries(self, x: Tensor) -> Tensor:
        """Project x: [num_tokens, hidden_size] -> [num_tokens, num_heads * (qk_nope_head_dim + qk_rope_head_dim)]"""
        if self.config.q_lora_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x: [num_tokens, num_heads, qk_rope_head_dim] -> as x"""
        return self.rotate(deinterleave(x) if self.config.rope_interleave else x.contiguous(), cos, sin)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        rank = self.config.kv_lora_rank
        q, q_rope = self.queries(x).unflatten(-1, (-1, sum(self.split))).split(self.split, dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((rank, self.split[1]), dim=-1)  # [num_tokens, rank | rope]
        q = torch.cat((self.kv_b_proj.absorb(q), self.rotated(q_rope, cos, sin)), dim=-1)
        k = torch.cat((self.kv_a_layernorm(latent)[:, None], self.rotated(k_rope[:, None], cos, sin)), dim=-1)
        # q: [num_tokens, num_heads, head_dim], k: [num_tokens, 1, head_dim], out: [num_tokens, num_heads, rank]
        out = self.attention(q, k, k[..., :rank], layer_cache, metadata)
        return self.o_proj(self.kv_b_proj.values(out).flatten(1))  # [num_tokens, hidden_size]


class DeepseekBlock(nn.Module):
    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        size, inner, activation = config.hidden_size, config.moe_intermediate_size, config.hidden_act
        self.gate: Any = ROUTERS[config.scoring_func](size, config.num_experts)
        self.experts = Experts(GatedMLP(size, inner, activation) for _ in range(config.num_experts))
        self.shared_experts = GatedMLP(size, inner * config.n_shared_experts, activation, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
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
    def __init__(self, config: DeepseekConfig, backend: TorchAttention, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DeepseekAttention(config, backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = (config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)
        self.mlp = GatedMLP(*dense) if layer < config.first_k_dense_replace else DeepseekBlock(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))  # [num_tokens, hidden_size]


class DeepseekV2ForCausalLM(CausalLM):
    read_config = staticmethod(read_deepseek_v2_config)
    layer_class = DeepseekDecoderLayer


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """The same network; its config has another routing rule, and may rotate other pairs of channels."""

    read_config = staticmethod(read_deepseek_v3_config)

    def is_unused(self, name: str) -> bool:
        """Return whether a tensor belongs to the extra layers that predict further tokens, which are not run."""
        number = re.match(r"model\.layers\.(\d+)\.", name)
        return number is not None and int(number[1]) >= len(self.model.layers)
