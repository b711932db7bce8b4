"""DeepSeek-V2's and V3's config.json: what a file leaves out means what it means to transformers.

Called through `read_config` of the two networks, in `deepseek.py`.
"""

from dataclasses import dataclass
from typing import Any

from nanovllm.checks import check_bool, check_number
from nanovllm.layers.rope_types import yarn_mscale
from nanovllm.models.config import ModelConfig, read_common, refuse
from nanovllm.models.moe_config import read_experts, read_int
from nanovllm.models.rope_config import read_rope, refuse_partial_rotary


@dataclass(frozen=True)
class DeepseekConfig(ModelConfig):
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
    """The first so many layers have one feed-forward network instead of experts."""
    num_experts: int = 64
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 1407
    n_shared_experts: int = 2
    """Experts that every token goes through; together they are one network, so many times as wide."""
    n_group: int = 1
    topk_group: int = 1
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0

    @property
    def score_scale(self) -> float:
        """Factor on q k^T; yarn raises it where the model was trained so."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        mscale = self.rope.parameters.get("mscale_all_dim") if self.rope.rope_type != "default" else None
        return scale * yarn_mscale(self.rope.parameters["factor"], mscale) ** 2 if mscale else scale


def read_deepseek_v2_config(raw: dict[str, Any]) -> DeepseekConfig:
    refuse("scoring_func", raw.get("scoring_func") or "softmax", ["softmax"])
    refuse("norm_topk_prob", raw.get("norm_topk_prob") or False, [False])  # implementations do not agree on it
    method = raw.get("topk_method") or "greedy"
    refuse("topk_method", method, ["greedy", "group_limited_greedy"])
    experts = read_experts(raw, raw.get("n_routed_experts") or 64, read_int(raw, "num_experts_per_tok"))
    experts["n_shared_experts"] = read_int(raw, "n_shared_experts", 2)
    if method == "group_limited_greedy":
        experts |= read_groups(raw, experts, None, None, best_per_group=1)
    config = {"max_position_embeddings": 2048, "first_k_dense_replace": 0, "moe_intermediate_size": 1407}
    mlp_bias = raw.get("mlp_bias") or False
    check_bool("config.json: mlp_bias", mlp_bias)
    return read_config(raw, {**config, "routed_scaling_factor": 1.0}, {**experts, "mlp_bias": mlp_bias})


def read_deepseek_v3_config(raw: dict[str, Any]) -> DeepseekConfig:
    refuse("scoring_func", raw.get("scoring_func") or "sigmoid", ["sigmoid"])
    refuse("topk_method", raw.get("topk_method") or "noaux_tc", ["noaux_tc"])
    experts = {**read_experts(raw, raw.get("n_routed_experts") or 256, 8), "scoring_func": "sigmoid"}
    experts["n_shared_experts"] = read_int(raw, "n_shared_experts", 1)
    experts |= read_groups(raw, experts, 8, 4, best_per_group=2)
    for name in ("norm_topk_prob", "rope_interleave"):
        experts[name] = True if raw.get(name) is None else raw[name]
        check_bool(f"config.json: {name}", experts[name])
    config = {"max_position_embeddings": 4096, "first_k_dense_replace": 3, "moe_intermediate_size": 2048}
    return read_config(raw, {**config, "routed_scaling_factor": 2.5}, experts)


def read_groups(
    raw: dict[str, Any], experts: dict[str, Any], num_groups: int | None, num_chosen: int | None, best_per_group: int
) -> dict[str, int]:
    """How the experts are grouped, and how many groups a token chooses among."""
    found = read_int(raw, "n_group", num_groups), read_int(raw, "topk_group", num_chosen)
    num_experts, top_k = experts["num_experts"], experts["num_experts_per_tok"]
    size = num_experts // found[0]
    if num_experts % found[0] or size < best_per_group or found[1] > found[0] or top_k > found[1] * size:
        raise ValueError(
            f"n_group must divide the {num_experts} experts into groups of at least {best_per_group}, of which "
            f"topk_group hold num_experts_per_tok {top_k}; config.json has {found[0]} and {found[1]}"
        )
    return {"n_group": found[0], "topk_group": found[1]}


def read_config(raw: dict[str, Any], defaults: dict[str, Any], found: dict[str, Any]) -> DeepseekConfig:
    """What V2 and V3 have in common. `found` is what has been read already."""
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
    return DeepseekConfig(**common, **found, rope=rope, kv_lora_rank=rank)
