"""Sums of hidden states: what embeddings are made of.

The hidden state of a token is the vector that the model's last norm gives, from which its logits would be computed.
With "last" pooling the last token of a prompt is wanted, with "mean" pooling all of them; a prompt that is computed in
chunks gives one sum for each chunk. `build_batch` finds the rows, `ModelRunner` adds them up, and `Embedding` adds the
sums of a prompt's chunks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.scheduling.sequence import Sequence
from nanovllm.scheduling.step import SchedulerOutput


def pooled_chunks(scheduled: SchedulerOutput) -> Iterator[tuple[int, Sequence, range]]:
    """(place in `chunks`, sequence, positions to add up) of each chunk that is pooled, if there are such positions.

    A prompt of 10 tokens in chunks of 6 and 4: "mean" wants the positions 0 … 5 of the first and 6 … 9 of the second,
    "last" wants 9 of the second.
    """
    for i, (seq, start, num_new_tokens) in enumerate(scheduled.chunks):
        if seq.pooling is not None:
            first = start if seq.pooling == "mean" else seq.num_prompt_tokens - 1
            if positions := range(max(start, first), min(start + num_new_tokens, seq.num_prompt_tokens)):
                yield i, seq, positions


@dataclass(frozen=True)
class Pooling:
    """Rows of the batch whose hidden states are added up, and to which sum each belongs."""

    rows: torch.Tensor  # [num_rows] int64
    sums: torch.Tensor  # [num_rows] int64
    num_sums: int


def build_pooling(scheduled: SchedulerOutput, cu_seqlens_q: np.ndarray) -> Pooling | None:
    """cu_seqlens_q: [num_seqs + 1], the chunks' first rows in the batch; None if no chunk is pooled"""
    rows, lens = [], []
    for i, _, positions in pooled_chunks(scheduled):
        rows.append(np.arange(len(positions)) + positions.start - scheduled.chunks[i][1] + cu_seqlens_q[i])
        lens.append(len(positions))
    if not rows:
        return None
    sums = np.repeat(np.arange(len(lens)), lens)  # [num_rows]
    return Pooling(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(sums), len(lens))


def compute_sums(hidden: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """hidden: [num_tokens, hidden_size] -> [num_sums, hidden_size] float32"""
    sums = torch.zeros(pooling.num_sums, hidden.shape[1], dtype=torch.float32, device=hidden.device)
    return sums.index_add_(0, pooling.sums, hidden[pooling.rows].float())
