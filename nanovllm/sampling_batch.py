"""What the sequences of a step ask of the sampler, as tensors; None for whatever no row of the step asks for.

Random numbers are counter-based (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405): the uniform number that
decides a row's draw is a hash of (seed, sample index, output position), not the next number of a generator. So it does
not depend on the other rows of the batch, on chunking, or on an earlier draw that was dropped.

Made by `build_batch`, read by `sampler.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nanovllm.sequence import Sequence
from nanovllm.extras.logits_processors import ProcessorRows, build_processors

MAX_TOP_K = torch.iinfo(torch.int64).max  # a larger one would fit no tensor, and means the same: all tokens


@dataclass(frozen=True)
class SamplingBatch:
    """One row for each token to be sampled in this step."""

    temperatures: torch.Tensor  # [num_samples] float32, 0 for greedy rows
    uniforms: torch.Tensor | None  # [num_samples] float64 in [0, 1): decides each row's draw; None if all are greedy
    top_k: torch.Tensor | None = None  # [num_samples] int64, 0 for all
    top_p: torch.Tensor | None = None  # [num_samples] float32
    min_p: torch.Tensor | None = None  # [num_samples] float32
    processors: tuple[ProcessorRows, ...] = ()  # what changes the logits before the draw, in this order
    num_logprobs: int | None = None  # how many likeliest tokens' log-probabilities are wanted at most; None for none

    @property
    def draw_arguments(self) -> tuple[Any, ...]:
        """The arguments of `draw_tokens` after the logits."""
        return self.temperatures, self.uniforms, self.top_k, self.top_p, self.min_p


def build_sampling_batch(samples: list[Sequence], positions: np.ndarray) -> SamplingBatch:
    """`samples` are the sequences that get a token in this step, in the order of the rows.

    positions: [num_samples], the position that each token will have in its sequence
    """
    temperatures = np.array([seq.sampling_params.temperature for seq in samples])  # [num_samples]
    temperatures = temperatures.clip(max=np.finfo(np.float32).max).astype(np.float32)
    plain = SamplingBatch(
        temperatures=torch.from_numpy(temperatures),
        uniforms=torch.from_numpy(draw_uniforms(samples, positions)) if temperatures.any() else None,
    )
    if all([seq.is_plain_sampling for seq in samples]):
        return plain
    return add_special(plain, samples, positions.tolist())


def add_special(plain: SamplingBatch, samples: list[Sequence], positions: list[int]) -> SamplingBatch:
    """`plain`, and all that rows ask for beyond a temperature."""
    params = [seq.sampling_params for seq in samples]
    drawn = [p for p in params if not p.is_greedy]  # truncation never takes the likeliest token away
    top_k = [min(max(p.top_k, 0), MAX_TOP_K) for p in params]
    num_logprobs = [p.logprobs for p in params if p.logprobs is not None]
    return replace(
        plain,
        top_k=torch.tensor(top_k) if any(p.top_k > 0 for p in drawn) else None,
        top_p=column(params, "top_p", torch.float32) if any(p.top_p < 1 for p in drawn) else None,
        min_p=column(params, "min_p", torch.float32) if any(p.min_p > 0 for p in drawn) else None,
        processors=build_processors(samples, positions),
        num_logprobs=(-1 if -1 in num_logprobs else max(num_logprobs)) if num_logprobs else None,
    )


# ---- randomness

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def draw_uniforms(samples: list[Sequence], positions: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each sequence's token at its position: [num_samples] float64"""
    seeds = np.array([seq.seed for seq in samples], dtype=np.uint64)
    sample_indices = np.array([seq.sample_index for seq in samples], dtype=np.uint64)
    output_positions = positions - np.array([seq.num_prompt_tokens for seq in samples], dtype=np.int64)
    bits = mix(mix(mix(seeds) + sample_indices) + output_positions.astype(np.uint64))
    return (bits >> np.uint64(12)) * 2.0**-52


def mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele et al. 2014, https://doi.org/10.1145/2714064.2660195): spreads every bit."""
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def column(params: list[Any], name: str, dtype: torch.dtype) -> torch.Tensor:
    """One field of all rows: [num_samples]"""
    return torch.tensor([getattr(p, name) for p in params], dtype=dtype)
