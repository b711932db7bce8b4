"""Bisection in the running sums."""

from bisect import bisect_right
from itertools import accumulate


def uniform(seed, position):
    bits = (seed * 0x9E3779B1 + position * 0x85EBCA77 + 0x27D4EB2F) % 2**32
    bits = (bits ^ bits >> 15) * 0x2C1B3C6D % 2**32
    return (bits >> 20) % 16 / 16


def sample(batch):
    return [bisect_right(list(accumulate(probs)), uniform(seed, position)) for probs, seed, position in batch]
