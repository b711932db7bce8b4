"""Products with weights of 8 and 4 bits in Triton: the bits of PyTorch's definition, and float64.

Where they run, and with what in memory: `on_device.py`.
"""

import math
import sys

import pytest
import torch

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.kernels.cuda import cuda_quantised as quantised
from nanovllm_extras.kernels.cuda import quantised_layers
from nanovllm_extras.kernels.cuda.quantised_layers import plain_version_of, replace_quantised
from nanovllm_extras.machine.own_process import SelfCheckError
from nanovllm_extras.self_check import runner_check
from nanovllm_extras.self_check.crash_test import CrashTest
from nanovllm_extras.weights.quantised_linear import (
    QuantisedEmbedding,
    QuantisedFusedLinear,
    QuantisedLinear,
    QuantisedWeight,
    quantise_weight,
)
from nanovllm_extras.weights.quantised_linear import multiply as multiply_by_definition
from tests.conftest import every_second
from tests.extras.kernels.on_device import DEVICE, DTYPES, IS_INTERPRETED, only_on_gpu, randn

FORMATS = [(bits, size, zeros) for bits, size in ((8, 128), (4, 128), (4, 64), (4, 32)) for zeros in (False, True)]
SIZES = [(33, 144), (64, 416), (100, 208)]  # outputs, inputs
STEPS = [(1, False), (5, True), (16, False), (17, True), (70, False)]  # tokens, has a bias
STEPS = [(*step, DTYPES[i % len(DTYPES)]) for i, step in enumerate(STEPS)]

pytestmark = [] if IS_INTERPRETED else pytest.mark.gpu


def make_weight(bits, group_size, has_zeros, n, k, seed=0):
    weight = quantise_weight(randn(n, k, seed=seed), bits, group_size)
    if not has_zeros:
        return weight
    generator = torch.Generator().manual_seed(seed)
    zeros = torch.randint(0, 2**bits, weight.scales.shape, generator=generator, dtype=torch.uint8)
    return QuantisedWeight(weight.q, weight.scales, zeros.to(DEVICE), bits, group_size)


def multiply(x, weight, bias=None):
    packed = quantised.pack(weight.q, weight.scales, weight.zeros, weight.bits, weight.group_size)
    return quantised.multiply(x, packed, bias)


@pytest.mark.parametrize(("bits", "group_size", "has_zeros"), FORMATS)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize(("num_tokens", "has_bias", "dtype"), STEPS)
@pytest.mark.sparse
@pytest.mark.thinned
def test_a_product_has_the_bits_of_the_definition(num_tokens, n, k, bits, group_size, has_zeros, dtype, has_bias):
    weight = make_weight(bits, group_size, has_zeros, n, k)
    x = randn(num_tokens, k, dtype=dtype)
    bias = randn(n, dtype=dtype, seed=2) if has_bias else None
    expected = multiply_by_definition(x, weight)
    expected = expected if bias is None else expected + bias.float()
    out = multiply(x, weight, bias)
    assert out.dtype == dtype
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize(("bits", "group_size", "has_zeros"), [(8, 128, False), (4, 32, True)])
def test_a_product_is_that_of_rounded_rows(bits, group_size, has_zeros):
    """In float64, of what `round_rows` has made of x."""
    weight = make_weight(bits, group_size, has_zeros, 40, 208)
    x = randn(7, 208, dtype=torch.float32) * 3
    q, scales, sums = quantised.round_rows(x, group_size)
    assert torch.equal(q.unflatten(1, (-1, group_size)).sum(-1, dtype=torch.int32), sums)
    assert not q[:, 208:].any()
    rounded = (q.unflatten(1, (-1, group_size)).double() * scales[..., None].double()).flatten(1)[:, :208]
    assert ((rounded - x).abs() <= 0.501 * scales.double().repeat_interleave(group_size, 1)[:, :208]).all()
    torch.testing.assert_close(
        multiply(x, weight).double(), rounded @ weight.dequantised().double().T, rtol=1e-5, atol=1e-4
    )


def test_what_is_no_number_stays_none_and_zeros_stay():
    weight = make_weight(4, 32, False, 16, 64)
    x = randn(4, 64)
    x[0] = 0
    x[1, 3] = math.nan
    x[2, 60] = math.inf
    out = multiply(x, weight)
    assert not out[0].any()
    assert not out[1:3].isfinite().any()
    assert out[3].isfinite().all()


def test_a_token_has_the_same_bits_alone_and_among_others():
    weight, x = make_weight(4, 64, False, 33, 208), randn(70, 208)
    together = multiply(x, weight)
    for first, last in ((0, 1), (9, 25), (40, 57), (69, 70)):
        assert torch.equal(multiply(x[first:last], weight), together[first:last])


def test_no_tokens():
    assert multiply(torch.empty(0, 64, device=DEVICE), make_weight(8, 128, False, 20, 64)).shape == (0, 20)


