"""Rotary positions for contexts longer than those that a model was trained on: which pairs rotate more slowly.

A model that was trained on short contexts is taught longer ones by slower rotations. The types differ in which pairs
are slowed down, and by how much; some also sharpen attention by a factor on cosine and sine:

    linear     all pairs slower by `factor` (Chen et al. 2023, https://arxiv.org/abs/2306.15595)
    dynamic    as default, unless `max_model_len` exceeds max_position_embeddings: then a larger theta for that length
    llama3     slow pairs by `factor`, fast ones not, the others in between (Llama 3.1)
    yarn       the same with another ramp, and a factor on attention (Peng et al. 2023, https://arxiv.org/abs/2309.00071)
    longrope   each pair by a factor of its own (Ding et al. 2024, https://arxiv.org/abs/2402.13753)

A type that is not known here is refused by its name, because it would change every result. `read_config.py` calls
`read_scaled_rope` for a config that names a type other than `default`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch

from nanovllm.checks import check_number
from nanovllm_extras.models.raw_config import RawConfig, RopeParameters
from nanovllm_extras.models.rope import Rope, plain_rope, rope_type_of
from nanovllm_extras.models.rope_overrides import dict_of
from nanovllm_extras.options.option_checks import first_given

REQUIRED = {  # numbers that each type needs
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
}
YARN = {"beta_fast": 32, "beta_slow": 1, "attention_factor": None, "mscale": None, "mscale_all_dim": None}


@dataclass(frozen=True)
class ScaledRope(Rope):
    """`parameters` are those of `rope_type`, by the names of config.json, without gaps."""

    rope_type: str = "dynamic"
    parameters: RopeParameters = field(default_factory=RopeParameters)

    def frequencies(self, rotary_dim: int, max_len: int) -> tuple[torch.Tensor, float]:
        wavelengths, p = self.wavelengths(rotary_dim), self.parameters  # [rotary_dim / 2], in units of 2 pi positions
        if self.rope_type == "dynamic":
            return dynamic_frequencies(wavelengths, p, max_len), 1.0
        if self.rope_type == "linear":
            return 1.0 / wavelengths / p["factor"], 1.0
        if self.rope_type == "llama3":
            return llama3_frequencies(1.0 / wavelengths, p), 1.0
        if self.rope_type == "yarn":
            return yarn_frequencies(wavelengths, self, rotary_dim), yarn_attention_factor(p)
        assert self.rope_type == "longrope", self.rope_type
        return longrope_frequencies(wavelengths, p, max_len)

    def longest(self, max_len: int, max_model_len: int | None) -> int:
        """Return the longest sequence that the model takes: `factor` times the original length, as in vLLM.

        Longer `dynamic` contexts change the rotation of short sequences too, so only `max_model_len` enables them. For
        llama3 and longrope, config.json has the extended length as max_position_embeddings.
        """
        if self.rope_type not in ("linear", "dynamic", "yarn") or (self.rope_type == "dynamic" and not max_model_len):
            return max_len
        source: Literal["original_max_position_embeddings", "max_position_embeddings"]
        source = "original_max_position_embeddings" if self.rope_type == "yarn" else "max_position_embeddings"
        original, factor = self.parameters.get(source, max_len), self.parameters["factor"]
        longest = int(original * factor)
        if not 1 <= (max_model_len or 1) <= longest:
            raise ValueError(
                f"max_model_len must be at most {longest}, the {source} {original} times the factor {factor} of "
                f"rope_scaling, got {max_model_len}"
            )
        return longest


# ---- reading config.json


def read_scaled_rope(raw: RawConfig, rotary_dim: int, max_len: int, theta: float) -> Rope:
    """Read a scaled RoPE, with the arguments of `read_rope` in `read_config.py`."""
    parameters = find_parameters(raw, theta)
    theta = first_given(parameters.get("rope_theta"), raw.get("rope_theta"), theta)
    return make_rope(parameters, theta, rotary_dim, max_len)


def make_rope(parameters: dict[str, Any], theta: float, rotary_dim: int, max_len: int) -> Rope:
    """Make a RoPE of the type that `parameters` name."""
    rope, rope_type = plain_rope(theta, rotary_dim), rope_type_of(parameters)
    if rope_type == "default":
        return rope
    return make_scaled_rope(rope_type, parameters, rope.theta, rotary_dim, max_len)


def find_parameters(raw: RawConfig, theta: float) -> dict[str, Any]:
    """Return the RoPE parameters of a config.json of transformers 4 or 5. `theta` is the default.

    transformers 5 keeps all of them in `rope_parameters`; 4 keeps theta next to `rope_scaling`.
    """
    parameters, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    found = dict_of(raw) or {}
    theta = first_given(found.get("rope_theta"), raw.get("rope_theta"), theta)
    if (lost := parameters.get("rope_theta", theta)) != theta:  # a file of transformers 5, edited as one of 4
        raise ValueError(
            f"rope_scaling replaces rope_parameters, and would lose its rope_theta {lost}: "
            f"write one of them; config.json has {scaling} and {parameters}"
        )
    if (original := raw.get("original_max_position_embeddings")) is not None:  # Phi-3 keeps it here, and means this one
        found = {**found, "original_max_position_embeddings": original}
    return found


def make_scaled_rope(
    rope_type: str, parameters: dict[str, Any], theta: float, rotary_dim: int, max_len: int
) -> ScaledRope:
    """Make a scaled RoPE. Raises ValueError if the type is unknown, or lacks a parameter."""
    if rope_type not in tuple(REQUIRED):  # a tuple takes values that cannot be hashed
        types = ", ".join(["default", *REQUIRED])
        raise ValueError(f"rope_type {rope_type!r} is not supported, only {types}; config.json has {parameters}")
    known = dict(parameters)
    if "original_max_position_embeddings" in REQUIRED[rope_type]:
        original = first_given(known.get("original_max_position_embeddings"), max_len)
        known["original_max_position_embeddings"] = original
        check_number("config.json: original_max_position_embeddings", original, 0, open_low=True)
        if rope_type != "llama3":
            known["factor"] = first_given(known.get("factor"), max_len / original)
    for name in REQUIRED[rope_type]:
        if known.get(name) is None:
            raise ValueError(f"rope_type {rope_type!r} needs {name}; config.json has {parameters}")
        check_number(f"config.json: {name}", known[name], 0, open_low=True)
    for name in (*YARN, "attention_factor"):
        if known.get(name) is not None:
            check_number(f"config.json: {name}", known[name], 0)
    if rope_type == "llama3" and known["high_freq_factor"] <= known["low_freq_factor"]:
        raise ValueError(f"high_freq_factor must be > low_freq_factor, config.json has {parameters}")
    if rope_type == "dynamic":
        known["max_position_embeddings"] = max_len
    if rope_type == "yarn":
        given = {name: value for name, value in known.items() if value is not None}
        known = {**YARN, **given, "truncate": known.get("truncate", True)}  # null is False, as in transformers
    if rope_type == "longrope":
        known.setdefault("attention_factor", None)
        check_factors(known, rotary_dim)
    return ScaledRope(theta, rope_type, cast(RopeParameters, known))


def check_factors(parameters: Mapping[str, object], rotary_dim: int) -> None:
    for name in ("short_factor", "long_factor"):
        factors = parameters.get(name)
        if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
            raise ValueError(f"{name} must be a list of {rotary_dim // 2} numbers, config.json has {factors!r}")
        for factor in factors:
            check_number(f"config.json: {name}", factor, 0, open_low=True)


# ---- frequencies


def dynamic_frequencies(wavelengths: torch.Tensor, p: RopeParameters, max_len: int) -> torch.Tensor:
    """Return the frequencies that a sequence of `max_len` tokens has. All sequences get them.

    Beyond the model's own length theta grows, so that slow pairs are slowed down most ("NTK-aware"). K in the cache is
    rotated already, so theta cannot grow with each sequence.
    """
    ratio = max(max_len / p["max_position_embeddings"], 1.0)
    shares = torch.linspace(0, 1, len(wavelengths), device="cpu")  # 0 for the fastest pair, 1 for the slowest
    return 1.0 / (wavelengths * (p["factor"] * ratio - (p["factor"] - 1)) ** shares)


def llama3_frequencies(frequencies: torch.Tensor, p: RopeParameters) -> torch.Tensor:
    """Slow down by `factor` the pairs that turn less than `low_freq_factor` times within the original context.

    Pairs that turn more than `high_freq_factor` times keep their frequency; between the limits is a linear ramp.
    """
    turns = p["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # [rotary_dim / 2]
    share = (turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    share = share.clamp(0, 1)  # of the original frequency
    return (1 - share) * frequencies / p["factor"] + share * frequencies


def yarn_frequencies(wavelengths: torch.Tensor, rope: ScaledRope, rotary_dim: int) -> torch.Tensor:
    """Slow down as llama3 does, but the ramp from `beta_fast` to `beta_slow` turns is linear in the pair's index."""
    p = rope.parameters
    first, last = (pair_that_turns(p[name], rope, rotary_dim) for name in ("beta_fast", "beta_slow"))
    if p["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
    is_slowed = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)  # [rotary_dim / 2], from 0 to 1
    return is_slowed / (p["factor"] * wavelengths) + (1 - is_slowed) / wavelengths


