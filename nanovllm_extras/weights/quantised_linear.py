"""The definition in PyTorch of quantised weights and of the layers that multiply by them.

The inputs of a weight are divided into groups. A group has a scale, and each of its weights is a small integer q:

    weight ≈ scale · (q − zero)

Eight weights in 4 bits, where zero is 8: the largest magnitude, −0.8, becomes q = 0, so the scale is −0.8 / −8 = 0.1.

    weight            0.31  −0.80   0.04   0.52  −0.27   0.11  −0.46   0.68
    weight / 0.1       3.1   −8.0    0.4    5.2   −2.7    1.1   −4.6    6.8
    q                   11      0      8     13      5      9      3     15
    scale · (q − 8)    0.3   −0.8    0.0    0.5   −0.3    0.1   −0.5    0.7

A product also rounds each row of x to 8 bits, with a scale for each group of the row. Then the sum over a group is a
sum of integers, which is exact in any order, and each group's sum is multiplied by both scales once. Groups have at
most 128 inputs, so float32 represents their sums exactly, and a row's bits do not depend on other rows.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

NUM_AT_ONCE = 1 << 22  # weights that are quantised at a time
SMALLEST = 1e-30  # a group of x with only smaller magnitudes rounds to zero, because 127 / x could be infinite


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight matrix of 8 or 4 bits.

    weight[o, i] = scales[o, g] · (q[o, i] − zeros[o, g]), where g is the group of input i, or 0 without groups.
    """

    q: Tensor  # [out_features, in_features] uint8
    scales: Tensor  # [out_features, num_groups or 1] float32
    zeros: Tensor | None  # as scales, uint8; None: all are half of q's range
    bits: int
    group_size: int  # of the activations, and of the weight if it has a scale for each group
    order: Tensor | None = None  # [in_features]: the input of each column of q; None: column i is input i (see GPTQ)

    def dequantised(self) -> Tensor:
        """Return the weight as [out_features, in_features] float32."""
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.spread(self.zeros.float())
        weight = self.spread(self.scales) * (self.q.float() - zeros)
        return weight if self.order is None else weight[:, self.order.argsort()]

    def spread(self, of_groups: Tensor) -> Tensor:
        """Expand [out_features, num_groups or 1] to a tensor that broadcasts to [out_features, in_features]."""
        return spread(of_groups, self.group_size, self.q.shape[1])


def spread(of_groups: Tensor, group_size: int, size: int) -> Tensor:
    """Repeat each group's value for all members: […, num_groups] -> […, size]. A single value is not repeated."""
    if of_groups.shape[-1] == 1:
        return of_groups
    return of_groups.repeat_interleave(group_size, dim=-1)[..., :size]


def quantise_weight(weight: Tensor, bits: int, group_size: int) -> QuantisedWeight:
    """Quantise weight: [out_features, in_features], with a scale for each output (8 bits) or each group (4 bits).

    The largest magnitude becomes an end of q's range. With 4 bits it is the lower end, which is one step farther from
    zero. A few rows at a time, because float32 and its intermediate results take many times the weight's memory.
    """
    num_outputs, size = weight.shape
    width = size if bits == 8 else group_size
    q = torch.empty(num_outputs, size, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(num_outputs, -(-size // width), device=weight.device)
    num_rows = max(1, NUM_AT_ONCE // size)
    for start in range(0, num_outputs, num_rows):
        rows = slice(start, start + num_rows)
        q[rows], scales[rows] = quantise_rows(weight[rows], bits, width)
    return QuantisedWeight(q, scales, None, bits, group_size)


def quantise_rows(weight: Tensor, bits: int, width: int) -> tuple[Tensor, Tensor]:
    """Quantise weight: [num_rows, in_features], with a scale for each `width` inputs -> q and scales"""
    size = weight.shape[1]
    padded = nn.functional.pad(weight.float(), (0, -size % width)).unflatten(1, (-1, width))
    largest = padded.gather(-1, padded.abs().argmax(-1, keepdim=True))[..., 0]  # [num_rows, num_groups], signed
    scales = largest.abs() / 127 if bits == 8 else largest / -8
    half, most = 2 ** (bits - 1), 2**bits - 1
    steps = padded / torch.where(scales == 0, 1, scales)[..., None]
    return (steps.round() + half).clamp(0, most).to(torch.uint8).flatten(1)[:, :size], scales


def round_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Round x: [num_tokens, size] to 8 bits -> q: as x, whole numbers in -127 … 127 as float32, and scales

    scales: [num_tokens, num_groups]
    """
    num_groups = -(-x.shape[1] // group_size)
    groups = nn.functional.pad(x.float(), (0, num_groups * group_size - x.shape[1])).unflatten(1, (num_groups, -1))
    most = groups.abs().amax(-1)  # [num_tokens, num_groups]; NaN if one is
    inverse = torch.where(most >= SMALLEST, torch.full_like(most, 127) / most, 0)  # `127 / most` would round twice
    q = (groups * inverse[..., None]).round().flatten(1)[:, : x.shape[1]]
    return q, most / 127


def multiply(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """Multiply x: [num_tokens, in_features] by the weight -> [num_tokens, out_features] float32"""
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
    """Linear layer with a quantised weight: x: [..., in_features] -> x @ weight.T + bias: [..., out_features]"""

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.quantised = weight
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        y = multiply(x.flatten(0, -2), self.quantised).unflatten(0, x.shape[:-1])
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


class QuantisedFusedLinear(QuantisedLinear):
    """Several projections of the same input in one product, like `FusedLinear`. `parts`: name -> number of rows"""

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None, parts: dict[str, int]) -> None:
        super().__init__(weight, bias)
        self.parts = parts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x).split(tuple(self.parts.values()), dim=-1)


class SplitFusedLinear(nn.Module):
    """Several projections of the same input in more than one product, because their weights differ in kind.

    products: layers with `parts`, such as a `QuantisedFusedLinear` and a `FusedLinear`; parts: those of all of them, in
    the order of the result
    """

    def __init__(self, products: list[Any], parts: dict[str, int]) -> None:
        super().__init__()
        self.products, self.parts = nn.ModuleList(products), parts
        names = [name for product in products for name in product.parts]
        self.places = [names.index(name) for name in parts]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = [y for product in self.products for y in product(x)]
        y = torch.cat([found[place] for place in self.places], dim=-1)  # kernels expect one tensor of all parts
        return y.split(tuple(self.parts.values()), dim=-1)


class QuantisedEmbedding(nn.Module):
    """The table of token vectors and the output layer, like `Embedding`. Its weight never has `zeros`."""

    def __init__(self, weight: QuantisedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.quantised = weight
        self.dtype = dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up the tokens' rows and dequantise them: [num_tokens] int -> [num_tokens, hidden_size]"""
        table = self.quantised
        rows = replace(table, q=table.q[token_ids], scales=table.scales[token_ids])
        return rows.dequantised().to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: [num_samples, hidden_size] -> [num_samples, vocab_size]"""
        return multiply(hidden, self.quantised).to(hidden.dtype)
