"""`prompt_logprobs`: how likely the model found the tokens of a prompt.

A `PromptReader` of the first sample's sequence. The row of a token predicts the next token, so a chunk of the tokens
4 … 7 of a prompt of 8 has the targets 5 … 7. All values are the model's own, before temperature and processors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.scheduler import Step
from nanovllm_extras.records.full_sequence import Sequence, own_chunks
from nanovllm_extras.requests.full_detokenizer import TokenDecoder
from nanovllm_extras.requests.lazy_outputs import RequestOutput
from nanovllm_extras.sampling.logits_processors import ComputeLogits
from nanovllm_extras.sampling.logprobs import Logprob, Logprobs, PositionLogprobs, compute_logprobs

LOGITS_SLICE = 256  # rows of logits at a time: those of a long prompt would fill the memory


class PromptLogprobs:
    """The reader of one prompt. `num_logprobs` likeliest tokens at each position, or -1 for the whole vocabulary.

    `gives_once`: only the first output has them, as deltas do; else each of them.
    """

    reads_prompt = True

    def __init__(self, num_logprobs: int, decoder: TokenDecoder | None, gives_once: bool) -> None:
        self.num_logprobs = num_logprobs
        self.gives_once = gives_once
        self.decoder = decoder
        self.found: list[Mapping[int, Logprob] | None] = [None]  # no token predicts the first
        self._has_given = False

    @classmethod
    def build(cls, scheduled: Step, cu_seqlens_q: np.ndarray) -> "TargetRows | None":
        rows, targets, wanted = [], [], []
        for i, seq, positions, reader in chunks_with_targets(scheduled):
            rows.append(np.arange(len(positions)) + cu_seqlens_q[i])
            targets.append(seq.token_ids[positions.start : positions.stop])
            wanted.append(reader.num_logprobs)
        if not rows:
            return None
        return TargetRows(
            rows=torch.from_numpy(np.concatenate(rows)),
            targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
            num_logprobs=-1 if -1 in wanted else max(wanted),
        )

    def add_to(self, output: RequestOutput) -> None:
        if not (self.gives_once and self._has_given):
            output.prompt_logprobs = self.found.copy()
        self._has_given = True


def chunks_with_targets(scheduled: Step) -> Iterator[tuple[int, Sequence, range, PromptLogprobs]]:
    """Yield (index in `chunks`, sequence, positions of targets, reader) for each chunk that has targets."""
    for i, (seq, start, num_new_tokens) in enumerate(own_chunks(scheduled.chunks)):
        positions = range(start + 1, min(start + 1 + num_new_tokens, seq.num_prompt_tokens))
        for reader in seq.readers:
            if isinstance(reader, PromptLogprobs) and positions:
                yield i, seq, positions, reader


@dataclass(frozen=True)
class TargetRows:
    """Rows of the batch that predict a token of a prompt, and these tokens."""

    rows: torch.Tensor  # [num_targets] int64
    targets: torch.Tensor  # [num_targets] int64, token ids
    num_logprobs: int  # the most that any of them asks for; -1 for the vocabulary

    def compute(self, hidden: torch.Tensor, compute_logits: ComputeLogits) -> "TargetLogprobs":
        parts = []
        for start in range(0, len(self.rows), LOGITS_SLICE):
            rows = slice(start, start + LOGITS_SLICE)
            logits = compute_logits(hidden, self.rows[rows])  # [LOGITS_SLICE, vocab_size]
            parts.append(compute_logprobs(logits, self.targets[rows], self.num_logprobs))
        joined = [torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Logprobs)]
        return TargetLogprobs(Logprobs(*joined))


class TargetLogprobs(NamedTuple):
    """One row for each target."""

    logprobs: Logprobs

    def to_host(self) -> "TargetLogprobs":
        return TargetLogprobs(self.logprobs.to_host())

    def deliver(self, scheduled: Step) -> None:
        """Append the log-probabilities of new positions. Skip known ones, which a preempted prompt computes again."""
        rows = iter(self.logprobs.to_rows())
        for _, seq, positions, reader in chunks_with_targets(scheduled):
            for position in positions:
                row = next(rows)
                if position >= len(reader.found):
                    token_id = seq.token_ids[position]
                    reader.found.append(PositionLogprobs(row, token_id, reader.num_logprobs, reader.decoder))
