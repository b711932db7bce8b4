"""Adapters of the two layers with a row for each token of the vocabulary: `embed_tokens` and `lm_head`.

    embed_tokens   x[i] += B A[:, token_ids[i]]    A: [rank, vocab_size], B: [hidden_size, rank]
    lm_head        logits += hidden A^T B^T        A: [rank, hidden_size], B: [vocab_size, rank]

If the model ties its embeddings, both layers are one table, but an adapter changes only the layer that it names, as the
unmerged model of PEFT does. The rows of `embed_tokens` are all tokens of a step. Those of `lm_head` are a choice of
them, so the runner selects the adapters of these rows before it computes logits.

Of several ranks, rank 0 has these matrices whole: it adds the change of the embeddings to its part of the ranks' sum,
and that of the logits once it has gathered them. All is in PyTorch, since a step reads few rows of these matrices. On
CUDA, steps with such adapters are computed without graphs: others need no memory and no kernels for them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm_extras.kernels.adapter_rows import AdapterRows, LayerShape, Products
from nanovllm_extras.lora.places import Place, Projection

EMBEDDINGS, HEAD = "model.embed_tokens", "lm_head"


def find_vocabulary(network: Any) -> list[Place]:
    """Return the embeddings and the output layer of a network, whose only projections have their own names."""
    vocab_size, hidden_size = network.model.embed_tokens.weight.shape
    return [
        Place(EMBEDDINGS, vocab_size, (Projection(EMBEDDINGS, 0, hidden_size),)),
        Place(HEAD, hidden_size, (Projection(HEAD, 0, vocab_size),)),
    ]


class VocabularyMatrices(Products):
    """A and B of one of the two layers, for the adapters in all slots.

    rows: of the step, or of its logits; is_kept: False above rank 0, which does not read them
    """

    def __init__(
        self,
        shape: LayerShape,
        rows: AdapterRows,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        is_kept: bool,
    ) -> None:
        super().__init__(shape, rows, num_slots, dtype)
        self.device, self.is_kept = device, is_kept
        self.slots: list[Any] = [None] * (num_slots + 1)

    def pack(self, a: Tensor, b: Tensor) -> Any:
        return super().pack(a, b) if self.is_kept else None

    def put(self, slot: int, packed: list[Any]) -> None:
        (one,) = packed
        self.slots[slot] = None if one is None else [matrix.to(self.device) for matrix in one]

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add x A^T B^T to y. x: [num_rows, hidden_size]; y: [num_rows, vocab_size], which may have another dtype"""
        for index, a, b in self._groups():
            y.index_add_(0, index, F.linear(F.linear(x[index], a), b).to(y.dtype))

    def add_rows(self, token_ids: Tensor, x: Tensor) -> None:
        """Add the change of each token's vector to x: [num_tokens, hidden_size]. token_ids: [num_tokens]"""
        for index, a, b in self._groups():
            x.index_add_(0, index, F.linear(a[:, token_ids[index]].T, b).to(x.dtype))

    def _groups(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return (rows, A, B) for each adapter in a slot that changes this layer."""
        slots = self.rows.slots
        if slots is None:
            return []
        return [(torch.nonzero(slots == i)[:, 0], *one) for i, one in enumerate(self.slots) if one is not None]


class LoraEmbedding(nn.Module):
    """`base`, the table of token vectors, and the changes of the adapters."""

    def __init__(self, base: Any, matrices: VocabularyMatrices) -> None:
        super().__init__()
        self.base, self.matrices = base, matrices

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int -> [num_tokens, hidden_size]"""
        x: Tensor = self.base(token_ids)
        self.matrices.add_rows(token_ids, x)
        return x


class LoraHead(nn.Module):
    """`base`, the output layer, and the changes of the adapters of the rows whose logits are computed."""

    def __init__(self, base: Any, matrices: VocabularyMatrices) -> None:
        super().__init__()
        self.base, self.matrices = base, matrices

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up rows of the table, as the self-check does: they are those of the model without adapters."""
        rows: Tensor = self.base(token_ids)
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size]"""
        logits: Tensor = self.base.logits(hidden)
        self.matrices.add(hidden, logits)
        return logits
