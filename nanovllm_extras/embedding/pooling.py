"""Sums of hidden states: what embeddings are made of.

The hidden state of a token is the vector that the model's last norm gives, from which its logits would be computed.
With "last" pooling the last token of a prompt is wanted, with "mean" pooling all of them. A prompt of 10 tokens in
chunks of 6 and 4: "mean" adds up the positions 0 … 5 and then 6 … 9, "last" takes 9 of the second chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.scheduler import Step
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.sampling.logits_processors import ComputeLogits


class Pooling:
    """A `PromptReader` that adds up hidden states of one prompt."""

    def __init__(self, pooling: str) -> None:
        self.pooling = pooling
        self.reads_prompt = pooling == "mean"
        self.sum = np.zeros(0, dtype=np.float32)  # [hidden_size] once a chunk has been added
        self.num_pooled = 0  # tokens in the sum

    @classmethod
    def build(cls, scheduled: Step, cu_seqlens_q: np.ndarray) -> "PooledRows | None":
        rows, lens = [], []
        for i, positions, _ in pooled_chunks(scheduled):
            rows.append(np.arange(len(positions)) + positions.start - scheduled.chunks[i][1] + cu_seqlens_q[i])
            lens.append(len(positions))
        if not rows:
            return None
        sums = np.repeat(np.arange(len(lens)), lens)  # [num_rows]
        return PooledRows(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(sums), len(lens))

    def add(self, chunk_sum: np.ndarray, positions: range) -> None:
        """Add chunk_sum: [hidden_size]. Position 0 resets the sum, because a preempted prompt is computed again."""
        if positions.start == 0 or self.pooling == "last":
            self.sum, self.num_pooled = np.zeros_like(chunk_sum), 0
        self.sum = self.sum + chunk_sum
        self.num_pooled += len(positions)

    def wanted(self, seq: Sequence, start: int, stop: int) -> range:
        """Return the positions of the chunk [start, stop) whose hidden states are added up."""
        first = start if self.pooling == "mean" else seq.num_prompt_tokens - 1
        return range(max(start, first), min(stop, seq.num_prompt_tokens))

    def add_to(self, output: object) -> None:
        """Do nothing: `Embedding` makes the output."""


def pooled_chunks(scheduled: Step) -> Iterator[tuple[int, range, Pooling]]:
    """Yield (index in `chunks`, positions to add up, reader) for each chunk that has such positions."""
    for i, (seq, start, num_new_tokens) in enumerate(scheduled.chunks):
        assert isinstance(seq, Sequence)
        for reader in seq.readers:
            if isinstance(reader, Pooling) and (positions := reader.wanted(seq, start, start + num_new_tokens)):
                yield i, positions, reader


@dataclass(frozen=True)
class PooledRows:
    """Rows of the batch whose hidden states are added up, and to which sum each belongs."""

    rows: torch.Tensor  # [num_rows] int64
    sums: torch.Tensor  # [num_rows] int64
    num_sums: int

    def compute(self, hidden: torch.Tensor, compute_logits: ComputeLogits) -> "Sums":
        sums = torch.zeros(self.num_sums, hidden.shape[1], dtype=torch.float32, device=hidden.device)
        return Sums(sums.index_add_(0, self.sums, hidden[self.rows].float()))


class Sums(NamedTuple):
    sums: torch.Tensor  # [num_sums, hidden_size] float32

    def to_host(self) -> "Sums":
        return Sums(self.sums.to("cpu", non_blocking=True))

    def deliver(self, scheduled: Step) -> None:
        for chunk_sum, (_, positions, reader) in zip(self.sums.numpy(), pooled_chunks(scheduled), strict=True):
            reader.add(chunk_sum, positions)
