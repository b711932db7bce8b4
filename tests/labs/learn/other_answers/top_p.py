"""Removes the least likely tokens from the ascending order, as the engine's own sampler does."""

import torch


def apply_top_p(probs, p):
    ascending, token_ids = probs.sort()
    is_dropped = ascending.cumsum(0) <= 1 - p
    is_dropped[-1] = False
    logits = probs.log()
    logits[token_ids[is_dropped]] = -torch.inf
    return logits.softmax(0)
