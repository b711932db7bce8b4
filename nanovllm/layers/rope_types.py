"""How fast does each pair of a head turn? The frequencies of rotary positions, plain and stretched to longer contexts.

A model that was trained on short contexts is taught longer ones by slower rotations. The types differ in which pairs
are slowed down, and by how much; some also sharpen attention by a factor on cosine and sine:

    default    theta^(-2i/rotary_dim)
    linear     all pairs slower by `factor` (Chen et al. 2023, https://arxiv.org/abs/2306.15595)
    dynamic    as default up to max_position_embeddings; this engine computes no longer sequences
    llama3     slow pairs by `factor`, fast ones not, the others in between (Llama 3.1)
    yarn       the same with another ramp, and a factor on attention (Peng et al. 2023, https://arxiv.org/abs/2309.00071)
    longrope   each pair by a factor of its own (Ding et al. 2024, https://arxiv.org/abs/2402.13753)

`models/rope_config.py` reads a `Rope` from config.json; `Rotary` asks for its frequencies.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Rope:
    """`parameters` are those of `rope_type`, by the names of config.json, without gaps."""

    theta: float = 10000.0
    rope_type: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)


def rope_frequencies(rope: Rope, rotary_dim: int, max_len: int) -> tuple[torch.Tensor, float]:
    """(angle of one position for each pair: [rotary_dim / 2] float32, factor on cosine and sine)

    `max_len` is the longest sequence that the engine serves.
    """
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu")  # [rotary_dim / 2]
    wavelengths = rope.theta ** (steps / rotary_dim)  # [rotary_dim / 2], in units of 2 pi positions
    p = rope.parameters
    if rope.rope_type in ("default", "dynamic"):
        return 1.0 / wavelengths, 1.0
    if rope.rope_type == "linear":
        return 1.0 / wavelengths / p["factor"], 1.0
    if rope.rope_type == "llama3":
        return llama3_frequencies(1.0 / wavelengths, p), 1.0
    if rope.rope_type == "yarn":
        return yarn_frequencies(wavelengths, rope, rotary_dim), yarn_attention_factor(p)
    assert rope.rope_type == "longrope", rope.rope_type
    return longrope_frequencies(wavelengths, p, max_len)


def llama3_frequencies(frequencies: torch.Tensor, p: Mapping[str, Any]) -> torch.Tensor:
    """A pair that turns less than `low_freq_factor` times within the original context is slowed down by `factor`, one
    that turns more than `high_freq_factor` times is not."""
    turns = p["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # [rotary_dim / 2]
    share = (turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    share = share.clamp(0, 1)  # of the original frequency
    return (1 - share) * frequencies / p["factor"] + share * frequencies


def yarn_frequencies(wavelengths: torch.Tensor, rope: Rope, rotary_dim: int) -> torch.Tensor:
    """As llama3, but the ramp between `beta_fast` and `beta_slow` turns is linear in the number of the pair."""
    p = rope.parameters
    first, last = (pair_that_turns(p[name], rope, rotary_dim) for name in ("beta_fast", "beta_slow"))
    if p["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
    is_slowed = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)  # [rotary_dim / 2], from 0 to 1
    return is_slowed / (p["factor"] * wavelengths) + (1 - is_slowed) / wavelengths


def pair_that_turns(num_turns: float, rope: Rope, rotary_dim: int) -> float:
    """The pair, a fraction of one included, that turns so many times within the original context."""
    wavelength = rope.parameters["original_max_position_embeddings"] / (num_turns * 2 * math.pi)
    return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def yarn_attention_factor(p: Mapping[str, Any]) -> float:
    if p["attention_factor"] is not None:
        return p["attention_factor"]
    if p["mscale"] and p["mscale_all_dim"]:
        return yarn_mscale(p["factor"], p["mscale"]) / yarn_mscale(p["factor"], p["mscale_all_dim"])
    return yarn_mscale(p["factor"], 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longrope_frequencies(wavelengths: torch.Tensor, p: Mapping[str, Any], max_len: int) -> tuple[torch.Tensor, float]:
    """Long or short factors for all sequences of an engine, by the longest that the engine serves, as in vLLM.

    K in the cache is rotated already, so a sequence cannot change from the short factors to the long ones on its way.
    """
    original = p["original_max_position_embeddings"]
    factors = torch.tensor(p["long_factor" if max_len > original else "short_factor"], device="cpu")
    attention_factor = p["attention_factor"]
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(p["factor"]) / math.log(original)) if p["factor"] > 1 else 1.0
    return 1.0 / (factors.float() * wavelengths), attention_factor
