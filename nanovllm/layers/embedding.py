"""Token ids to vectors, and vectors back to a score for each token of the vocabulary."""

import torch
import torch.nn.functional as F
from torch import nn


class Embedding(nn.Module):
    """The table of token vectors; with tied embeddings it is the output layer too."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))  # [vocab_size, hidden_size]

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int -> [num_tokens, hidden_size]"""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_samples, hidden_size] -> [num_samples, vocab_size]"""
        return F.linear(hidden, self.weight)
