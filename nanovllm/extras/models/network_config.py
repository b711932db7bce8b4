"""The shape of a network beyond Qwen3's, read from the config.json of a checkpoint.

`NetworkConfig` has what dense decoders have in common; an architecture with more extends it. Each file of a network has
the function that reads its config, with `read_common` for the fields below, `read_rope` for the rotary positions, and
the core's `refuse` for what the network would compute wrongly. Called by `architectures.py`.
"""

from dataclasses import dataclass
from typing import Any

from nanovllm.checks import check_bool, check_int, check_number
from nanovllm.extras.models.gated_mlp import GATES
from nanovllm.extras.models.rope import Rope, plain_rope, rope_type_of
from nanovllm.models.config import ModelConfig, refuse


@dataclass(frozen=True)
class NetworkConfig(ModelConfig):
    """The fields have the names of config.json, except for `rope`, the biases, and how layers attend."""

    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    dtype: str = "float32"
    rope: Rope = Rope()
    rotary_dim: int | None = None
    """Of each head, how many dimensions are rotated; None is all of them."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    attention_options: tuple[Any, ...] = ()
    """How each layer attends (`masking.py`). Without entries, each token attends to all tokens up to itself."""
    widest_window: int | None = None
    """Tokens that the layers see at most; None if one of them sees all."""
    latent_rank: int | None = None
    """Channels of a token's latent that are values, if the cache holds latents; None if it holds K and V."""
    num_experts: int = 0
    """In each layer's mixture of experts; 0 is one feed-forward network."""
    initializer_range: float = 0.02
    quantization_config: Any = None
    """How the checkpoint's weights are quantised; None if they are not."""

    def options(self, layer: int) -> tuple[Any, ...]:
        """Return the options of attention in this layer: one, or none."""
        return self.attention_options[layer : layer + 1]


def read_common(
    raw: dict[str, Any],
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
    known = {name: raw[name] for name in required}
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
    refuse("hidden_act", known["hidden_act"], GATES)
    known["initializer_range"] = raw.get("initializer_range") or 0.02
    known["quantization_config"] = raw.get("quantization_config")
    known["dtype"] = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return known


def read_rope(raw: dict[str, Any], rotary_dim: int, max_len: int, theta: float = 10000.0) -> Rope:
    """For all layers of a network. `theta` is the architecture's default, `max_len` the model's limit."""
    parameters = raw.get("rope_parameters") or {}
    if not raw.get("rope_scaling") and rope_type_of(parameters) == "default":
        return plain_rope(parameters.get("rope_theta") or raw.get("rope_theta") or theta, rotary_dim)
    from nanovllm.extras.models.rope_types import read_scaled_rope

    return read_scaled_rope(raw, rotary_dim, max_len, theta)


def refuse_partial_rotary(raw: dict[str, Any]) -> None:
    for place in (raw, raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}):
        refuse("partial_rotary_factor", place.get("partial_rotary_factor"), (1.0, None))
