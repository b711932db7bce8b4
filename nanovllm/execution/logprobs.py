"""Log-probabilities of the tokens that a step draws: the model's own, before temperature and stages.

`sample` computes them, and `Request` gives them to the user.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Logprobs:
    """One row for each position."""

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


def compute_logprobs(raw: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> Logprobs:
    """raw: [num_rows, vocab_size]; token_ids: [num_rows]; num_logprobs: k, or -1 for the whole vocabulary"""
    logprobs = raw.log_softmax(dim=-1, dtype=torch.float32)
    chosen = logprobs.gather(1, token_ids[:, None])  # [num_rows, 1]
    k = raw.shape[1] if num_logprobs < 0 else min(num_logprobs, raw.shape[1])
    top, top_ids = logprobs.topk(k, dim=-1)
    return Logprobs(chosen[:, 0], (logprobs > chosen).sum(dim=-1) + 1, top, top_ids)
