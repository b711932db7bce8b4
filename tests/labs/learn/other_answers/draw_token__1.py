"""All rows at once, with tensors."""

import torch


def uniform(seed, position):
    bits = (seed * 0x9E3779B1 + position * 0x85EBCA77 + 0x27D4EB2F) % 2**32
    bits = (bits ^ bits >> 15) * 0x2C1B3C6D % 2**32
    return (bits >> 20) % 16 / 16


def sample(batch):
    probs = torch.tensor([row[0] for row in batch], dtype=torch.float64)
    numbers = torch.tensor([[uniform(seed, position)] for _, seed, position in batch], dtype=torch.float64)
    return (probs.cumsum(1) <= numbers).sum(1)
