"""The shape of a Gemma 4 network, read from config.json: its groups of layers, and which layer's K and V each one has.

`gemma4.py` is the network.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanovllm.checks import check_bool, check_int, check_number
from nanovllm.models.qwen3 import refuse
from nanovllm_extras.models.gated_mlp import GATES
from nanovllm_extras.models.groups import KVGroup, KVPlace
from nanovllm_extras.models.masking import AttentionOptions
from nanovllm_extras.models.moe import read_int
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_common
from nanovllm_extras.models.rope import Rope, plain_rope, rope_type_of
from nanovllm_extras.models.rope_overrides import check_read
from nanovllm_extras.models.window_layers import FULL, SLIDING, layer_types_of
from nanovllm_extras.options.option_checks import check_dict, first_given

ROPES: dict[str, dict[str, Any]] = {  # of a config.json without any
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True)
class Gemma4Config(NetworkConfig):
    """`rope` is that of the layers that see all tokens, `local_rope` that of the layers with a window."""

    layer_types: tuple[str, ...] = ()
    kv_places: tuple[KVPlace, ...] = ()
    """Where each layer finds its K and V."""
    rope: Rope = Rope()
    local_rope: Rope = Rope()
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    """Channels of each layer's own embedding of a token; 0 if there is none."""
    vocab_size_per_layer_input: int = 0
    final_logit_softcapping: float | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    def group_of(self, layer: int) -> KVGroup:
        group: KVGroup = self.kv_groups[self.kv_places[layer].group]
        return group


