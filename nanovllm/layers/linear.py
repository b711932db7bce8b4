"""Layers that hold one matrix: a product, several products at once, and a table of token vectors.

Weights are created empty; `loader.py` fills them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """x: [..., in_features] -> x @ weight.T + bias: [..., out_features]"""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))  # [out_features, in_features]
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None  # [out_features]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Several projections of the same input as one product: their rows are stacked in one weight.

    `parts` maps the name of each projection in the checkpoint to its number of rows, in order; the loader reads it.
    Returns one tensor [..., rows] for each part.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(x).split(tuple(self.parts.values()), dim=-1)


class Embedding(nn.Module):
    """The table of token vectors. With tied embeddings it is the output layer too, and scores each token."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))  # [vocab_size, hidden_size]

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int -> [num_tokens, hidden_size]"""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_samples, hidden_size] -> [num_samples, vocab_size]"""
        return F.linear(hidden, self.weight)
