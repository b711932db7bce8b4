"""A head for multi-token prediction (MTP): one decoder layer that guesses the token after the next one.

The model has computed the hidden state h of a token, and the next token is known. The head combines both, and its own
hidden state is scored by the model's output layer (DeepSeek-V3, https://arxiv.org/abs/2412.19437; Qwen3.5):

    x = fc([norm(embedding of the next token), norm(h)])  →  decoder layer with attention  →  norm → logits

A pair (h of position i - 1, token of position i) is a token of the head. It has the rotary position i - 1, as in
training. Its K and V are stored in the slot of position i, so that they depend only on tokens up to i: blocks that
sequences share hold the same K and V for all of them. Position 0 has no pair, so no other position attends to its
slot.

`execution/mtp_head.py` runs the head beside the model, and `speculation/mtp_drafts.py` makes drafts with it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.attention import AttentionMetadata, TorchAttention, softmax_attention
from nanovllm.layers.basic import Linear
from nanovllm_extras.models.decoder import LayerClass
from nanovllm_extras.models.gemma3 import UnitOffsetRMSNorm
from nanovllm_extras.models.layer_inputs import StateCaches


class HeadAttention(TorchAttention):
    """PyTorch's attention, in which only position 0 itself sees position 0."""

    def attend(self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        return super().attend(q, layer_cache, metadata, attend_without_first)


def attend_without_first(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor) -> Tensor:
    """Compute `softmax_attention` without position 0, which only position 0 itself sees.

    is_seen: [num_seqs, 1, n, len] bool, in each row the positions up to the token's own
    """
    is_seen = is_seen.clone()
    is_seen[..., 0] = is_seen.sum(-1) == 1
    return softmax_attention(q, k, v, is_seen)


class MtpHead(nn.Module):
    """The head. The modules have the names that they have in a checkpoint, under `mtp`."""

    def __init__(self, config: Any, backend: TorchAttention, layer_class: LayerClass) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        own = HeadAttention(backend.num_heads, backend.num_kv_heads, backend.head_dim, backend.block_size)
        self.pre_fc_norm_embedding = UnitOffsetRMSNorm(size, eps)
        self.pre_fc_norm_hidden = UnitOffsetRMSNorm(size, eps)
        self.fc = Linear(2 * size, size)
        attends = config.layer_types.index("full_attention")  # a layer that has what the head's layer has
        self.layers = nn.ModuleList([layer_class(config, own, attends)])
        self.norm = UnitOffsetRMSNorm(size, eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Return the head's hidden states: [num_tokens, hidden_size]

        embedded: [num_tokens, hidden_size], the vectors of the tokens; hidden: the same shape, the hidden states of the
        tokens before them; kv: [2, 1, num_blocks + 1, …], the K and V of the head
        """
        x = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)
        caches = StateCaches(kv, conv=kv, recurrent=kv)  # it has no states
        return self.norm(self.layers[0](self.fc(x), cos, sin, caches, 0, metadata))
