"""What does a step compute of its prompts, beside the next tokens? Log-probabilities, and sums of hidden states.

`build_batch` finds the work, `ModelRunner` does it and knows nothing of its parts, and `request.py` hands the results
to their requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.execution.logprobs import (
    LogprobRows,
    Logprobs,
    PromptLogprobs,
    build_prompt_logprobs,
    compute_prompt_logprobs,
)
from nanovllm.execution.pooling import Pooling, build_pooling, compute_sums
from nanovllm.scheduling.step import SchedulerOutput


@dataclass(frozen=True)
class PromptWork:
    """Rows of the batch whose hidden states are needed for more than the next token."""

    logprobs: PromptLogprobs | None
    pooling: Pooling | None


class PromptRows(NamedTuple):
    """The results on the host."""

    logprobs: LogprobRows | None
    """One row for each of `PromptWork.logprobs.targets`."""
    sums: np.ndarray | None
    """[num_sums, hidden_size] float32, of `PromptWork.pooling`."""


class PromptResults(NamedTuple):
    """The results on the device, or on their way to the host."""

    logprobs: Logprobs | None
    sums: torch.Tensor | None  # [num_sums, hidden_size] float32

    def to_host(self) -> "PromptResults":
        logprobs = None if self.logprobs is None else self.logprobs.to_host()
        return PromptResults(logprobs, None if self.sums is None else self.sums.to("cpu", non_blocking=True))

    def to_rows(self) -> PromptRows:
        logprobs = None if self.logprobs is None else self.logprobs.to_rows()
        return PromptRows(logprobs, None if self.sums is None else self.sums.numpy())


def build_prompt_work(scheduled: SchedulerOutput, cu_seqlens_q: np.ndarray) -> PromptWork | None:
    """cu_seqlens_q: [num_seqs + 1], the chunks' first rows in the batch; None if no chunk asks for anything"""
    if all([seq.is_plain_sampling for seq, _, _ in scheduled.chunks]):
        return None
    work = PromptWork(build_prompt_logprobs(scheduled, cu_seqlens_q), build_pooling(scheduled, cu_seqlens_q))
    return None if work.logprobs is None and work.pooling is None else work


def compute_prompt_results(
    hidden: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor], work: PromptWork | None
) -> PromptResults | None:
    """hidden: [num_tokens, hidden_size]"""
    if work is None:
        return None
    sums = None if work.pooling is None else compute_sums(hidden, work.pooling)
    return PromptResults(compute_prompt_logprobs(hidden, compute_logits, work.logprobs), sums)
