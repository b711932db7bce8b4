"""min-p, top-k and top-p: which tokens may be drawn? Those that are left out get -inf. Called by `draw_tokens`."""

import torch
from torch import Tensor


def truncate(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """min-p, top-k and top-p in this order: [num_samples, vocab_size] -> the same shape"""
    if min_p is not None:
        logits = apply_min_p(logits, min_p)
    if top_k is not None:
        logits = apply_top_k(logits, top_k)
    if top_p is not None:
        logits = apply_top_p(logits, top_p)
    return logits


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens at least min_p: [num_samples] times as likely as the likeliest."""
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < min_p[:, None] * probs.amax(dim=-1, keepdim=True), -torch.inf)


def apply_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keep the top_k: [num_samples] likeliest tokens, and tokens as likely as the k-th. A top_k of 0 keeps all."""
    num_sorted = int(top_k.max().clamp(1, logits.shape[1]))  # a partial sort is enough
    largest = logits.topk(num_sorted, dim=-1).values  # [num_samples, num_sorted]
    kth = largest.gather(1, (top_k[:, None] - 1).clamp(0, num_sorted - 1))  # [num_samples, 1]
    return logits.masked_fill((logits < kth) & (top_k[:, None] > 0), -torch.inf)


def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the fewest likeliest tokens whose probabilities add up to top_p: [num_samples]. The likeliest always stays.

    Tokens as likely as the least likely of these stay too, whatever order they were sorted in.
    """
    rows = (top_p < 1).nonzero()[:, 0]  # rows with top_p 1 keep every token, and are not sorted
    logits = logits.clone()
    part = logits[rows]  # [num_rows, vocab_size]
    # to sort only what min-p and top-k have left takes a third of the time that a sort of the vocabulary takes
    num_sorted = max([1, *part.isfinite().sum(dim=-1).tolist()])
    ascending = part.topk(num_sorted, dim=-1).values.flip(-1)  # [num_rows, num_sorted]
    is_left_out = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p[rows, None]
    is_left_out[:, -1] = False
    least = ascending.masked_fill(is_left_out, torch.inf).amin(dim=-1, keepdim=True)  # [num_rows, 1], of those kept
    logits[rows] = part.masked_fill_(part < least, -torch.inf)
    return logits