def pair_that_turns(num_turns: float, rope: ScaledRope, rotary_dim: int) -> float:
    """Return the (fractional) index of the pair that turns `num_turns` times within the original context."""
    wavelength = rope.parameters["original_max_position_embeddings"] / (num_turns * 2 * math.pi)
    return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def yarn_attention_factor(p: RopeParameters) -> float:
    if p["attention_factor"] is not None:
        return p["attention_factor"]
    if p["mscale"] and p["mscale_all_dim"]:
        return yarn_mscale(p["factor"], p["mscale"]) / yarn_mscale(p["factor"], p["mscale_all_dim"])
    return yarn_mscale(p["factor"], 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longrope_frequencies(wavelengths: torch.Tensor, p: RopeParameters, max_len: int) -> tuple[torch.Tensor, float]:
    """Return frequencies with long or short factors, chosen by the longest sequence that the engine serves.

    K in the cache is rotated already, so a sequence cannot change from the short factors to the long ones on its way.
    """
    original = p["original_max_position_embeddings"]
    factors = torch.tensor(p["long_factor" if max_len > original else "short_factor"], device="cpu")
    attention_factor = p["attention_factor"]
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(p["factor"]) / math.log(original)) if p["factor"] > 1 else 1.0
    return 1.0 / (factors.float() * wavelengths), attention_factor
