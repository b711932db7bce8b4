"""Products with weights of 8 and 4 bits in C, against their definition in PyTorch and against float64.

`tests/extras/quantization/test_quantised_layers.py` compares the definition itself with float64.
"""

import pytest
import torch

from nanovllm.layers.basic import SiluAndMul
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.kernels.cpu.cpu_decoder_layer import CpuDecoderLayer
from nanovllm_extras.kernels.cpu.cpu_layers import CpuGate
from nanovllm_extras.kernels.cpu.cpu_quantised import replace_quantised
from nanovllm_extras.weights.quantised_linear import (
    QuantisedEmbedding,
    QuantisedFusedLinear,
    QuantisedLinear,
    QuantisedWeight,
    quantise_weight,
    round_rows,
)
from tests.extras.kernels.processors import pretend

pytestmark = pytest.mark.usefixtures("needs_a_compiler")

FORMATS = [(8, 128, False), (4, 128, False), (4, 64, True), (4, 32, False), (8, 32, True)]  # bits, group_size, zeros


def randn(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_weight(n, k, bits, group_size, has_zeros, seed=1):
    if not has_zeros:
        return quantise_weight(randn(n, k, seed=seed), bits, group_size)
    generator = torch.Generator().manual_seed(seed)
    shape = (n, -(-k // group_size))
    q, zeros = (torch.randint(0, 2**bits, size, generator=generator).to(torch.uint8) for size in ((n, k), shape))
    return QuantisedWeight(q, torch.rand(shape, generator=generator) + 0.01, zeros, bits, group_size)


def fast_version_of(layer, dtype):
    model = torch.nn.Sequential(layer)
    replace_quantised(model, dtype)
    assert type(model[0]).__name__ == f"Cpu{type(layer).__name__}", "the layer has a fast version"
    return model[0]


def in_float64(x, weight):
    q, scales = round_rows(x, weight.group_size)
    wide = scales.double().repeat_interleave(weight.group_size, dim=1)[:, : x.shape[1]]
    return (q.double() * wide) @ weight.dequantised().double().T


def one_rounding(dtype):
    return {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-9}}[dtype]


@pytest.mark.parametrize(("bits", "group_size", "has_zeros"), FORMATS)
@pytest.mark.sparse(2)
@pytest.mark.thinned
def test_products_equal_float64_and_have_the_same_bits_in_every_batch(
    processor_of_weights, dtype, bits, group_size, has_zeros
):
    for n, k in [(1, 16), (16, 128), (33, 144), (100, 208), (64, 416)]:
        weight, bias = make_weight(n, k, bits, group_size, has_zeros), randn(n, dtype=dtype) if n % 2 else None
        fast = fast_version_of(QuantisedLinear(weight, bias), dtype)
        x = randn(130, k, dtype=dtype)
        together = fast(x)
        expected = in_float64(x, weight) + (0 if bias is None else bias.double())
        torch.testing.assert_close(together.double(), expected, **one_rounding(dtype))
        for start, stop in [(0, 1), (5, 7), (7, 10), (9, 16), (20, 32), (20, 130)]:  # rows that are multiplied together
            assert torch.equal(fast(x[start:stop]), together[start:stop])


@pytest.mark.parametrize(("bits", "group_size", "has_zeros"), FORMATS)
@pytest.mark.slow
def test_tiles_have_the_bits_of_vectors(dtype, bits, group_size, has_zeros, monkeypatch):
    """Tiles take eight rows and more, so this holds within a model too."""
    x, found = randn(300, 464, dtype=dtype), []
    for processor in ("no AMX", "AMX, emulated"):
        with pretend(monkeypatch, processor):
            weight = make_weight(90, 464, bits, group_size, has_zeros)
            found.append(fast_version_of(QuantisedLinear(weight, None), dtype)(x))
    assert torch.equal(*found)


def test_rows_are_rounded_as_the_definition_rounds_them(processor_of_weights, dtype):
    """One weight in each output, which is 1: the results are the rounded rows themselves."""
    q = (torch.eye(48) + 128).to(torch.uint8)
    weight = QuantisedWeight(q, torch.ones(48, 1), None, 8, 32)
    x = randn(500, 48, dtype=dtype) * torch.logspace(-3, 3, 500)[:, None].to(dtype)
    expected = QuantisedLinear(weight, None)(x)
    assert torch.equal(fast_version_of(QuantisedLinear(weight, None), dtype)(x), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_products_do_not_overflow(processor_of_weights, dtype, bits):
    """Weights are at the ends of their range and inputs at theirs: a sum of products may need all of its 16 bits."""
    generator = torch.Generator().manual_seed(1)
    ends = torch.tensor([0, 2**bits - 1], dtype=torch.uint8)
    q = ends[torch.randint(0, 2, (64, 272), generator=generator)]
    q[:2] = ends[:, None]  # all products of one sign
    weight = QuantisedWeight(q, torch.ones(64, 1 if bits == 8 else 3), None, bits, 128)
    x = (torch.randint(0, 2, (13, 272), generator=generator) * 2 - 1).to(dtype)
    x[:2] = torch.tensor([[1], [-1]])
    found = fast_version_of(QuantisedLinear(weight, None), dtype)(x)
    torch.testing.assert_close(found.double(), in_float64(x, weight), **one_rounding(dtype))


def test_no_input_is_rounded_to_less_than_the_opposite_of_the_largest(processor_of_weights, dtype):
    """The products of 8 bits on AVX2 rely on it: -127 and not -128. Weights of 1 give the rounded rows themselves."""
    x = randn(4000, 32, dtype=dtype) * 2.0 ** torch.arange(-60, 60, 0.03)[:4000, None].to(dtype)
    x[::2] = -x[::2].abs().amax(1, keepdim=True).expand(-1, 32)
    weight = QuantisedWeight((torch.eye(32) + 128).to(torch.uint8), torch.ones(32, 1), None, 8, 32)
    fast = fast_version_of(QuantisedLinear(weight, None), torch.float32)
    scales = round_rows(x, 32)[1]
    assert (fast(x.float()) / scales.to(torch.float32)).round().min() == -127


def test_what_is_no_number_stays_none(processor_of_weights, dtype):
    x = randn(5, 64, dtype=dtype)
    x[1, 3], x[2, 60], x[3] = torch.nan, torch.inf, 0
    fast = fast_version_of(QuantisedLinear(make_weight(40, 64, 4, 32, False), None), dtype)
    is_number = fast(x).isfinite()
    assert is_number.all(1).tolist() == [True, False, False, True, True]
    assert not is_number[1].any()
    assert not fast(x)[3].any()


def test_inputs_may_be_a_view_or_nothing_and_results_are_parts(dtype):
    layer = QuantisedFusedLinear(make_weight(17, 64, 4, 32, False), randn(17, dtype=dtype), {"a": 10, "b": 7})
    x = randn(5, 128, dtype=dtype)[:, 64:]
    expected = layer(x)
    fast = fast_version_of(layer, dtype)
    for part, wanted in zip(fast(x), expected, strict=True):
        torch.testing.assert_close(part, wanted, **one_rounding(dtype))
    assert [part.shape for part in fast(x[:0])] == [(0, 10), (0, 7)]


@pytest.mark.parametrize(("bits", "group_size", "has_zeros"), FORMATS)
@pytest.mark.sparse(2)
@pytest.mark.thinned
def test_a_gate_that_ends_within_a_strip_has_the_bits_of_its_parts(
    processor_of_weights, dtype, bits, group_size, has_zeros
):
    """A strip is 64 outputs: rows of up begin where those of the gate end."""
    gate_and_mul = CpuGate(SiluAndMul(), dtype)
    for n in (16, 48, 80, 112, 160):
        weight, bias = make_weight(2 * n, 144, bits, group_size, has_zeros), randn(2 * n, dtype=dtype)
        fast = fast_version_of(QuantisedLinear(weight, bias), dtype)
        for m in (1, 3, 7, 13, 30):
            x, y = randn(m, 144, dtype=dtype, seed=m), torch.empty(m, n, dtype=dtype)
            pointers = (x.data_ptr(), fast.other, fast.bias.data_ptr(), y.data_ptr())
            fast.library.quantised_gated_linear(*pointers, m, n, 144, gate_and_mul.kind)
            assert torch.equal(y, gate_and_mul(*fast(x).split(n, dim=1)))


@pytest.mark.parametrize(("size", "bits", "group_size"), [(32, 8, 128), (48, 4, 32), (80, 4, 64), (144, 4, 128)])
def test_embedding_is_read_from_the_packed_weight(dtype, size, bits, group_size):
    weight = make_weight(150, size, bits, group_size, False)
    fast = fast_version_of(QuantisedEmbedding(weight, dtype), dtype)
    ids = torch.tensor([0, 149, 15, 16, 63, 64, 100, 149], dtype=torch.int32)
    assert torch.equal(fast(ids), weight.dequantised()[ids].to(dtype))
    hidden = randn(4, size, dtype=dtype)
    logits = fast.logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), in_float64(hidden, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("processor", "quantization"),
    [
        pytest.param("AMX, emulated", "int8", marks=pytest.mark.slow),
        ("native", {"method": "int4", "group_size": 64}),
    ],
    indirect=["processor"],
)
def test_a_layer_in_one_call_has_the_bits_of_its_parts(processor, quantization, monkeypatch):
    prompts = [[{"role": "user", "content": text}] for text in ("What is a block table?", "Who are you?")]
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=3)

    def answer():
        llm = LLM(TINY_QWEN3, attention_backend="cpu", quantization=quantization, num_kv_blocks=40)
        fused = [isinstance(layer, CpuDecoderLayer) for layer in llm.engine.runner.model.model.layers]
        outputs = llm.chat(prompts, sampling, use_tqdm=False)
        alone = [llm.chat([prompt], sampling, use_tqdm=False)[0] for prompt in prompts]
        for one, other in zip(outputs, alone, strict=True):
            assert one.outputs[0].logprobs == other.outputs[0].logprobs, "alone and in a batch"
        return all(fused), [output.outputs[0].logprobs for output in outputs]

    whole = answer()
    monkeypatch.setattr("nanovllm_extras.kernels.cpu.cpu_attention.fuse_layers", lambda model, backend: None)
    parts = answer()
    assert (whole[0], parts[0]) == (True, False)
    assert whole[1] == parts[1]
