"""Logits → token ids and log-probabilities, for all rows of a step in one pass.

The order is vLLM's: allowed tokens, bad words, logit bias, the user's own processors, penalties (`process`, up to
here); temperature, min-p, top-k, top-p, draw (`draw_tokens`, of which `kernels/sample.py` is a twin in Triton). Each
stage is skipped unless a row asks for it. Knows no stop rules (those are the scheduler's) and no sequences. Called by
`ModelRunner`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from nanovllm.sampling_batch import AllowedTokens, Biases, Penalties, SamplingBatch

Draw = Callable[[torch.Tensor, SamplingBatch], torch.Tensor]


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the model itself: before temperature, penalties, biases and masks. One row a position."""

    chosen: torch.Tensor  # [num_rows] float32, of the token that was chosen
    ranks: torch.Tensor  # [num_rows] int64, 1 for the likeliest
    top: torch.Tensor  # [num_rows, k] float32, likeliest first
    top_ids: torch.Tensor  # [num_rows, k] int64

    def to_host(self) -> "Logprobs":
        return Logprobs(*[getattr(self, f.name).to("cpu", non_blocking=True) for f in fields(self)])

    def to_rows(self) -> "LogprobRows":
        return LogprobRows(self.chosen.tolist(), self.ranks.tolist(), self.top.tolist(), self.top_ids.tolist())


class LogprobRows(NamedTuple):
    """`Logprobs` as plain numbers on the host."""

    chosen: list[float]
    ranks: list[int]
    top: list[list[float]]
    top_ids: list[list[int]]


