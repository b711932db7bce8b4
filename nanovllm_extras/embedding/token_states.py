"""The hidden state of each token of a prompt: embeddings by tokens, as models with late interaction compare them.

A prompt of 10 tokens in chunks of 6 and 4 is delivered as the states of the positions 0 … 5, and then 6 … 9.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.scheduler import Step
from nanovllm_extras.records.full_sequence import own_chunks
from nanovllm_extras.sampling.logits_processors import ComputeLogits


class TokenStates:
    """A `PromptReader` that keeps the hidden states of all tokens of one prompt."""

    reads_prompt = True

    def __init__(self) -> None:
        self._chunks: list[np.ndarray] = []  # each [num_tokens, hidden_size] float32

    @classmethod
    def build(cls, scheduled: Step, cu_seqlens_q: np.ndarray) -> "StateRows | None":
        rows = [np.arange(len(positions)) + cu_seqlens_q[i] for i, positions, _ in read_chunks(scheduled)]
        return StateRows(torch.from_numpy(np.concatenate(rows))) if rows else None

    def add(self, states: np.ndarray, positions: range) -> None:
        """Add states: [num_tokens, hidden_size]. Position 0 drops the others: a preempted prompt is computed again."""
        if positions.start == 0:
            self._chunks.clear()
        self._chunks.append(states)

    @property
    def states(self) -> np.ndarray:
        """The states so far, [num_tokens, hidden_size] float32."""
        return np.concatenate(self._chunks)

    def add_to(self, output: object) -> None:
        """Do nothing: the answer of the request makes the output."""


def read_chunks(scheduled: Step) -> Iterator[tuple[int, range, TokenStates]]:
    """Yield (index in `chunks`, positions, reader) for each chunk of a prompt whose states are kept."""
    for i, (seq, start, num_new_tokens) in enumerate(own_chunks(scheduled.chunks)):
        positions = range(start, min(start + num_new_tokens, seq.num_prompt_tokens))
        for reader in seq.readers:
            if isinstance(reader, TokenStates) and positions:
                yield i, positions, reader


@dataclass(frozen=True)
class StateRows:
    """Rows of the batch whose hidden states are kept."""

    rows: torch.Tensor  # [num_rows] int64

    def compute(self, hidden: torch.Tensor, compute_logits: ComputeLogits) -> "States":
        return States(hidden[self.rows].float())


class States(NamedTuple):
    states: torch.Tensor  # [num_rows, hidden_size] float32

    def to_host(self) -> "States":
        return States(self.states.to("cpu", non_blocking=True))

    def deliver(self, scheduled: Step) -> None:
        states, row = self.states.numpy(), 0
        for _, positions, reader in read_chunks(scheduled):
            reader.add(states[row : row + len(positions)].copy(), positions)
            row += len(positions)
