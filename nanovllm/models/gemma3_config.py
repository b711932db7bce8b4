"""Gemma 3's config.json: rotary positions for each kind of layer, windows, scales.

Called through `Gemma3ForCausalLM.read_config`.
"""

from dataclasses import dataclass
from typing import Any

from nanovllm.checks import check_int, check_number
from nanovllm.layers.rope_types import Rope
from nanovllm.models.config import FULL, SLIDING, ModelConfig, layer_types_of, read_common, read_windows, refuse
from nanovllm.models.rope_config import make_rope, refuse_partial_rotary


@dataclass(frozen=True)
class Gemma3Config(ModelConfig):
    """`rope` is that of the layers that see all tokens, `local_rope` that of the layers with a window."""

    local_rope: Rope = Rope()
    query_pre_attn_scalar: float = 256.0
    final_logit_softcapping: float | None = None


def read_gemma3_config(raw: dict[str, Any]) -> Gemma3Config:
    """ValueError for a field that `gemma3.py` would compute wrongly. `attn_logit_softcapping` is Gemma 2's: no field of
    Gemma 3 has an effect under this name, neither here nor in transformers."""
    raw = {**raw, "hidden_act": raw.get("hidden_activation") or "gelu_pytorch_tanh"}
    common = read_common(raw, 131072, num_key_value_heads=4, head_dim=256, tie_word_embeddings=True)
    refuse("use_bidirectional_attention", raw.get("use_bidirectional_attention") or False, (False,))
    refuse_partial_rotary(raw)
    pattern = raw.get("sliding_window_pattern") or 6
    check_int("config.json: sliding_window_pattern", pattern, 1)
    default_types = [SLIDING if (i + 1) % pattern else FULL for i in range(common["num_hidden_layers"])]
    scalar = raw.get("query_pre_attn_scalar", 256)
    check_number("config.json: query_pre_attn_scalar", scalar, 0, open_low=True)
    cap = raw.get("final_logit_softcapping")
    if cap is not None:
        check_number("config.json: final_logit_softcapping", cap, 0, open_low=True)
    rope, local_rope = read_ropes(raw, common["head_dim"], common["max_position_embeddings"])
    return Gemma3Config(
        **common,
        rope=rope,
        local_rope=local_rope,
        windows=read_windows(layer_types_of(raw, default_types), raw.get("sliding_window", 4096)),
        query_pre_attn_scalar=scalar,
        final_logit_softcapping=cap,
    )


def read_ropes(raw: dict[str, Any], head_dim: int, max_len: int) -> tuple[Rope, Rope]:
    """Of layers that see all tokens, and of those with a window, which older files give by `rope_local_base_freq`.

    A `rope_scaling` stretches the former alone.
    """
    parameters = raw.get("rope_parameters") or {}
    if unknown := set(parameters) - {FULL, SLIDING}:
        raise ValueError(f"rope_parameters must have {FULL} and {SLIDING}, config.json has {sorted(unknown)} in it")
    full = {**(parameters.get(FULL) or {}), **(raw.get("rope_scaling") or {})}
    local = parameters.get(SLIDING) or {}
    full_theta = full.get("rope_theta") or raw.get("rope_theta") or 1_000_000.0
    local_theta = local.get("rope_theta") or raw.get("rope_local_base_freq") or 10_000.0
    return make_rope(full, full_theta, head_dim, max_len), make_rope(local, local_theta, head_dim, max_len)
