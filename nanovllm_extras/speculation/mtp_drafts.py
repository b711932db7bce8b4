"""Drafts by the model's own head for multi-token prediction (`models/mtp.py`).

The head gives the token after the newest one. For more drafts it goes on from its own hidden states m, as if they were
the model's:

    known         t6 is the newest token; h5 is the model's hidden state of t5, kept in the sequence's slot
    draft         (h5, t6) -> m6 -> d7,   (m6, d7) -> m7 -> d8,   …
    the step      computes t6, d7 and d8 with model and head, so that the K and V of the head are those of the model's h

A draft is drawn as its position will be, with the same random number, as in `draft_model.py`.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm_extras.full_sequence import Sequence
from nanovllm_extras.speculation.draft_model import DraftModel
from nanovllm_extras.speculation.mtp_runner import MtpRunner


class MtpDrafts(DraftModel):
    """A `Proposer` that runs the head of `runner`'s model."""

    runner: MtpRunner

    def __init__(self, runner: MtpRunner) -> None:
        super().__init__(runner)
        self._hidden: dict[int, Tensor] = {}  # of the newest draft of each entry of `propose`: [hidden_size]

    def _draw(self, growing: list[tuple[int, Sequence]], drafts: list[list[int]]) -> list[int]:
        rows = [self._hidden[i] if drafts[i] else self._newest(seq) for i, seq in growing]
        token_ids, hidden = self.runner.draft(self._make_batch(growing, drafts), torch.stack(rows))
        self._hidden = {i: row for (i, _), row in zip(growing, hidden, strict=True)}
        return token_ids

    def _newest(self, seq: Sequence) -> Tensor:
        """Return the model's hidden state of the newest computed token of `seq`: [hidden_size]"""
        assert self._scheduler is not None
        blocks: Any = self._scheduler.block_manager
        return self.runner.kv_cache.hidden[0, blocks.slot_to_read(seq)]
