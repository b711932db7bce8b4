"""Logits → token ids and log-probabilities, for all rows of a step in one pass.

    stages        what sequences ask to be changed: `min_tokens`, penalties, biases, …      (`stages.py`)
    draw_tokens   temperature, min-p, top-k, top-p, inverse-CDF sampling                    (this file)
    logprobs      of the model itself, before all of that                                   (`logprobs.py`)

The order is vLLM's, and each stage is skipped unless a row asks for it. The sampler knows no stop rules (the
`Scheduler` applies those) and no sequences: a row is a row of tensors. Called by `ModelRunner`.

Two rows of a vocabulary of four, with the uniform numbers 0.5 and 0.95:

    logits       [[0.0, 2.0, 1.0, 0.0], [ 3.0, 0.0, 0.0, 0.0]]     temperatures [0, 1]
    row 0        temperature 0 is greedy: token 1
    row 1        probabilities [0.87, 0.04, 0.04, 0.04], cumulative [0.87, 0.91, 0.96, 1.00]: 0.95 falls to token 2
"""

from collections.abc import Callable

import torch

from nanovllm.execution.logprobs import Logprobs, compute_logprobs
from nanovllm.execution.sampling_batch import SamplingBatch
from nanovllm.execution.stages import apply_stages

Draw = Callable[..., torch.Tensor]
"""`draw_tokens`, or a twin with the same signature."""


def sample(logits: torch.Tensor, sampling: SamplingBatch, draw: Draw) -> tuple[torch.Tensor, Logprobs | None]:
    """logits: [num_samples, vocab_size] -> token ids [num_samples] int64, and log-probabilities if a row wants them

    The logits stay as they are. `draw` is `draw_tokens`, or a faster twin.
    """
    token_ids = draw(apply_stages(logits, sampling.stages), *sampling.draw_arguments)
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
    max_top_k: int = 0,
    argmax: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """logits: [num_samples, vocab_size], as `apply_stages` returns them -> token ids [num_samples] int64

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
    logits = truncate(logits, top_k, top_p, min_p, max_top_k)
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


# ---- truncation: -inf for the tokens that are left out


def truncate(
    logits: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    max_top_k: int = 0,
) -> torch.Tensor:
    """min-p, top-k and top-p in this order: [num_samples, vocab_size] -> the same shape"""
    if min_p is not None:
        logits = apply_min_p(logits, min_p)
    if top_k is not None:
        logits = apply_top_k(logits, top_k, max_top_k)
    if top_p is not None:
        logits = apply_top_p(logits, top_p, max_top_k)
    return logits


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep tokens at least min_p: [num_samples] times as likely as the likeliest."""
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < min_p[:, None] * probs.amax(dim=-1, keepdim=True), -torch.inf)


def apply_top_k(logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """Keep the top_k: [num_samples] likeliest tokens, and tokens as likely as the k-th.

    With `max_top_k` > 0, no row keeps more tokens by rank, so a partial sort is enough.
    """
    vocab_size = logits.shape[1]
    num_sorted = min(max_top_k or vocab_size, vocab_size)
    largest = logits.topk(num_sorted, dim=-1).values  # [num_samples, num_sorted]
    kth = largest.gather(1, (top_k[:, None] - 1).clamp(0, num_sorted - 1))  # [num_samples, 1]
    return logits.masked_fill((logits < kth) & (top_k[:, None] > 0), -torch.inf)  # top_k 0 keeps every token


def apply_top_p(logits: torch.Tensor, top_p: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """Keep the fewest likeliest tokens whose probabilities add up to top_p: [num_samples]. The likeliest always stays.

    Tokens as likely as the least likely of these stay too, whatever order they were sorted in.
    """
    rows = (top_p < 1).nonzero()[:, 0]  # rows with top_p 1 keep every token, and are not sorted
    if not len(rows):
        return logits
    logits = logits.clone()
    part = logits[rows]  # [num_rows, vocab_size]
    num_sorted = most_tokens_left(part) if max_top_k else part.shape[1]
    ascending = part.topk(num_sorted, dim=-1).values.flip(-1)  # [num_rows, num_sorted]
    is_left_out = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p[rows, None]
    is_left_out[:, -1] = False
    least = ascending.masked_fill(is_left_out, torch.inf).amin(dim=-1, keepdim=True)  # [num_rows, 1], of those kept
    logits[rows] = part.masked_fill_(part < least, -torch.inf)
    return logits


def most_tokens_left(logits: torch.Tensor) -> int:
    """Of any row, after top-k. To sort only these takes a third of the time that a sort of the vocabulary takes."""
    return max(1, int(logits.isfinite().sum(dim=-1).max()))
