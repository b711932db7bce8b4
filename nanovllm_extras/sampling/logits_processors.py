"""What may change the logits of a row before sampling, and what may read the hidden states of a prompt.

A `Processor` belongs to a sequence and changes the logits of its row: a penalty, a bias, a grammar. A `PromptReader`
belongs to a sequence and reads the hidden states of its prompt: log-probabilities of the prompt, an embedding. This
file has the interfaces and the shortest of them, `MinTokens`. It groups those of a step's sequences by class:

    samples            [A, B, C]      A has a bias, B has nothing, C has a bias and a penalty
    groups             bias: rows 0 and 2        penalty: row 2
    apply_processors   the logits of rows 0 and 2 with their biases, then those of row 2 with its penalty

`processed_batch.py` calls the `build_…` functions, and `full_runner.py` applies what they build.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from nanovllm.scheduler import Step
from nanovllm_extras.records.full_sequence import Sequence, own_chunks

ComputeLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden: [num_tokens, hidden_size], rows: [num_rows]) -> the logits of these rows: [num_rows, vocab_size]"""


class ProcessorRow(NamedTuple):
    """A row of the logits whose sequence has a processor."""

    row: int
    seq: Any
    position: int  # of the token that will be drawn, in its sequence
    processor: Any


class Processor(Protocol):
    """Changes the logits of one sequence. The processors of a step run in the order of `place`, as in vLLM."""

    place: int
    reads_output: bool  # the newest token must be known before the next one is drawn

    @classmethod
    def build(cls, rows: list[ProcessorRow]) -> "ProcessorRows | None":
        """Return the rows of a step with a processor of this class, as tensors on the host; None if there are none."""


class ProcessorRows(Protocol):
    """A dataclass of tensors, which can be sent to the device."""

    def apply(self, logits: torch.Tensor, raw: torch.Tensor) -> None:
        """Change `logits` in place; `raw` is what the model gave. Both are [num_samples, vocab_size]."""


class PromptReader(Protocol):
    """Reads hidden states of a request's prompt, for example to compute an embedding."""

    reads_prompt: bool  # it needs those of all tokens, so none of them may come from the prefix cache

    @classmethod
    def build(cls, scheduled: Step, cu_seqlens_q: np.ndarray) -> "ReaderRows | None":
        """Return the rows to read, or None. cu_seqlens_q: [num_seqs + 1], the chunks' first rows in the batch"""

    def add_to(self, output: Any) -> None:
        """Put what is known so far into a `RequestOutput`."""


class ReaderRows(Protocol):
    """A dataclass of tensors, which can be sent to the device."""

    def compute(self, hidden: torch.Tensor, compute_logits: ComputeLogits) -> "ReaderResult":
        """Read hidden: [num_tokens, hidden_size]."""


class ReaderResult(Protocol):
    """What has been read, on the device or on its way to the host."""

    def to_host(self) -> "ReaderResult": ...

    def deliver(self, scheduled: Step) -> None:
        """Give each reader of the step's sequences its part of the result, which is on the host by now."""


def build_processors(samples: list[Sequence], positions: list[int]) -> tuple[ProcessorRows, ...]:
    """Build the processors of a step. positions: for each sample, the position that its token will have"""
    groups: dict[type[Processor], list[ProcessorRow]] = {}
    for row, seq in enumerate(samples):
        for processor in seq.processors:
            groups.setdefault(type(processor), []).append(ProcessorRow(row, seq, positions[row], processor))
    built = [kind.build(groups[kind]) for kind in sorted(groups, key=lambda kind: kind.place)]
    return tuple(rows for rows in built if rows is not None)


def apply_processors(raw: torch.Tensor, processors: Iterable[ProcessorRows]) -> torch.Tensor:
    """Return a changed float32 copy of raw: [num_samples, vocab_size], or `raw` itself without processors."""
    logits = raw
    for processor in processors:
        logits = raw.to(torch.float32, copy=True) if logits is raw else logits
        processor.apply(logits, raw)
    return logits


def build_readers(scheduled: Step, cu_seqlens_q: np.ndarray) -> tuple[ReaderRows, ...]:
    """Build the readers' rows of a step. cu_seqlens_q: [num_seqs + 1], the chunks' first rows in the batch"""
    kinds = dict.fromkeys(
        [type(reader) for seq, _, _ in own_chunks(scheduled.chunks) if seq.readers for reader in seq.readers]
    )
    built = [kind.build(scheduled, cu_seqlens_q) for kind in kinds]
    return tuple(rows for rows in built if rows is not None)


# ---- the shortest processor


class MinTokens:
    """Forbids the tokens that would end a sequence before it has `min_tokens` tokens of output."""

    place, reads_output = 2, False

    @classmethod
    def build(cls, rows: list[ProcessorRow]) -> "ForbiddenTokens | None":
        return forbid(
            (row, token_id)
            for row, seq, position, _ in rows
            if position - seq.num_prompt_tokens < seq.sampling_params.min_tokens
            for token_id in seq.all_stop_token_ids
        )


@dataclass(frozen=True)
class ForbiddenTokens:
    rows: torch.Tensor  # [num_forbidden] int64
    token_ids: torch.Tensor  # [num_forbidden] int64

    def apply(self, logits: torch.Tensor, raw: torch.Tensor) -> None:
        logits[self.rows, self.token_ids] = -torch.inf


def forbid(pairs: Iterable[tuple[int, int]]) -> ForbiddenTokens | None:
    """Return pairs (row, token id) as tensors, or None if there are no pairs."""
    rows, token_ids = torch.tensor(list(pairs), dtype=torch.int64).reshape(-1, 2).unbind(1)
    return ForbiddenTokens(rows, token_ids) if len(rows) else None
