"""What the sequences of a step ask of the sampler, as tensors; None for whatever no row of the step asks for.

Random numbers are counter-based (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405): the uniform number that
decides a row's draw is a hash of (seed, sample index, output position), not the next number of a generator. So it does
not depend on the other rows of the batch, on chunking, or on an earlier draw that was dropped.

Made by `build_batch`, read by `sampler.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from nanovllm.execution.grammar import GrammarRows, build_grammar_rows
from nanovllm.sampling_params import LogitsProcessor
from nanovllm.scheduling.sequence import Sequence


@dataclass(frozen=True)
class Penalties:
    """Rows whose logits depend on their prompt and output, which are padded with -1."""

    rows: torch.Tensor  # [num_penalized] int64, rows of the logits
    presence: torch.Tensor  # [num_penalized, 1] float32
    frequency: torch.Tensor  # [num_penalized, 1] float32
    repetition: torch.Tensor  # [num_penalized, 1] float32
    prompt_ids: torch.Tensor  # [num_penalized, longest prompt] int64, -1 beyond its end
    output_ids: torch.Tensor  # [num_penalized, longest output] int64, -1 beyond its end


@dataclass(frozen=True)
class Biases:
    """Single logits to which a value is added; -inf forbids a token."""

    rows: torch.Tensor  # [num_biases] int64
    token_ids: torch.Tensor  # [num_biases] int64
    values: torch.Tensor  # [num_biases] float32


@dataclass(frozen=True)
class AllowedTokens:
    """Rows that may choose some tokens only, as pairs (entry of `rows`, token)."""

    rows: torch.Tensor  # [num_restricted] int64
    entries: torch.Tensor  # [num_allowed] int64
    token_ids: torch.Tensor  # [num_allowed] int64


@dataclass(frozen=True)
class SamplingBatch:
    """One row for each token to be sampled in this step."""

    temperatures: torch.Tensor  # [num_samples] float32, 0 for greedy rows
    uniforms: torch.Tensor | None  # [num_samples] float64 in [0, 1): decides each row's draw; None if all are greedy
    top_k: torch.Tensor | None = None  # [num_samples] int64, 0 for all
    top_p: torch.Tensor | None = None  # [num_samples] float32
    min_p: torch.Tensor | None = None  # [num_samples] float32
    max_top_k: int = 0  # largest of top_k; 0 if a row that needs the order of its logits has none
    penalties: Penalties | None = None
    biases: Biases | None = None
    allowed: AllowedTokens | None = None
    processors: tuple[tuple[int, list[int], tuple[LogitsProcessor, ...]], ...] = ()  # row, output, callables
    grammar: GrammarRows | None = None
    num_logprobs: int | None = None  # how many likeliest tokens' log-probabilities are wanted at most; None for none

    @property
    def draw_arguments(self) -> tuple[Any, ...]:
        """The arguments of `draw_tokens` after the logits."""
        return self.temperatures, self.uniforms, self.top_k, self.top_p, self.min_p, self.max_top_k

    @property
    def wants_only_draws(self) -> bool:
        """Whether all rows ask for a draw alone: from unchanged logits, and without log-probabilities."""
        asked = (self.penalties, self.biases, self.allowed, self.grammar, self.num_logprobs)
        return all([one is None for one in asked]) and not self.processors


def build_sampling_batch(samples: list[Sequence], positions: np.ndarray) -> SamplingBatch:
    """`samples` are the sequences that get a token in this step, in the order of the rows.

    positions: [num_samples], the position that each token will have in its sequence. With overlap a token before it may
    still be in flight, so `num_known_tokens` would be too small.
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
    special = [(row, seq) for row, seq in enumerate(samples) if not seq.is_plain_sampling]
    params = [seq.sampling_params for seq in samples]
    ordered = [p for p in params if not p.is_greedy and (p.top_k > 0 or p.top_p < 1)]
    num_logprobs = [p.logprobs for p in params if p.logprobs is not None]
    return replace(
        plain,
        top_k=column(params, "top_k", torch.int64).clamp_(min=0) if any(p.top_k > 0 for p in ordered) else None,
        top_p=column(params, "top_p", torch.float32) if any(p.top_p < 1 for p in ordered) else None,
        min_p=column(params, "min_p", torch.float32) if any(p.min_p > 0 for p in params) else None,
        max_top_k=0 if any(p.top_k <= 0 for p in ordered) else max((p.top_k for p in ordered), default=0),
        penalties=build_penalties([(row, seq) for row, seq in special if has_penalty(seq)]),
        biases=build_biases(special, positions),
        allowed=build_allowed([(row, seq) for row, seq in special if seq.sampling_params.allowed_token_ids]),
        processors=tuple(
            (row, seq.output_token_ids, tuple(seq.sampling_params.logits_processors))
            for row, seq in special
            if seq.sampling_params.logits_processors
        ),
        grammar=build_grammar_rows([(row, seq) for row, seq in special if seq.grammar is not None]),
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


# ---- what few rows ask for


def has_penalty(seq: Sequence) -> bool:
    p = seq.sampling_params
    return p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1


def build_penalties(penalized: list[tuple[int, Sequence]]) -> Penalties | None:
    if not penalized:
        return None
    params = [seq.sampling_params for _, seq in penalized]
    return Penalties(
        rows=torch.tensor([row for row, _ in penalized]),
        presence=column(params, "presence_penalty", torch.float32)[:, None],
        frequency=column(params, "frequency_penalty", torch.float32)[:, None],
        repetition=column(params, "repetition_penalty", torch.float32)[:, None],
        prompt_ids=pad([seq.token_ids.view(0, seq.num_prompt_tokens) for _, seq in penalized]),
        output_ids=pad([seq.token_ids.view(seq.num_prompt_tokens) for _, seq in penalized]),
    )


def build_biases(special: list[tuple[int, Sequence]], positions: list[int]) -> Biases | None:
    """logit_bias as given; tokens that bad words or `min_tokens` forbid at this position get -inf."""
    triples: list[tuple[int, int, float]] = []
    for row, seq in special:
        triples += [(row, token_id, bias) for token_id, bias in (seq.sampling_params.logit_bias or {}).items()]
        triples += [(row, token_id, -np.inf) for token_id in forbidden_token_ids(seq, positions[row])]
    if not triples:
        return None
    rows, token_ids, values = zip(*triples, strict=True)
    return Biases(torch.tensor(rows), torch.tensor(token_ids), torch.tensor(values, dtype=torch.float32))


def forbidden_token_ids(seq: Sequence, position: int) -> Iterable[int]:
    """Tokens that `min_tokens` and bad words forbid at this position."""
    if position - seq.num_prompt_tokens < seq.sampling_params.min_tokens:
        yield from seq.stop_token_ids
    for *first, last in seq.bad_word_ids:
        tail = seq.token_ids.view(max(seq.num_prompt_tokens, position - len(first)))
        if tail.tolist() == first:
            yield last


def build_allowed(restricted: list[tuple[int, Sequence]]) -> AllowedTokens | None:
    if not restricted:
        return None
    lists = [list(seq.sampling_params.allowed_token_ids or ()) for _, seq in restricted]
    return AllowedTokens(
        rows=torch.tensor([row for row, _ in restricted]),
        entries=torch.arange(len(lists)).repeat_interleave(torch.tensor([len(ids) for ids in lists])),
        token_ids=torch.tensor([token_id for ids in lists for token_id in ids]),
    )


def column(params: list[Any], name: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([getattr(p, name) for p in params], dtype=dtype)


def pad(rows: list[np.ndarray]) -> torch.Tensor:
    """Arrays as rows, padded with -1: [len(rows), longest] int64"""
    padded = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(padded)
