"""Where the ranks' networks meet: a sum behind each half of a layer, and the vocabulary.

Each rank computes its heads and its part of the feed-forward network for all tokens, so its output is a part of a sum:

    x → norm → attention of the rank's heads       → all-reduce → + x
    x → norm → the rank's part of the feed-forward → all-reduce → + x

The embedding knows the vectors of the rank's tokens only, and gives zeros for the others, before a sum of its own. In
Gemma 4, the table of the layers' own embeddings does the same. Logits are gathered: rank 0 gets those of all tokens.
`join` adds this to a network that is loaded and has its fast layers. Called by `start_ranks.py`, on every rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nanovllm_extras.parallel.communicator import Communicator

# names of the two halves of a decoder layer, in all architectures; Gemma 4's experts are beside its `mlp`
HALVES = ("self_attn", "linear_attn", "conv", "mlp", "block_sparse_moe", "experts")


def join(model: Any, communicator: Communicator, vocab_size: int, hears_tokens: bool) -> None:
    """Let the ranks' networks compute together."""
    join_layers(model.model.layers, communicator)
    if getattr(model, "mtp", None) is not None:  # a head for multi-token prediction
        join_layers(model.mtp.layers, communicator)
    tied = model.lm_head is model.model.embed_tokens
    share = VocabularyShare(model.model.embed_tokens, communicator, vocab_size, hears_tokens)
    model.model.embed_tokens = share
    model.lm_head = share if tied else VocabularyShare(model.lm_head, communicator, vocab_size, hears_tokens)
    own = getattr(model.model, "embed_tokens_per_layer", None)
    if own is not None:  # looked up after `embed_tokens`, which has replaced the token ids
        num_rows = model.model.own_vocab_size * communicator.size  # of all ranks
        model.model.embed_tokens_per_layer = VocabularyShare(own, communicator, num_rows, hears_tokens=False)


def join_layers(layers: Any, communicator: Communicator) -> None:
    """Add the sums to decoder layers. A fast version that cannot have them is taken apart."""
    for i, layer in enumerate(layers):
        parts = getattr(layer, "layer", layer)  # what a fast version of the whole layer can be taken apart into
        for name in HALVES:
            if hasattr(parts, name):
                half = getattr(parts, name)
                half.register_forward_hook(lambda module, arguments, output: communicator.all_reduce(output))
        if hasattr(layer, "join") and not layer.join(communicator):
            layers[i] = parts


class VocabularyShare(nn.Module):
    """The table of token vectors, of which `inner` holds the rank's rows.

    hears_tokens: rank 0's token ids are sent to the others. With overlap only its device knows the newest.
    """

    def __init__(self, inner: Any, communicator: Communicator, vocab_size: int, hears_tokens: bool) -> None:
        super().__init__()
        self.inner = inner
        self.communicator = communicator
        self.vocab_size = vocab_size
        self.num_rows = -(-vocab_size // communicator.size)
        self.hears_tokens = hears_tokens
        self.add_before_sum: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        """Adds to the vectors: [num_tokens, hidden_size] of token ids: [num_tokens]. Only rank 0 may have it."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up token vectors on every rank: [num_tokens] int -> [num_tokens, hidden_size]"""
        if self.hears_tokens:
            token_ids = self.communicator.broadcast(token_ids)
        rows = token_ids - self.communicator.rank * self.num_rows  # [num_tokens]
        is_elsewhere = (rows < 0) | (rows >= self.num_rows)
        x = self.inner(rows.clamp(0, self.num_rows - 1)).masked_fill(is_elsewhere[:, None], 0)
        if self.add_before_sum is not None:
            self.add_before_sum(token_ids, x)
        return self.communicator.all_reduce(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits: [num_samples, hidden_size] -> [num_samples, vocab_size]; above rank 0 only the rank's part"""
        if not len(hidden):  # each rank knows it: nothing is sent
            return hidden.new_empty(0, self.vocab_size)
        logits = self.communicator.gather(self.inner.logits(hidden))
        is_filled_up = logits.shape[1] > self.vocab_size
        return logits[:, : self.vocab_size].contiguous() if is_filled_up else logits
