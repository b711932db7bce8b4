"""Logits → token ids, for all rows of a step at once: temperature, min-p, top-k, top-p, and one random draw per row.

The order is vLLM's, and each part is skipped unless a row needs it. The sampler has no stop rules (the `Scheduler`
applies those) and no sequences: it only sees rows of tensors. Called by `ModelRunner`.

Two rows of a vocabulary of four, with the uniform numbers 0.5 and 0.95:

    logits       [[0.0, 2.0, 1.0, 0.0], [ 3.0, 0.0, 0.0, 0.0]]     temperatures [0, 1]
    row 0        temperature 0 is greedy: token 1
    row 1        probabilities [0.87, 0.04, 0.04, 0.04], cumulative [0.87, 0.91, 0.96, 1.00]: 0.95 selects token 2
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 400  # tokens; Qwen3 has 380 blocks of them


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    uniforms: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    argmax: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Sample one token for each row of `logits`: [num_samples, vocab_size] -> token ids [num_samples] int64

    The other tensors have one entry for each row: they are the fields of `SamplingBatch`. `argmax` finds each row's
    most likely token, if a backend has a faster function than PyTorch's.
    """
    greedy = logits.argmax(dim=-1) if argmax is None else argmax(logits)  # [num_samples]
    if uniforms is None:
        return greedy
    logits = logits.float()
    is_greedy = temperatures[:, None] == 0  # [num_samples, 1]
    # the maximum is subtracted first: a tiny temperature then gives -inf for the others, and never +inf
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None].masked_fill(is_greedy, 1)
    if min_p is not None:
        logits = apply_min_p(logits, min_p)
    if top_k is not None:
        logits = apply_top_k(logits, top_k)
    if top_p is not None:
        logits = apply_top_p(logits, top_p)
    return torch.where(is_greedy[:, 0], greedy, invert_distribution(logits, uniforms))


def invert_distribution(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Sample by inverting the cumulative distribution of each row with its uniform number: [num_samples] int64

    This needs one random number per row instead of vocab_size. A running sum over the whole vocabulary would round its
    tail away in float32, and take long in float64. So the first running sum, in float64, is over blocks of tokens, and
    the second one is over the tokens of the block that the number falls into.
    """
    num_samples, vocab_size = logits.shape
    probs = F.pad(logits.softmax(dim=-1), (0, -vocab_size % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = probs.sum(dim=-1)  # [num_samples, num_blocks]
    block, rest = find_interval(sums, uniforms)
    part = probs[torch.arange(num_samples, device=logits.device), block]  # [num_samples, BLOCK]
    token, _ = find_interval(part, rest)
    return (block * BLOCK + token).clamp_(max=vocab_size - 1)  # rows of NaN stay within the vocabulary


def find_interval(lengths: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the interval that each uniform number falls into, if a row's intervals fill [0, 1), and where in it.

    lengths: [num_rows, n], not negative; uniforms: [num_rows] float64 -> [num_rows] int64, [num_rows] float64 in [0, 1)
    """
    ends = lengths.cumsum(dim=-1, dtype=torch.float64)  # [num_rows, n]
    targets = uniforms[:, None] * ends[:, -1:]
    found = torch.searchsorted(ends, targets, right=True).clamp_(max=lengths.shape[1] - 1)  # never an empty interval
    after = ends.gather(1, found) - targets  # above 0
    shares = 1 - after / lengths.gather(1, found)
    return found[:, 0], shares[:, 0].clamp(0, 1 - 2.0**-52)


# ---- truncation: tokens that must not be sampled get the logit -inf. [num_samples, vocab_size] -> the same shape


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens that are at least min_p: [num_samples] times as likely as the most likely one."""
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < min_p[:, None] * probs.amax(dim=-1, keepdim=True), -torch.inf)


def apply_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keep the top_k: [num_samples] most likely tokens, and tokens as likely as the k-th. 0 or -1 keeps all."""
    largest = sort_largest(logits, top_k)  # [num_samples, num_sorted]
    kth = largest.gather(1, (top_k[:, None] - 1).clamp(0, largest.shape[1] - 1))  # [num_samples, 1]
    return logits.masked_fill((logits < kth) & (top_k[:, None] > 0), -torch.inf)


def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the fewest most likely tokens whose probabilities add up to top_p: [num_samples], at least one.

    Tokens as likely as the least likely of these are kept too, so that the result does not depend on their order.
    """
    rows = slice(None) if logits.is_cuda else (top_p < 1).nonzero()[:, 0]  # the others keep all, and are not sorted
    part, top_p = logits[rows], top_p[rows, None]
    ascending = sort_largest(part, part.isfinite().sum(dim=-1)).flip(-1)  # [num_rows, num_sorted]
    is_left_out = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    is_left_out[:, -1] = False
    least = ascending.masked_fill(is_left_out, torch.inf).amin(dim=-1, keepdim=True)  # [num_rows, 1], of those kept
    logits = logits.clone()
    logits[rows] = part.masked_fill((part < least) & (top_p < 1), -torch.inf)
    return logits


def sort_largest(logits: Tensor, num_wanted: Tensor) -> Tensor:
    """Return the largest logits of each row, in descending order, at least as many as any row wants of [num_samples].

    On a CPU, sorting what min-p and top-k have left takes a third of the time of sorting the whole vocabulary. On a
    GPU, the host would have to wait for this number, so all are sorted.
    """
    num_sorted = logits.shape[1]
    if not logits.is_cuda:
        num_sorted = min(max([1, *num_wanted.tolist()]), num_sorted)
    return logits.topk(num_sorted, dim=-1).values
