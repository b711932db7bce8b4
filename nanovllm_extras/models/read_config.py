"""Reading the shape of a network from the config.json of a checkpoint.

Each file of a network has the function that reads its config, with `read_common` for the fields that all have,
`read_rope` for the rotary positions, and the core's `refuse` for what the network would compute wrongly.
"""

from collections.abc import Mapping
from typing import Any

from nanovllm.checks import check_bool, check_int, check_number
from nanovllm.models.qwen3 import refuse
from nanovllm_extras.models.gated_mlp import GATES
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.rope import Rope, plain_rope, rope_type_of
from nanovllm_extras.models.rope_types import read_scaled_rope
from nanovllm_extras.options.option_checks import first_given


def read_common(
    raw: RawConfig,
    max_position_embeddings: int,
    rms_norm_eps: float = 1e-6,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    tie_word_embeddings: bool = False,
) -> dict[str, Any]:
    """Read the fields of `NetworkConfig` but `rope`, `attention_options` and `widest_window`, checked.

    The arguments are what the file may leave out. A `num_key_value_heads` of None gives every query head its own K and
    V, a `head_dim` of None shares out the width.
    """
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [name for name in required if raw.get(name) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    known: dict[str, Any] = {name: raw.get(name) for name in required}
    for name in required:
        check_int(f"config.json: {name}", known[name], 1)
    heads = known["num_attention_heads"]
    known["num_key_value_heads"] = raw.get("num_key_value_heads", num_key_value_heads) or heads
    known["head_dim"] = raw.get("head_dim") or head_dim or known["hidden_size"] // heads
    known["max_position_embeddings"] = raw.get("max_position_embeddings") or max_position_embeddings
    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        check_int(f"config.json: {name}", known[name], 1)
    if heads % known["num_key_value_heads"]:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads, "
            f"config.json has {heads} and {known['num_key_value_heads']}"
        )
    eps, tied = raw.get("rms_norm_eps"), raw.get("tie_word_embeddings")
    known["rms_norm_eps"] = rms_norm_eps if eps is None else eps
    check_number("config.json: rms_norm_eps", known["rms_norm_eps"], 0)
    known["tie_word_embeddings"] = tie_word_embeddings if tied is None else tied
    known["attention_bias"] = known["qkv_bias"] = known["o_bias"] = raw.get("attention_bias") or False
    check_bool("config.json: tie_word_embeddings", known["tie_word_embeddings"])
    check_bool("config.json: attention_bias", known["o_bias"])
    known["hidden_act"] = raw.get("hidden_act") or "silu"
    refuse("hidden_act", known["hidden_act"], tuple(GATES))
    known["initializer_range"] = raw.get("initializer_range") or 0.02
    known["quantization_config"] = raw.get("quantization_config")
    known["dtype"] = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return known


def read_rope(raw: RawConfig, rotary_dim: int, max_len: int, theta: float = 10000.0) -> Rope:
    """Read the RoPE of all layers. `theta` is the architecture's default, `max_len` the model's limit."""
    parameters = raw.get("rope_parameters") or {}
    if not raw.get("rope_scaling") and rope_type_of(parameters) == "default":
        return plain_rope(first_given(parameters.get("rope_theta"), raw.get("rope_theta"), theta), rotary_dim)
    return read_scaled_rope(raw, rotary_dim, max_len, theta)


def read_rotary_dim(raw: RawConfig, head_dim: int, share: float = 1.0) -> int:
    """Read how many channels of each head are rotated, the first ones. `share` is the architecture's default."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    share = first_given(parameters.get("partial_rotary_factor"), raw.get("partial_rotary_factor"), share)
    check_number("config.json: partial_rotary_factor", share, 0, 1, open_low=True)
    return int(head_dim * share)


def refuse_partial_rotary(raw: Mapping[str, Any]) -> None:
    for place in (raw, raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}):
        refuse("partial_rotary_factor", place.get("partial_rotary_factor"), (1.0, None))
