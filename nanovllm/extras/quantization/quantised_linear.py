"""What a quantised weight is, and the layers that multiply by one, in PyTorch: the definition.

A weight is cut into groups of inputs. A group keeps a scale, and for each weight a small integer q:

    weight ≈ scale · (q − zero)

Eight weights in 4 bits, where zero is 8: the largest magnitude, −0.8, becomes q = 0, so the scale is −0.8 / −8 = 0.1.

    weight            0.31  −0.80   0.04   0.52  −0.27   0.11  −0.46   0.68
    weight / 0.1       3.1   −8.0    0.4    5.2   −2.7    1.1   −4.6    6.8
    q                   11      0      8     13      5      9      3     15
    scale · (q − 8)    0.3   −0.8    0.0    0.5   −0.3    0.1   −0.5    0.7

A product rounds each row of x to 8 bits as well, by group, with scales of its own. Then the sum over a group is one of
integers, exact in any order, and each group's sum is multiplied by both scales once. Groups have at most 128 inputs, so
float32 holds their sums exactly, and a row's bits depend on no other row.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

SMALLEST = 1e-30  # a group of x whose magnitudes are all below is zero: 127 / x could be infinite


@dataclass(frozen=True)
class QuantisedWeight:
    """weight[o, i] = scales[o, g] · (q[o, i] − zeros[o, g]), where g is the group of input i, or always 0."""

    q: Tensor  # [out_features, in_features] uint8
    scales: Tensor  # [out_features, num_groups or 1] float32
    zeros: Tensor | None  # as scales, uint8; None: all are half of q's range
    bits: int
    group_size: int  # of the activations, and of the weight if it has a scale for each group
    order: Tensor | None = None  # [in_features]: which input each column of q is for, where it is not its own (GPTQ)

    def dequantised(self) -> Tensor:
        """[out_features, in_features] float32"""
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.spread(self.zeros.float())
        weight = self.spread(self.scales) * (self.q.float() - zeros)
        return weight if self.order is None else weight[:, self.order.argsort()]

    def spread(self, of_groups: Tensor) -> Tensor:
        """[out_features, num_groups or 1] -> what broadcasts to [out_features, in_features]"""
        return spread(of_groups, self.group_size, self.q.shape[1])


def spread(of_groups: Tensor, group_size: int, size: int) -> Tensor:
    """[…, num_groups] -> […, size]: each group's value for each of its members; one value stays one"""
    if of_groups.shape[-1] == 1:
        return of_groups
    return of_groups.repeat_interleave(group_size, dim=-1)[..., :size]


def quantise_weight(weight: Tensor, bits: int, group_size: int) -> QuantisedWeight:
    """weight: [out_features, in_features]. One scale for each output with 8 bits, for each group with 4.

    The largest magnitude of a group becomes an end of q's range: with 4 bits the lower end, which is one step farther.
    """
    num_outputs, size = weight.shape
    width = size if bits == 8 else group_size
    padded = nn.functional.pad(weight.float(), (0, -size % width)).view(num_outputs, -1, width)
    largest = padded.gather(-1, padded.abs().argmax(-1, keepdim=True))[..., 0]  # [out_features, num_groups], signed
    scales = largest.abs() / 127 if bits == 8 else largest / -8
    half, most = 2 ** (bits - 1), 2**bits - 1
    steps = padded / torch.where(scales == 0, 1, scales)[..., None]
    q = (steps.round() + half).clamp(0, most).to(torch.uint8).flatten(1)[:, :size].contiguous()
    return QuantisedWeight(q, scales, None, bits, group_size)


def round_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """x: [num_tokens, size] -> q: as x, whole numbers in -127 … 127, float32; scales: [num_tokens, num_groups]"""
    num_groups = -(-x.shape[1] // group_size)
    groups = nn.functional.pad(x.float(), (0, num_groups * group_size - x.shape[1])).unflatten(1, (num_groups, -1))
    most = groups.abs().amax(-1)  # [num_tokens, num_groups]; NaN if one is
    inverse = torch.where(most >= SMALLEST, torch.full_like(most, 127) / most, 0)  # `127 / most` would round twice
    q = (groups * inverse[..., None]).round().flatten(1)[:, : x.shape[1]]
    return q, most / 127


def multiply(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """x: [num_tokens, in_features] -> [num_tokens, out_features] float32"""
    x = x if weight.order is None else x[:, weight.order]
    q, x_scales = round_rows(x, weight.group_size)
    has_groups = weight.scales.shape[1] > 1
    y = torch.zeros(len(x), len(weight.q), device=x.device)
    for group in range(x_scales.shape[1]):
        members = slice(group * weight.group_size, (group + 1) * weight.group_size)
        own = group if has_groups else 0
        zeros = 2 ** (weight.bits - 1) if weight.zeros is None else weight.zeros[:, own, None].float()
        sums = q[:, members] @ (weight.q[:, members].float() - zeros).T  # [num_tokens, out_features], whole numbers
        y += sums * (x_scales[:, group, None] * weight.scales[:, own])
    return y


class QuantisedLinear(nn.Module):
    """x: [..., in_features] -> x @ weight.T + bias: [..., out_features]"""

    def __init__(self, weight: QuantisedWeight | None, bias: Tensor | None) -> None:
        """`weight`: None, if it is loaded later"""
        super().__init__()
        self.quantised: Any = weight
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        y = multiply(x.flatten(0, -2), self.quantised).unflatten(0, x.shape[:-1])
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


class QuantisedFusedLinear(QuantisedLinear):
    """As `FusedLinear`: several projections of the same input. `parts`: name -> number of rows."""

    def __init__(self, weight: QuantisedWeight | None, bias: Tensor | None, parts: dict[str, int]) -> None:
        super().__init__(weight, bias)
        self.parts = parts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(x).split(tuple(self.parts.values()), dim=-1)


class QuantisedEmbedding(nn.Module):
    """As `Embedding`: the table of token vectors, and the scores of all tokens. A weight of our own: without zeros."""

    def __init__(self, weight: QuantisedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.quantised = weight
        self.dtype = dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int -> [num_tokens, hidden_size]"""
        table = self.quantised
        rows = replace(table, q=table.q[token_ids], scales=table.scales[token_ids])
        return rows.dequantised().to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_samples, hidden_size] -> [num_samples, vocab_size]"""
        return multiply(hidden, self.quantised).to(hidden.dtype)
