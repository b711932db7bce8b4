"""Log-probabilities: of the tokens that a step draws, and of the tokens of a prompt (`prompt_logprobs`).

All are the model's own, before temperature, penalties, biases and masks. `build_batch` finds the rows that predict
prompt tokens, `ModelRunner` computes the log-probabilities, and `Request` gives them to the user as plain numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.scheduling.sequence import Sequence
from nanovllm.scheduling.step import SchedulerOutput

LOGITS_SLICE = 256  # rows of logits for prompt_logprobs at a time: those of a long prompt would fill the memory


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


# ---- of prompts


@dataclass(frozen=True)
class PromptLogprobs:
    """Rows of the batch that predict a token of a prompt, and these tokens: the targets."""

    rows: torch.Tensor  # [num_targets] int64
    targets: torch.Tensor  # [num_targets] int64, token ids
    num_logprobs: int  # the most that any of them asks for; -1 for the vocabulary


def prompt_targets(scheduled: SchedulerOutput) -> Iterator[tuple[int, Sequence, range]]:
    """(place in `chunks`, sequence, positions of targets) of each chunk whose prompt's log-probabilities are wanted.

    The row of a token predicts the next token, so the positions are those of the chunk plus 1, within the prompt: a
    chunk of the tokens 4 … 7 of a prompt of 8 has the targets 5 … 7.
    """
    for i, (seq, start, num_new_tokens) in enumerate(scheduled.chunks):
        if seq.is_plain_sampling or seq.sampling_params.prompt_logprobs is None:
            continue
        if positions := range(start + 1, min(start + 1 + num_new_tokens, seq.num_prompt_tokens)):
            yield i, seq, positions


def build_prompt_logprobs(scheduled: SchedulerOutput, cu_seqlens_q: np.ndarray) -> PromptLogprobs | None:
    """cu_seqlens_q: [num_seqs + 1], the chunks' first rows in the batch; None if no chunk asks for log-probabilities"""
    rows, targets, wanted = [], [], []
    for i, seq, positions in prompt_targets(scheduled):
        rows.append(np.arange(len(positions)) + cu_seqlens_q[i])
        targets.append(seq.token_ids.view(positions.start, positions.stop))
        wanted.append(seq.sampling_params.prompt_logprobs or 0)
    if not rows:
        return None
    return PromptLogprobs(
        rows=torch.from_numpy(np.concatenate(rows)),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        num_logprobs=-1 if -1 in wanted else max(wanted),
    )


def compute_prompt_logprobs(
    hidden: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor], prompt: PromptLogprobs | None
) -> Logprobs | None:
    """hidden: [num_tokens, hidden_size] -> one row for each of `prompt.targets`; None if there is none"""
    if prompt is None:
        return None
    parts = []
    for start in range(0, len(prompt.rows), LOGITS_SLICE):
        rows = slice(start, start + LOGITS_SLICE)
        logits = compute_logits(hidden[prompt.rows[rows]])  # [LOGITS_SLICE, vocab_size]
        parts.append(compute_logprobs(logits, prompt.targets[rows], prompt.num_logprobs))
    return Logprobs(*[torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Logprobs)])
