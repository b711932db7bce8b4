"""Logits → token ids and log-probabilities, for all rows of a step in one pass.

    processors        what sequences ask to be changed: `min_tokens`, penalties, biases, …      (`processors.py`)
    draw_tokens   temperature, min-p, top-k and top-p (`truncation.py`), inverse-CDF sampling
    logprobs      of the model itself, before all of that

The order is vLLM's, and each processor is skipped unless a row asks for it. The sampler knows no stop rules (the
`Scheduler` applies those) and no sequences: a row is a row of tensors. Called by `ModelRunner`.

Two rows of a vocabulary of four, with the uniform numbers 0.5 and 0.95:

    logits       [[0.0, 2.0, 1.0, 0.0], [ 3.0, 0.0, 0.0, 0.0]]     temperatures [0, 1]
    row 0        temperature 0 is greedy: token 1
    row 1        probabilities [0.87, 0.04, 0.04, 0.04], cumulative [0.87, 0.91, 0.96, 1.00]: 0.95 falls to token 2
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from nanovllm.sampling_batch import SamplingBatch
from nanovllm.extras.logits_processors import apply_processors
from nanovllm.truncation import truncate

Draw = Callable[..., torch.Tensor]
"""`draw_tokens`, or a kernel with the same signature."""


def sample(logits: torch.Tensor, sampling: SamplingBatch, draw: Draw) -> "tuple[torch.Tensor, Logprobs | None]":
    """logits: [num_samples, vocab_size] -> token ids [num_samples] int64, and log-probabilities if a row wants them

    The logits stay as they are. `draw` is `draw_tokens`, or a faster kernel.
    """
    token_ids = draw(apply_processors(logits, sampling.processors), *sampling.draw_arguments)
    if sampling.num_logprobs is None:
        return token_ids, None
    return token_ids, compute_logprobs(logits, token_ids, sampling.num_logprobs)


def draw_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    argmax: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """logits: [num_samples, vocab_size], as `apply_processors` returns them -> token ids [num_samples] int64

    The other tensors have one entry for each row; `SamplingBatch` says what they are, and what None stands for. A
    backend may have a faster `argmax`.
    """
    greedy = logits.argmax(dim=-1) if argmax is None else argmax(logits)
    if uniforms is None:
        return greedy
    logits = logits.float()
    is_greedy = temperatures[:, None] == 0  # [num_samples, 1]
    # the maximum is subtracted first: divided by a tiny temperature, logits go to -inf and never to +inf
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None].masked_fill(is_greedy, 1)
    logits = truncate(logits, top_k, top_p, min_p)
    return torch.where(is_greedy[:, 0], greedy, invert_distribution(logits, uniforms))


def invert_distribution(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sampling: the token in whose share of [0, 1) the row's uniform number falls: [num_samples] int64

    One random number a row is enough, where noise on every logit would need vocab_size.
    Summed in float64: in float32 the tail of a large vocabulary would be rounded away.
    """
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)  # [num_samples, vocab_size]
    targets = uniforms[:, None] * cumulative[:, -1:]  # the sum is 1 up to rounding
    # `right=True` never returns a token of probability 0; the clamp keeps rows of NaN within the vocabulary
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


# ---- log-probabilities, before temperature and processors


@dataclass(frozen=True)
class Logprobs:
    """One row for each position."""

    chosen: torch.Tensor  # [num_rows] float32, of the token that was chosen
    ranks: torch.Tensor  # [num_rows] int64, 1 for the likeliest
    top: torch.Tensor  # [num_rows, k] float32, likeliest first
    top_ids: torch.Tensor  # [num_rows, k] int64

    def to_host(self) -> "Logprobs":
        return Logprobs(*[getattr(self, f.name).to("cpu", non_blocking=True) for f in fields(self)])

    def to_rows(self) -> "list[LogprobRow]":
        return list(zip(*(getattr(self, f.name).tolist() for f in fields(self)), strict=True))


LogprobRow = tuple[float, int, list[float], list[int]]
"""A row of `Logprobs` as plain numbers on the host: chosen, rank, top, top_ids."""


def compute_logprobs(raw: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> Logprobs:
    """raw: [num_rows, vocab_size]; token_ids: [num_rows]; num_logprobs: k, or -1 for the whole vocabulary"""
    logprobs = raw.log_softmax(dim=-1, dtype=torch.float32)
    chosen = logprobs.gather(1, token_ids[:, None])  # [num_rows, 1]
    k = raw.shape[1] if num_logprobs < 0 else min(num_logprobs, raw.shape[1])
    top, top_ids = logprobs.topk(k, dim=-1)
    return Logprobs(chosen[:, 0], (logprobs > chosen).sum(dim=-1) + 1, top, top_ids)
