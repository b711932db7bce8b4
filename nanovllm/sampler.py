"""Logits → token ids. Knows no stop rules (those are the scheduler's) and no sequences. Called by `ModelRunner`."""

import torch

from nanovllm.batch import Batch


def sample(logits: torch.Tensor, batch: Batch, generator: torch.Generator) -> torch.Tensor:
    """One token for each row: the likeliest at temperature 0, else a draw from softmax(logits / temperature).

    logits: [num_samples, vocab_size] -> [num_samples] int64

    The draw divides the probabilities by exponential noise and takes the largest, which picks token i with probability
    p_i (the Gumbel-max trick): no cumulative sum, no second pass, and greedy rows fit into the same `argmax`.
    """
    logits = logits.float()
    if batch.is_all_greedy:
        return logits.argmax(dim=-1)
    temperatures = batch.temperatures[:, None]  # [num_samples, 1]
    is_greedy = temperatures == 0
    # log(p) - log(noise), with p not normalised: a constant in each row does not move the maximum
    noise = torch.empty_like(logits).exponential_(generator=generator)
    scores = logits / temperatures.masked_fill(is_greedy, 1) - noise.log_()
    return torch.where(is_greedy, logits, scores).argmax(dim=-1)
