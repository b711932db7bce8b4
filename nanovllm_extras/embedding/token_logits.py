"""The logits of two tokens after a prompt: what a decoder answers to a question with two answers.

`models/classifier.py` says which tokens. The logits are the model's own, before temperature and processors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.scheduler import Step
from nanovllm_extras.records.full_sequence import own_chunks
from nanovllm_extras.sampling.logits_processors import ComputeLogits

LOGITS_SLICE = 256  # rows of logits at a time, each with the whole vocabulary


class TokenLogits:
    """A `PromptReader` that reads two logits at the last token of a prompt."""

    reads_prompt = False

    def __init__(self, token_ids: tuple[int, int]) -> None:
        self.token_ids = token_ids
        self.logits = (0.0, 0.0)

    @classmethod
    def build(cls, scheduled: Step, cu_seqlens_q: np.ndarray) -> "LogitRows | None":
        rows = [(cu_seqlens_q[i + 1] - 1, *reader.token_ids) for i, reader in last_chunks(scheduled)]
        if not rows:
            return None
        values = torch.from_numpy(np.array(rows, dtype=np.int64))  # [num_rows, 3]
        return LogitRows(values[:, 0].contiguous(), values[:, 1:].contiguous())

    def add_to(self, output: object) -> None:
        """Do nothing: the answer of the request makes the output."""


def last_chunks(scheduled: Step) -> Iterator[tuple[int, TokenLogits]]:
    """Yield (index in `chunks`, reader) for each chunk that ends with the last token of such a prompt."""
    for i, (seq, start, num_new_tokens) in enumerate(own_chunks(scheduled.chunks)):
        for reader in seq.readers:
            if isinstance(reader, TokenLogits) and start + num_new_tokens == seq.num_prompt_tokens:
                yield i, reader


@dataclass(frozen=True)
class LogitRows:
    """Rows of the batch, and the two tokens whose logits are read in each of them."""

    rows: torch.Tensor  # [num_rows] int64
    token_ids: torch.Tensor  # [num_rows, 2] int64

    def compute(self, hidden: torch.Tensor, compute_logits: ComputeLogits) -> "TwoLogits":
        parts = []
        for start in range(0, len(self.rows), LOGITS_SLICE):
            rows = slice(start, start + LOGITS_SLICE)
            logits = compute_logits(hidden, self.rows[rows])  # [LOGITS_SLICE, vocab_size]
            parts.append(logits.gather(1, self.token_ids[rows]).float())
        return TwoLogits(torch.cat(parts))


class TwoLogits(NamedTuple):
    logits: torch.Tensor  # [num_rows, 2] float32

    def to_host(self) -> "TwoLogits":
        return TwoLogits(self.logits.to("cpu", non_blocking=True))

    def deliver(self, scheduled: Step) -> None:
        for (no, yes), (_, reader) in zip(self.logits.tolist(), last_chunks(scheduled), strict=True):
            reader.logits = (no, yes)
