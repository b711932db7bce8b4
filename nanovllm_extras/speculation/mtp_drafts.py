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

from nanovllm.batch import Batch
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.sampling.runner_hooks import ArrivingTokens, SampledTokens
from nanovllm_extras.speculation.draft_model import DraftModel


class MtpDrafts(DraftModel):
    """A `Proposer` that runs the head of `runner`'s model."""

    def __init__(self, runner: ModelRunner, blocks: BlockManager) -> None:
        super().__init__(runner, blocks)
        self._large = runner
        (head,) = runner.followers
        self._head: Any = head
        self._hidden: dict[int, Tensor] = {}  # of the newest draft of each entry of `propose`: [hidden_size]

    def _draw(self, growing: list[tuple[int, Sequence]], drafts: list[list[int]]) -> list[int]:
        rows = [self._hidden[i] if drafts[i] else self._newest(seq) for i, seq in growing]
        token_ids, hidden = self._draft(self._make_batch(growing, drafts), torch.stack(rows))
        self._hidden = {i: row for (i, _), row in zip(growing, hidden, strict=True)}
        return token_ids

    @torch.inference_mode()
    def _draft(self, batch: Batch, previous: Tensor) -> tuple[list[int], Tensor]:
        """Sample a draft after each token of a batch of decodes, by the head only.

        previous: [num_seqs, hidden_size], the hidden states of the tokens before. Returns the drafts, and the hidden
        states of the head: like `previous`
        """
        runner = self._large
        with runner.step_context(), runner.ranks.step(batch, previous=previous):
            sent = runner.send_batch(batch)
            hidden = self._head.run(sent, previous)
            token_ids, _ = runner.choose_tokens(hidden, sent.sampling)
            return ArrivingTokens(SampledTokens(token_ids)).wait().token_ids, hidden

    def _newest(self, seq: Sequence) -> Tensor:
        """Return the model's hidden state of the newest computed token of `seq`: [hidden_size]"""
        states, pool = self.blocks.states, self.runner.layout.pool
        assert states is not None
        assert pool is not None
        return pool.hidden[0, states.slot_to_read(seq)]
