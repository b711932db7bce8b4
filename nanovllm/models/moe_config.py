"""The config.json of decoders whose feed-forward networks are mixtures of experts: Qwen3-MoE's and Mixtral's.

What a file leaves out means what it means to transformers. Called through `read_config` of the two networks.
"""

from dataclasses import dataclass
from typing import Any

from nanovllm.checks import check_bool, check_int
from nanovllm.models.config import SLIDING, ModelConfig, read_common, read_windows
from nanovllm.models.rope_config import read_rope, refuse_partial_rotary


@dataclass(frozen=True)
class MoeConfig(ModelConfig):
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 768
    """Of each expert; layers without experts have `intermediate_size`."""
    norm_topk_prob: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that have one feed-forward network instead of experts."""


def read_qwen3_moe_config(raw: dict[str, Any]) -> MoeConfig:
    common = read_common(raw, max_position_embeddings=32768, num_key_value_heads=4)
    num_layers = common["num_hidden_layers"]
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    experts = read_experts(raw, raw.get("num_experts") or raw.get("num_local_experts") or 128, 8)
    experts["moe_intermediate_size"] = read_int(raw, "moe_intermediate_size", 768)
    experts["norm_topk_prob"] = raw.get("norm_topk_prob") or False
    check_bool("config.json: norm_topk_prob", experts["norm_topk_prob"])
    step, dense = read_int(raw, "decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or [])
    experts["dense_layers"] = frozenset(i for i in range(num_layers) if i in dense or (i + 1) % step)
    return make_config(raw, common, experts, window, theta=10000.0)


def read_mixtral_config(raw: dict[str, Any]) -> MoeConfig:
    common = read_common(raw, max_position_embeddings=131072, rms_norm_eps=1e-5, num_key_value_heads=8)
    common["qkv_bias"] = common["o_bias"] = False  # Mixtral has none, whatever the file says
    experts = read_experts(raw, raw.get("num_local_experts") or raw.get("num_experts") or 8, 2)
    experts |= {"moe_intermediate_size": common["intermediate_size"], "norm_topk_prob": True}
    return make_config(raw, common, experts, raw.get("sliding_window"), theta=1e6)


def read_experts(raw: dict[str, Any], num_experts: Any, top_k: int) -> dict[str, Any]:
    """How many there are, and how many a token goes through; `top_k` is what the file may leave out."""
    check_int("config.json: num_experts", num_experts, 1)
    found = read_int(raw, "num_experts_per_tok", top_k)
    if found > num_experts:
        raise ValueError(f"num_experts_per_tok must be at most the {num_experts} experts, config.json has {found}")
    return {"num_experts": num_experts, "num_experts_per_tok": found}


def read_int(raw: dict[str, Any], name: str, default: int | None = None, minimum: int = 1) -> int:
    """A number that the file may leave out if there is a `default`."""
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise ValueError(f"config.json lacks {name}")
    check_int(f"config.json: {name}", value, minimum)
    return value


def make_config(
    raw: dict[str, Any], common: dict[str, Any], experts: dict[str, Any], window: int | None, theta: float
) -> MoeConfig:
    """`window`, if there is one, is that of all layers."""
    refuse_partial_rotary(raw)
    windows = () if window is None else read_windows([SLIDING] * common["num_hidden_layers"], window)
    rope = read_rope(raw, common["head_dim"], common["max_position_embeddings"], theta)
    return MoeConfig(**common, **experts, rope=rope, windows=windows)
