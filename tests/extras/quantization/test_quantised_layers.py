"""What a quantised weight is, and products with it, against arithmetic on single numbers and in float64."""

import pytest
import torch

from nanovllm_extras.weights.quantised_linear import (
    QuantisedEmbedding,
    QuantisedFusedLinear,
    QuantisedLinear,
    QuantisedWeight,
    multiply,
    quantise_weight,
    round_rows,
)


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_float64(x, weight):
    """x, rounded as `round_rows` says, times the weight that is meant."""
    q, scales = round_rows(x, weight.group_size)
    wide = scales.double().repeat_interleave(weight.group_size, dim=1)[:, : x.shape[1]]
    return (q.double() * wide) @ weight.dequantised().double().T


@pytest.mark.parametrize(("bits", "group_size"), [(8, 128), (4, 128), (4, 32)])
def test_no_weight_is_farther_off_than_half_a_step(bits, group_size):
    for size in (16, 128, 208):
        weight = randn(5, size)
        weight[2] = 0
        made = quantise_weight(weight, bits, group_size)
        assert made.scales.shape == (5, 1 if bits == 8 else -(-size // group_size))
        assert int(made.q.max()) < 2**bits
        steps = made.spread(made.scales.abs()).expand(5, size)
        # of 4 bits, the upper end is a step nearer than the lower, and what lies beyond it is cut off
        limit = steps / 2 if bits == 8 else steps
        assert ((made.dequantised() - weight).abs() <= limit + 1e-6).all()
        assert not made.dequantised()[2].any()


def test_rows_are_rounded_each_by_itself():
    x = randn(3, 48) * torch.tensor([[1.0], [1000.0], [0.0]])
    q, scales = round_rows(x, 32)
    assert scales.shape == (3, 2)
    assert [int(row.abs().max()) for row in q] == [127, 127, 0]
    wide = scales.repeat_interleave(32, dim=1)[:, :48]
    assert ((q * wide - x).abs() <= wide / 2 * 1.001).all()
    assert torch.equal(round_rows(x[1:2], 32)[0], q[1:2])


@pytest.mark.parametrize(("bits", "group_size", "has_zeros"), [(8, 128, True), (4, 128, False), (4, 32, True)])
def test_a_product_equals_float64(bits, group_size, has_zeros):
    weight = quantise_weight(randn(20, 208), bits, group_size)
    if has_zeros:
        zeros = torch.randint(0, 2**bits, weight.scales.shape, generator=torch.Generator().manual_seed(3))
        weight = QuantisedWeight(weight.q, weight.scales, zeros.to(torch.uint8), bits, group_size)
    x = randn(3, 208, seed=2)
    torch.testing.assert_close(multiply(x, weight).double(), in_float64(x, weight), rtol=1e-5, atol=1e-5)


def test_what_is_no_number_stays_none():
    weight = quantise_weight(randn(20, 64), 8, 32)
    x = randn(3, 64)
    x[1, 5] = torch.nan
    y = multiply(x, weight)
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


def test_layers_have_the_forms_of_those_whose_place_they_take():
    weight, bias = quantise_weight(randn(20, 64), 8, 128), randn(20, seed=4)
    x = randn(2, 3, 64).bfloat16()
    expected = (in_float64(x.view(6, 64), weight) + bias).view(2, 3, 20)
    y = QuantisedLinear(weight, bias)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2**-9)
    parts = QuantisedFusedLinear(weight, bias, {"a": 12, "b": 8})(x)
    assert torch.equal(torch.cat(parts, dim=-1), y)
    for size, bits in ((64, 8), (64, 4), (48, 4)):
        table = QuantisedEmbedding(quantise_weight(randn(20, size), bits, 32), torch.bfloat16)
        ids = torch.tensor([19, 0, 19])
        assert torch.equal(table(ids), table.quantised.dequantised()[ids].bfloat16())
        assert table.logits(x[0, :, :size]).shape == (3, 20)