@dataclass(frozen=True)
class ProportionalRope(Rope):
    """Rotates the first `share` of the pairs of a head, `factor` times slower. The other pairs do not rotate."""

    share: float = 1.0
    factor: float = 1.0

    def frequencies(self, rotary_dim: int, max_len: int) -> tuple[Tensor, float]:
        frequencies = 1.0 / self.wavelengths(rotary_dim) / self.factor  # [rotary_dim / 2]
        frequencies[int(self.share * rotary_dim // 2) :] = 0
        return frequencies, 1.0


# ---- reading config.json


def read_gemma4_config(raw: RawConfig) -> Gemma4Config:
    """Read the text fields of a Gemma 4 config.json. Missing fields get the defaults of transformers."""
    raw = {**raw, "hidden_act": raw.get("hidden_activation") or "gelu_pytorch_tanh"}
    refuse("hidden_activation", raw["hidden_act"], tuple(GATES))
    # with "vision", only the tokens of an image see each other
    refuse("use_bidirectional_attention", raw.get("use_bidirectional_attention"), (None, "vision"))
    refuse("rope_scaling", raw.get("rope_scaling"), (None,))
    common = read_common(raw, 131072, num_key_value_heads=4, head_dim=256, tie_word_embeddings=True)
    types = read_layer_types(raw, common["num_hidden_layers"])
    groups, places = read_groups(raw, common, types)
    head_dims = dict(zip(dict.fromkeys(types), [group.head_dim for group in groups], strict=True))
    cap = raw.get("final_logit_softcapping")
    if cap is not None:
        check_number("config.json: final_logit_softcapping", cap, 0, open_low=True)
    return Gemma4Config(
        **common,
        **read_embedding_sizes(raw, common["vocab_size"]),
        **read_experts(raw),
        layer_types=types,
        kv_groups=groups,
        kv_places=places,
        attention_options=tuple(groups[place.group].options for place in places),
        rope=read_rope(raw, FULL, head_dims[FULL]),
        local_rope=read_rope(raw, SLIDING, head_dims[SLIDING]) if SLIDING in types else Rope(),
        attention_k_eq_v=read_flag(raw, "attention_k_eq_v"),
        use_double_wide_mlp=read_flag(raw, "use_double_wide_mlp"),
        final_logit_softcapping=cap,
    )


def read_flag(raw: Mapping[str, object], name: str) -> bool:
    value = raw.get(name) or False
    check_bool(f"config.json: {name}", value)
    return bool(value)


def read_embedding_sizes(raw: RawConfig, vocab_size: int) -> dict[str, Any]:
    """Read the size of the embeddings that layers have of their own, and the number of tokens that have one."""
    size = first_given(raw.get("hidden_size_per_layer_input", 256), 0)
    num_tokens = raw.get("vocab_size_per_layer_input", 262_144)
    check_int("config.json: hidden_size_per_layer_input", size, 0)
    if size:
        check_int("config.json: vocab_size_per_layer_input", num_tokens, vocab_size)
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": num_tokens}


def read_experts(raw: RawConfig) -> dict[str, Any]:
    """Read the number of experts, how many of them a token goes through, and their size, if there are experts."""
    if not read_flag(raw, "enable_moe_block"):
        return {}
    experts = {"num_experts": read_int(raw, "num_experts"), "num_experts_per_tok": read_int(raw, "top_k_experts"),
               "moe_intermediate_size": read_int(raw, "moe_intermediate_size")}  # fmt: skip
    if experts["num_experts_per_tok"] > experts["num_experts"]:
        raise ValueError(f"top_k_experts must be at most the {experts['num_experts']} experts, config.json has "
                         f"{experts['num_experts_per_tok']}")  # fmt: skip
    return experts


def read_layer_types(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """Read the type of each layer. Without `layer_types`, every sixth sees all tokens. The last one always does."""
    types = layer_types_of(raw, [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(num_layers)])
    for one in types:
        refuse("layer_types", one, (FULL, SLIDING))
    return (*types[:-1], FULL)


def read_groups(
    raw: RawConfig, common: dict[str, Any], types: tuple[str, ...]
) -> tuple[tuple[KVGroup, ...], tuple[KVPlace, ...]]:
    """Read which layers own K and V of which shape, one group for each type, and where each layer finds its own."""
    num_shared = raw.get("num_kv_shared_layers") or 0
    check_int("config.json: num_kv_shared_layers", num_shared, 0, maximum=len(types) - 1)
    owners = types[: len(types) - num_shared]
    kinds = tuple(dict.fromkeys(types))
    if missing := [kind for kind in kinds if kind not in owners]:
        raise ValueError(f"num_kv_shared_layers must leave a layer of each type its own K and V, config.json has "
                         f"{num_shared}, and no other layer has {missing[0]}")  # fmt: skip
    window = raw.get("sliding_window", 512)
    if SLIDING in kinds:
        check_int("config.json: sliding_window", window, 1)
    groups = []
    for kind in kinds:
        num_kv_heads, head_dim = read_heads(raw, common, types, kind)
        options = AttentionOptions(scale=1.0, window=window if kind == SLIDING else None)
        groups.append(KVGroup(owners.count(kind), num_kv_heads, head_dim, options))
    places = []
    for i, kind in enumerate(types):  # a layer that shares has the place of the last owner of its type
        number = types[:i].count(kind) if i < len(owners) else owners.count(kind) - 1
        places.append(KVPlace(kinds.index(kind), number, i < len(owners)))
    return tuple(groups), tuple(places)


def read_heads(raw: RawConfig, common: dict[str, Any], types: tuple[str, ...], kind: str) -> tuple[int, int]:
    """Read the number and the size of the K and V heads in layers of type `kind`.

    Files on the hub have `global_head_dim`, and `num_global_key_value_heads` if K is V. transformers writes
    `per_layer_config` instead: {"5": {"head_dim": 512}}.
    """
    names = ("num_key_value_heads", "head_dim")
    check_dict("config.json: per_layer_config", raw.get("per_layer_config"))
    if (per_layer := raw.get("per_layer_config")) is not None:
        given = {int(layer): fields for layer, fields in per_layer.items()}
        for fields in given.values():
            for name in fields:
                refuse("per_layer_config", name, names)
        found = {tuple(given.get(i, {}).get(name, common[name]) for name in names)
                 for i, one in enumerate(types) if one == kind}  # fmt: skip
        if len(found) > 1:
            raise ValueError(f"per_layer_config must be the same for all layers with {kind}, config.json has "
                             f"{names} {sorted(found)}")  # fmt: skip
        num_kv_heads, head_dim = found.pop()
    elif kind == FULL:
        of_global = raw.get("num_global_key_value_heads") if raw.get("attention_k_eq_v") else None
        num_kv_heads = first_given(of_global, common["num_key_value_heads"])
        head_dim = raw.get("global_head_dim", 512)
    else:
        num_kv_heads, head_dim = (common[name] for name in names)
    for name, value in zip(names, (num_kv_heads, head_dim), strict=True):
        check_int(f"config.json: {name} of layers with {kind}", value, 1)
    if common["num_attention_heads"] % num_kv_heads:
        raise ValueError(f"num_attention_heads must be a multiple of the number of K and V heads, config.json has "
                         f"{common['num_attention_heads']} and {num_kv_heads} in layers with {kind}")  # fmt: skip
    return num_kv_heads, head_dim


def read_rope(raw: RawConfig, kind: str, head_dim: int) -> Rope:
    """Read the RoPE of the layers of type `kind`."""
    given = raw.get("rope_parameters") or ROPES
    check_dict(f"config.json: rope_parameters: {kind}", given.get(kind))
    parameters = given.get(kind)
    if parameters is None or parameters.get("rope_theta") is None:
        raise ValueError(
            f"rope_parameters must have {FULL} and {SLIDING}, each with a rope_theta, config.json has {given}"
        )
    rope_type = rope_type_of(parameters)
    refuse(f"rope_parameters: {kind}: rope_type", rope_type, ("default", "proportional"))
    rope = plain_rope(parameters["rope_theta"], head_dim)
    if rope_type == "default":
        return rope
    share, factor = (first_given(parameters.get(name), 1.0) for name in ("partial_rotary_factor", "factor"))
    check_number("config.json: partial_rotary_factor", share, 0, 1)
    check_number("config.json: factor", factor, 0, open_low=True)
    return ProportionalRope(rope.theta, share, factor)


def override_ropes(raw: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with another `rope_parameters`: each type of layer has its theta there, and only there."""
    check_read(given, ("rope_parameters",))
    return {**raw, **given}