def draw_tokens(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """logits: [num_samples, vocab_size], as `process` leaves them -> token ids [num_samples] int64"""
    greedy = logits.argmax(dim=-1)
    if sampling.uniforms is None:
        return greedy
    logits = logits.float()
    temperatures = sampling.temperatures[:, None]  # [num_samples, 1]
    is_greedy = temperatures == 0
    # from the largest down, so that the smallest temperature does not overflow
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures.masked_fill(is_greedy, 1)
    logits = truncate(logits, sampling)
    return torch.where(is_greedy[:, 0], greedy, invert_distribution(logits, sampling.uniforms))


def sample(
    logits: torch.Tensor, sampling: SamplingBatch, draw: Draw = draw_tokens
) -> tuple[torch.Tensor, Logprobs | None]:
    """logits: [num_samples, vocab_size] -> token ids [num_samples] int64, and log-probabilities if a row wants them

    The logits stay as they are. `draw` is `draw_tokens`, or a faster twin of it.
    """
    token_ids = draw(process(logits, sampling), sampling)
    logprobs = None if sampling.num_logprobs is None else compute_logprobs(logits, token_ids, sampling.num_logprobs)
    return token_ids, logprobs


def invert_distribution(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token in whose share of [0, 1) the row's uniform number falls: [num_samples] int64

    This needs one random number a row, where noise on every logit would need vocab_size.
    Summed in float64: in float32 the tail of a large vocabulary would be rounded away.
    """
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)  # [num_samples, vocab_size]
    targets = uniforms[:, None] * cumulative[:, -1:]  # the sum is 1 up to rounding
    # `right` never lands on a token of probability 0; the bound holds for logits that are no numbers
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


# ---- before the temperature


def process(raw: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """Logits as the requests want them, in float32; `raw` itself, of any dtype, if they want nothing."""
    if sampling.allowed is None and sampling.biases is None and not sampling.processors and sampling.penalties is None:
        return raw
    logits = raw.to(torch.float32, copy=True)
    if sampling.allowed is not None:
        apply_allowed(logits, sampling.allowed)
    if sampling.biases is not None:
        apply_biases(logits, sampling.biases)
    for row, output_token_ids, processors in sampling.processors:
        for processor in processors:
            logits[row] = processor(output_token_ids, logits[row])
    if sampling.penalties is not None:
        rows = sampling.penalties.rows
        logits[rows] = apply_penalties(logits[rows], sampling.penalties)
    return logits


def apply_allowed(logits: torch.Tensor, allowed: AllowedTokens) -> None:
    """In place: -inf for all but the allowed tokens of the restricted rows."""
    is_forbidden = torch.ones(len(allowed.rows), logits.shape[1], dtype=torch.bool, device=logits.device)
    is_forbidden[allowed.entries, allowed.token_ids] = False
    logits[allowed.rows] = logits[allowed.rows].masked_fill(is_forbidden, -torch.inf)


def apply_biases(logits: torch.Tensor, biases: Biases) -> None:
    """In place; a token may be named twice."""
    logits.index_put_((biases.rows, biases.token_ids), biases.values, accumulate=True)


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """logits: [num_penalized, vocab_size] -> the same; repetition first, then frequency and presence, as in vLLM"""
    prompt_counts = count_tokens(penalties.prompt_ids, logits.shape[1])
    output_counts = count_tokens(penalties.output_ids, logits.shape[1])  # [num_penalized, vocab_size]
    repeated = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
    logits = torch.where((prompt_counts + output_counts) > 0, repeated, logits)
    return logits - penalties.frequency * output_counts - penalties.presence * (output_counts > 0)


def count_tokens(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[num_rows, length], -1 where there is no token -> how often each token occurs: [num_rows, vocab_size] float32"""
    counts = torch.zeros(len(token_ids), vocab_size + 1, dtype=torch.float32, device=token_ids.device)
    counts.scatter_add_(1, token_ids + 1, torch.ones_like(token_ids, dtype=torch.float32))
    return counts[:, 1:]  # column 0 has collected the -1s


# ---- after the temperature


def truncate(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """-inf for the tokens that min-p, top-k and top-p leave out, in this order: [num_samples, vocab_size]"""
    if sampling.min_p is not None:
        logits = apply_min_p(logits, sampling.min_p)
    if sampling.top_k is not None:
        logits = apply_top_k(logits, sampling.top_k, sampling.max_top_k)
    if sampling.top_p is not None:
        logits = apply_top_p(logits, sampling.top_p, sampling.max_top_k)
    return logits


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < min_p[:, None] * probs.amax(dim=-1, keepdim=True), -torch.inf)


def apply_top_k(logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """Tokens as likely as the k-th stay too. `max_top_k` > 0 bounds all rows' k that matter, and saves a full sort."""
    vocab_size = logits.shape[1]
    num_sorted = min(max_top_k or vocab_size, vocab_size)
    largest = logits.topk(num_sorted, dim=-1).values  # [num_samples, num_sorted]
    # a row without top_k keeps everything
    kth = largest.gather(1, (top_k[:, None] - 1).clamp(0, num_sorted - 1))
    return logits.masked_fill((logits < kth) & (top_k[:, None] > 0), -torch.inf)


def apply_top_p(logits: torch.Tensor, top_p: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """The fewest likeliest tokens whose probabilities add up to top_p. The likeliest always stays.

    Tokens as likely as the least likely of these stay too, whatever order they were sorted in. Where top-k has left
    few, only those are sorted (`max_top_k` > 0; ties with the k-th may be more: then all are).
    """
    rows = (top_p < 1).nonzero()[:, 0]  # the others keep everything, and are not sorted
    logits = logits.clone()
    part = logits[rows]  # [num_rows, vocab_size]
    num_left = max(1, int(part.isfinite().sum(dim=-1).max())) if max_top_k else part.shape[1]
    ascending = part.topk(num_left, dim=-1).values.flip(-1)  # [num_rows, num_left]
    is_left_out = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p[rows, None]
    is_left_out[:, -1] = False
    least = ascending.masked_fill(is_left_out, torch.inf).amin(dim=-1, keepdim=True)  # [num_rows, 1], of those kept
    logits[rows] = part.masked_fill_(part < least, -torch.inf)
    return logits


# ---- log-probabilities


def compute_logprobs(raw: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> Logprobs:
    """raw: [num_rows, vocab_size]; token_ids: [num_rows]; num_logprobs: k, or -1 for the whole vocabulary"""
    logprobs = raw.log_softmax(dim=-1, dtype=torch.float32)
    chosen = logprobs.gather(1, token_ids[:, None])  # [num_rows, 1]
    k = raw.shape[1] if num_logprobs < 0 else min(num_logprobs, raw.shape[1])
    top, top_ids = logprobs.topk(k, dim=-1)
    return Logprobs(chosen[:, 0], (logprobs > chosen).sum(dim=-1) + 1, top, top_ids)
