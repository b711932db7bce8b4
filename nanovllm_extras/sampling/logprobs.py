"""Log-probabilities of sampled tokens and of the most likely ones: the model's own, before temperature and processors.

`full_runner.py` computes them; each position becomes a `PositionLogprobs` of an output.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

import torch


@dataclass(frozen=True)
class Logprob:
    """How likely the model found one token at one position."""

    logprob: float
    """Natural logarithm of its probability, before temperature, penalties, biases and masks."""
    rank: int
    """1 for the likeliest token of the vocabulary."""
    decoded_token: str | None


class PositionLogprobs(Mapping[int, Logprob]):
    """As a dict: the chosen token, then the k likeliest (-1: all), as in vLLM; each `Logprob` is made when read."""

    def __init__(self, row: "LogprobRow", token_id: int, k: int, decoder: Any) -> None:
        value, rank, top, top_ids = row
        chosen = {token_id: (value, rank)}
        likeliest = dict(zip(top_ids[: None if k < 0 else k], zip(top, count(1), strict=False), strict=False))
        self.entries = chosen | likeliest | chosen  # token id -> log-probability, rank
        self.decoder = decoder

    def __getitem__(self, token_id: int) -> Logprob:
        return Logprob(*self.entries[token_id], None if self.decoder is None else self.decoder.text_of(token_id))

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __reduce__(self) -> tuple[type, tuple[dict[int, Logprob]]]:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return repr(dict(self))


# ---- on the device


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
    """Compute the log-probabilities of the chosen and of the k likeliest tokens.

    raw: [num_rows, vocab_size]; token_ids: [num_rows]; num_logprobs: k, or -1 for the whole vocabulary
    """
    logprobs = raw.log_softmax(dim=-1, dtype=torch.float32)
    chosen = logprobs.gather(1, token_ids[:, None])  # [num_rows, 1]
    k = raw.shape[1] if num_logprobs < 0 else min(num_logprobs, raw.shape[1])
    top, top_ids = logprobs.topk(k, dim=-1)
    return Logprobs(chosen[:, 0], (logprobs > chosen).sum(dim=-1) + 1, top, top_ids)
