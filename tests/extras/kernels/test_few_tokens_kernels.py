"""Products of few tokens in Triton: against float64, and against the PyTorch layers that they replace.

Where they run, and with what in memory: `on_device.py`. Rows behind the last token hold NaN.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.basic import RMSNorm, SiluAndMul
from nanovllm_extras.kernels.cuda import few_tokens
from tests.extras.kernels.on_device import DEVICE, DTYPES, IS_INTERPRETED, randn

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPS = 1e-6
SIZES = [(64, 16), (128, 40), (192, 33), (512, 64), (1024, 80)]  # inputs, outputs

pytestmark = [] if IS_INTERPRETED else pytest.mark.gpu


def rows_before_poison(num_tokens, size, dtype, seed, scale=1.0):
    """The first rows of a tensor that goes on with NaN."""
    x = torch.full((few_tokens.MAX_TOKENS + 1, size), math.nan, dtype=dtype, device=DEVICE)
    x[:num_tokens] = randn(num_tokens, size, dtype=dtype, seed=seed, scale=scale)
    return x[:num_tokens]


def make(num_tokens, inputs, outputs, dtype):
    x = rows_before_poison(num_tokens, inputs, dtype, seed=1, scale=3.0)
    norm_weight = randn(inputs, dtype=dtype, seed=2) * 0.3 + 1
    weight = randn(outputs, inputs, dtype=dtype, seed=3, scale=inputs**-0.5)
    return x, norm_weight, weight


def normed(x, norm_weight):
    """In float64."""
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * norm_weight.double()


def check(out, expected, dtype):
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.sparse
@pytest.mark.thinned
def test_norm_linear(num_tokens, inputs, outputs, dtype, has_bias):
    x, norm_weight, weight = make(num_tokens, inputs, outputs, dtype)
    bias = randn(outputs, dtype=dtype, seed=4) if has_bias else None
    before = x.clone()
    out = few_tokens.norm_linear(x, norm_weight, EPS, weight, bias)
    expected = normed(x, norm_weight) @ weight.double().T + (bias.double() if has_bias else 0)
    check(out, expected, dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("num_tokens", [1, 3, 16])
@pytest.mark.sparse
@pytest.mark.thinned
def test_norm_gate_up(num_tokens, inputs, outputs, dtype):
    x, norm_weight, weight = make(num_tokens, inputs, 2 * outputs, dtype)
    out = few_tokens.norm_gate_up(x, norm_weight, EPS, weight)
    gate, up = (normed(x, norm_weight) @ weight.double().T).chunk(2, dim=-1)
    assert out.shape == (num_tokens, outputs)
    check(out, F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("num_tokens", [1, 5, 16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.sparse
@pytest.mark.thinned
def test_add_linear(num_tokens, inputs, outputs, dtype, has_bias):
    x, _, weight = make(num_tokens, inputs, outputs, dtype)
    bias = randn(outputs, dtype=dtype, seed=4) if has_bias else None
    place = rows_before_poison(few_tokens.MAX_TOKENS, outputs, dtype, seed=5)
    behind = place[num_tokens:].clone()
    expected = place[:num_tokens].double() + x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    out = few_tokens.add_linear(place[:num_tokens], x, weight, bias)
    assert out.data_ptr() == place.data_ptr()
    check(out, expected, dtype)
    assert torch.equal(place[num_tokens:], behind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_that_of_the_layers(dtype):
    """Where sums in another order do not fall to another side of a border."""
    x, norm_weight, weight = make(9, 256, 96, dtype)
    norm = RMSNorm(256, EPS).to(DEVICE, dtype)
    norm.weight.data = norm_weight
    with torch.inference_mode():
        product = F.linear(norm(x).double(), weight.double())
        exact = product.to(dtype)  # rounded once, as products are
        out = few_tokens.norm_linear(x, norm_weight, EPS, weight, None)
        gated = few_tokens.norm_gate_up(x, norm_weight, EPS, weight)
        expected = SiluAndMul()(*exact.chunk(2, dim=-1))
    if dtype == torch.float32:
        torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gated, expected, rtol=1e-5, atol=1e-5)
    else:
        assert (out == exact).float().mean() > 0.98
        assert (gated == expected).float().mean() > 0.96


def test_small_activations_are_normalised_no_further_than_eps():
    x, norm_weight, weight = make(2, 64, 16, torch.float32)
    x = x * 1e-4
    check(
        few_tokens.norm_linear(x, norm_weight, EPS, weight, None), normed(x, norm_weight) @ weight.double().T, x.dtype
    )


def test_a_token_has_the_same_bits_alone_and_among_others():
    x, norm_weight, weight = make(16, 256, 48, torch.float16)
    together = few_tokens.norm_gate_up(x, norm_weight, EPS, weight)
    for i in (0, 6, 15):
        assert torch.equal(few_tokens.norm_gate_up(x[i : i + 1].clone(), norm_weight, EPS, weight)[0], together[i])


def test_large_activations_of_float16_do_not_overflow():
    x, norm_weight, weight = make(2, 128, 32, torch.float16)
    x, norm_weight = (x * 10_000).clamp(-60_000, 60_000), norm_weight * 30
    out = few_tokens.norm_linear(x, norm_weight, EPS, weight, None)
    check(out / 30, normed(x, norm_weight / 30) @ weight.double().T, torch.float16)


def test_sizes_that_have_no_tile():
    assert [few_tokens.takes(n) for n in (64, 1024, 3072, 5120, 192)] == [True] * 5
    assert [few_tokens.takes(n) for n in (32, 96, 100, 1000)] == [False] * 4