def test_fast_layers_give_the_same_bits():
    """Projections, fused ones, inputs in another order, tables of tokens, one of them at both its places."""
    plain = make_weight(4, 32, True, 48, 64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ordered = QuantisedWeight(plain.q, plain.scales, plain.zeros, 4, 32, order)
    table = QuantisedEmbedding(make_weight(8, 128, False, 50, 64), torch.float32)
    small = QuantisedEmbedding(make_weight(4, 64, False, 50, 144), torch.float32)
    layers = {
        "plain": QuantisedLinear(plain, randn(48, seed=5)),
        "ordered": QuantisedLinear(ordered, None),
        "fused": QuantisedFusedLinear(plain, None, {"a": 40, "b": 8}),
        "embed": table,
        "head": table,
        "small": small,
        "norm": torch.nn.Identity(),
    }
    model = torch.nn.ModuleDict(layers)
    x, vectors, token_ids = randn(2, 3, 64), randn(3, 144), torch.tensor([49, 0, 7], device=DEVICE)
    expected = [
        *(layers[name](x) for name in ("plain", "ordered")),
        *layers["fused"](x),
        table(token_ids),
        table.logits(x[0]),
        small(token_ids),
        small.logits(vectors),
    ]
    replace_quantised(model)
    for name, layer in layers.items():  # and back again, for the self-check
        back = plain_version_of(model[name])
        assert type(back) is type(layer)
        if name not in ("norm", "embed", "head", "small"):
            given = plain if name != "ordered" else ordered
            assert torch.equal(back.quantised.dequantised(), given.dequantised())
            assert back.bias is layer.bias
            assert getattr(back, "parts", None) == getattr(layer, "parts", None)
    assert model["embed"] is model["head"]
    assert isinstance(model["norm"], torch.nn.Identity)
    assert not any(hasattr(layer, "quantised") for layer in layers.values())
    found = [
        *(model[name](x) for name in ("plain", "ordered")),
        *model["fused"](x),
        model["embed"](token_ids),
        model["head"].logits(x[0]),
        model["small"](token_ids),
        model["small"].logits(vectors),
    ]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("quantization", every_second([{"method": "int4", "group_size": 32}, "int8"]))
def test_a_model_gives_the_tokens_of_the_definition(tiny_checkpoint, quantization):
    options = {"device": str(DEVICE), "dtype": "float32", "quantization": quantization, "num_kv_blocks": 20}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [[1, 2, 3], list(range(5, 25))]
    outputs = []
    for backend in ("torch", "triton"):
        llm = LLM(tiny_checkpoint[0], attention_backend=backend, enforce_eager=True, **options)
        outputs.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_the_self_check_compares_packed_layers(monkeypatch, tmp_path, tiny_checkpoint):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(runner_check, "start_crash_test", lambda *_: CrashTest([sys.executable, "-c", ""], 60))
    quantization = {"method": "int4", "group_size": 32, "embeddings": "int4"}
    options = {"dtype": "float32", "quantization": quantization, "num_kv_blocks": 20, "max_model_len": 48}
    options |= {"device": str(DEVICE), "attention_backend": "triton", "self_check": "strict"}
    LLM(tiny_checkpoint[0], **options)
    right = quantised.multiply
    monkeypatch.setattr(quantised_layers, "multiply", lambda x, *rest: right(x, *rest) * 1.02)
    with pytest.raises(SelfCheckError, match="wrong result: products with weights of [48] bits"):
        LLM(tiny_checkpoint[0], max_num_seqs=5, **options)


def test_a_weight_is_unpacked_as_it_was():
    for bits, group_size, has_zeros in FORMATS:
        weight = make_weight(bits, group_size, has_zeros, 33, 144)
        packed = quantised.pack(weight.q, weight.scales, weight.zeros, bits, group_size)
        q, scales, zeros = quantised.unpack(packed)
        assert torch.equal(q, weight.q)
        assert torch.equal(scales, weight.scales)
        assert zeros is None if weight.zeros is None else torch.equal(zeros, weight.zeros)


# ---- on a GPU: real sizes, graphs


@only_on_gpu
@pytest.mark.parametrize(("bits", "group_size"), [(8, 128), (4, 128), (4, 32)])
@pytest.mark.parametrize("num_tokens", [1, 16, 300])
def test_real_sizes_have_the_bits_of_the_definition(bits, group_size, num_tokens):
    weight = make_weight(bits, group_size, False, 6144, 4096)
    x = randn(num_tokens, 4096, dtype=torch.bfloat16)
    assert torch.equal(multiply(x, weight), multiply_by_definition(x, weight).bfloat16())


@only_on_gpu
def test_a_graph_of_a_product_is_right_for_other_inputs():
    weight = make_weight(4, 128, False, 1024, 1024)
    packed = quantised.pack(weight.q, weight.scales, weight.zeros, 4, 128)
    x, other = (randn(4, 1024, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    expected = quantised.multiply(other, packed, None)
    quantised.multiply(x, packed, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quantised.multiply(x, packed, None)
    x.copy_(other)
    graph.replay()
    assert torch.equal(out, expected)
