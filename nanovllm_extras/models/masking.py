"""Which tokens does a token see, and how do scores become weights? What layers of one model may do differently.

    window    of 3: a token sees itself and the two tokens before it (Longformer, https://arxiv.org/abs/2004.05150)
    softcap   of 50: a score s becomes 50 * tanh(s / 50), which stays below 50 (Gemma 2, https://arxiv.org/abs/2408.00118)
    sinks     of each head one more score, which has no value: a head may attend to nothing (gpt-oss,
              https://arxiv.org/abs/2508.10925): softmax([scores, sink]) without its last weight

    position      0 1 2 3 4
    0             x
    1             x x
    2             x x x            with a window of 3
    3               x x x
    4                 x x x

`MaskedAttention` passes its `AttentionOptions` to the backend. PyTorch's attention calls them instead of
`softmax_attention`; the kernels of other backends read them and do the same.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.attention import Attention, AttentionMetadata, TorchAttention, attend_on_cuda


@dataclass(frozen=True)
class AttentionOptions:
    """How one layer attends."""

    scale: float | None = None
    """Factor on the scores q k^T; None is 1 / sqrt(head_dim)."""
    window: int | None = None
    """Tokens that a token sees, itself included; None is all of them."""
    softcap: float | None = None
    """Bound of the scaled scores; None leaves them unbounded."""
    has_sinks: bool = False
    """Whether the layer has a sink for each head."""
    sinks: Tensor | None = field(default=None, compare=False, repr=False)
    """[num_heads], the sinks, which are weights: a layer adds them to the options that its config has."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_seen: torch.Tensor) -> torch.Tensor:
        """Compute softmax(scores) v. q: [num_seqs, num_heads, n, head_dim] -> as q

        k, v: [num_seqs, num_kv_heads, len, head_dim]; is_seen: [num_seqs, 1, n, len] bool, in each row the positions up
        to the token's own
        """
        if self.window is not None:
            first = is_seen.sum(-1, keepdim=True) - self.window  # [..., n, 1]
            is_seen = is_seen & (torch.arange(is_seen.shape[-1], device=q.device) >= first)
            # blocks behind the window have been given back: a NaN in what stands there must reach no output
            is_unseen = ~is_seen.any(-2)[..., None]  # [num_seqs, 1, len, 1]
            k, v = k.masked_fill(is_unseen, 0), v.masked_fill(is_unseen, 0)
        if self.softcap is None and self.sinks is None:
            if q.is_cuda:
                return attend_on_cuda(q, k, v, is_seen, self.scale)
            return F.scaled_dot_product_attention(q, k, v, is_seen, scale=self.scale, enable_gqa=True)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = scaled((q @ k.transpose(-1, -2)).float(), scale, self.softcap)  # [..., n, len] float32
        weights = softmax_with_sinks(scores.masked_fill(~is_seen, -torch.inf), self.sinks)
        return weights.to(q.dtype) @ v


PLAIN = AttentionOptions()


def scaled(scores: Tensor, scale: float, softcap: float | None) -> Tensor:
    return scores * scale if softcap is None else softcap * torch.tanh(scores * (scale / softcap))


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute weights: [num_seqs, num_heads, n, len] float32 -> the same shape, of which a sink takes a share."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)  # [num_seqs, num_heads, n, 1]
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


class MaskedAttention(Attention):
    """Attention with options, which the backend gets as a last argument."""

    def __init__(self, backend: TorchAttention, *options: AttentionOptions) -> None:
        super().__init__(backend)
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Attend. q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim] -> as q"""
        self.backend.store_kv(k, v, layer_cache, metadata.slot_mapping)
        return self.backend.attend(q, layer_cache, metadata, *self.options)


class SinkAttention(MaskedAttention):
    """Attention with options and sinks."""

    def __init__(self, backend: TorchAttention, options: AttentionOptions, num_heads: int) -> None:
        super().__init__(backend, options)
        self.sinks = nn.Parameter(torch.empty(num_heads))  # [num_heads]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Attend. q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim] -> as q"""
        self.backend.store_kv(k, v, layer_cache, metadata.slot_mapping)
        return self.backend.attend(q, layer_cache, metadata, replace(self.options[0], sinks=self.sinks))


def make_attention(backend: TorchAttention, options: tuple[AttentionOptions, ...]) -> Attention:
    """Return the core's attention for a layer without options, else one that passes them on."""
    return MaskedAttention(backend, *options) if options else Attention(backend)


def options_of(attention: Attention) -> tuple[AttentionOptions, ...]:
    """Return the options of an attention layer: one, or none."""
    return getattr(attention, "options", ())
