"""The rotary positions of a network, read from config.json: which type, with which parameters.

transformers 5 keeps all of them in `rope_parameters`; 4 keeps theta beside `rope_scaling`. A type that is not known
here is refused by its name, because it would change every result.
"""

from collections.abc import Collection
from typing import Any

from nanovllm.checks import check_number
from nanovllm.layers.rope_types import Rope

REQUIRED = {  # numbers that each type needs
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
}
YARN = {"beta_fast": 32, "beta_slow": 1, "attention_factor": None, "mscale": None, "mscale_all_dim": None}


def read_rope(raw: dict[str, Any], rotary_dim: int, max_len: int, theta: float = 10000.0) -> Rope:
    """Of a network whose layers all turn alike; `theta` is the architecture's default, `max_len` the model's limit."""
    parameters, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    is_merged = all(parameters.get(name) == value for name, value in scaling.items())  # one says what both say
    found = parameters if is_merged else scaling
    theta = found.get("rope_theta") or raw.get("rope_theta") or theta
    if (lost := parameters.get("rope_theta", theta)) != theta:  # a file of transformers 5, edited as one of 4
        raise ValueError(
            f"rope_scaling takes the place of rope_parameters, and would lose its rope_theta {lost}: "
            f"write one of them; config.json has {scaling} and {parameters}"
        )
    if original := raw.get("original_max_position_embeddings"):  # Phi-3 keeps it here, and means this one
        found = {**found, "original_max_position_embeddings": original}
    return make_rope(found, theta, rotary_dim, max_len)


def type_of(parameters: dict[str, Any]) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def make_rope(parameters: dict[str, Any], theta: float, rotary_dim: int, max_len: int) -> Rope:
    """ValueError if the type is unknown, or lacks a parameter."""
    rope_type = type_of(parameters)
    if rope_type not in REQUIRED:
        raise ValueError(
            f"rope_type {rope_type!r} is not supported, only {', '.join(REQUIRED)}; config.json has {parameters}"
        )
    if rotary_dim % 2:
        raise ValueError(f"pairs of a head's dimensions are rotated, so their number must be even, it is {rotary_dim}")
    check_number("config.json: rope_theta", theta, 0, open_low=True)
    known = dict(parameters)
    if "original_max_position_embeddings" in REQUIRED[rope_type]:
        known["original_max_position_embeddings"] = original = known.get("original_max_position_embeddings") or max_len
        check_number("config.json: original_max_position_embeddings", original, 0, open_low=True)
        if rope_type != "llama3":
            known["factor"] = known.get("factor") or max_len / original
    for name in REQUIRED[rope_type]:
        if known.get(name) is None:
            raise ValueError(f"rope_type {rope_type!r} needs {name}; config.json has {parameters}")
        check_number(f"config.json: {name}", known[name], 0, open_low=True)
    if rope_type == "llama3" and known["high_freq_factor"] <= known["low_freq_factor"]:
        raise ValueError(f"high_freq_factor must be > low_freq_factor, config.json has {parameters}")
    if rope_type == "yarn":
        given = {name: value for name, value in known.items() if value is not None}
        known = {**YARN, "truncate": True, **given}
    if rope_type == "longrope":
        known.setdefault("attention_factor", None)
        check_factors(known, rotary_dim)
    return Rope(float(theta), rope_type, known)


def check_factors(parameters: dict[str, Any], rotary_dim: int) -> None:
    for name in ("short_factor", "long_factor"):
        factors = parameters.get(name)
        if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
            raise ValueError(f"{name} must be a list of {rotary_dim // 2} numbers, config.json has {factors!r}")
        for factor in factors:
            check_number(f"config.json: {name}", factor, 0, open_low=True)


def refuse_partial_rotary(raw: dict[str, Any], allowed: Collection[float] = (1.0,)) -> None:
    for one in (raw, raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}):
        if (share := one.get("partial_rotary_factor")) is not None and share not in allowed:
            raise ValueError(f"partial_rotary_factor must be 1.0 in this architecture, config.json has {share!r}")
