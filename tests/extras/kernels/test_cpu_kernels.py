"""The compiled CPU layers against float64 arithmetic, PyTorch's layers, and themselves in other batches.

`cpu.c` is also compiled without AMX, for a processor without AVX-512, for one without vectors at all, and with AMX's
tiles in plain C, so that every branch of it is run.
"""

import ctypes
import math
import platform
import re
import subprocess
import sys
from functools import partial

import pytest
import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm.layers.basic import Embedding, FusedLinear, Linear, RMSNorm, SiluAndMul
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.execution.choices import select_backend
from nanovllm_extras.kernels.cpu import cpu_layers as layers
from nanovllm_extras.kernels.cpu import library as cpu
from nanovllm_extras.kernels.cpu import library_cache
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.kernels.cpu.cpu_decoder_layer import CpuDecoderLayer, fuse_layers
from nanovllm_extras.kernels.cpu.cpu_layers import CpuLinear, HugePages, pack, replace_layers
from nanovllm_extras.kernels.cpu.head_norms import CpuNormedAttention, fuse_head_norms
from nanovllm_extras.kernels.cpu.library import NoLibraryError, load_library
from nanovllm_extras.models.gated_mlp import GeluAndMul
from nanovllm_extras.models.gemma3 import Gemma3Attention, Gemma3Config, UnitOffsetRMSNorm
from nanovllm_extras.models.gpt_oss import ClampedSwiGLU, OnceRoundedRMSNorm
from nanovllm_extras.models.granite import GraniteConfig, GraniteDecoderLayer
from nanovllm_extras.models.masking import AttentionOptions
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.qwen3_variants import Qwen3VariantAttention
from nanovllm_extras.models.rope import ApplyPartialRotary, Rope, ScaledRotary
from nanovllm_extras.records.full_sequence import Sequence
from tests.extras.attention_options import OPTIONS, SINKS
from tests.extras.attention_steps import HEADS, Step, check_close, random_lens, shared_step
from tests.steps import batch_of

TINY = TINY_QWEN3

pytestmark = pytest.mark.usefixtures("needs_a_compiler")


def filled(layer, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return layer.requires_grad_(False)


def fast_version_of(layer, dtype):
    model = torch.nn.Sequential(layer)
    replace_layers(model, dtype)
    assert type(model[0]).__module__ == layers.__name__, "the layer has a fast version"
    return model[0]


def randn(*shape, dtype, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one_rounding(dtype):
    """Results that differ in the last bit at most: sums run in another order, and are then rounded."""
    return {torch.float32: {"rtol": 1e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-9}}[dtype]


# ---- matrix products


@pytest.mark.parametrize("m", [1, 2, 3, 4, 11, 12, 13, 25, 40])
@pytest.mark.parametrize(("n", "k"), [(1, 2), (16, 32), (17, 6), (48, 130), (100, 64)])
def test_linear_equals_float64(processor, dtype, m, n, k):
    layer = filled(Linear(k, n, bias=n % 2 == 0), dtype)
    x = randn(m, k, dtype=dtype)
    expected = x.double() @ layer.weight.double().T + (0 if layer.bias is None else layer.bias.double())
    torch.testing.assert_close(fast_version_of(layer, dtype)(x).double(), expected, **one_rounding(dtype))


def test_linear_of_nothing(dtype):
    layer = filled(Linear(32, 20), dtype)
    assert fast_version_of(layer, dtype)(torch.empty(0, 32, dtype=dtype)).shape == (0, 20)


def test_linear_takes_an_input_that_is_a_view(dtype):
    layer = filled(Linear(32, 20), dtype)
    x = randn(5, 64, dtype=dtype)[:, 32:]
    expected = layer(x)
    torch.testing.assert_close(fast_version_of(layer, dtype)(x), expected, **one_rounding(dtype))


def test_fused_linear_returns_its_parts(dtype):
    layer = filled(FusedLinear(32, {"a": 10, "b": 7}, bias=True), dtype)
    x = randn(5, 32, dtype=dtype)
    expected = layer(x)
    for part, wanted in zip(fast_version_of(layer, dtype)(x), expected, strict=True):
        torch.testing.assert_close(part, wanted, **one_rounding(dtype))


def test_embedding_is_read_from_the_packed_weight(dtype):
    layer = filled(Embedding(37, 24), dtype)
    weight = layer.weight.clone()
    fast = fast_version_of(layer, dtype)
    token_ids = torch.tensor([0, 36, 15, 16, 17, 36], dtype=torch.int32)
    assert torch.equal(fast(token_ids), weight[token_ids])
    hidden = randn(4, 24, dtype=dtype)
    logits = fast.logits(hidden)
    assert logits.dtype == torch.float32  # not rounded: closer to the truth than the dtype could say
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


def test_pack_puts_sixteen_outputs_side_by_side():
    weight = torch.arange(20 * 4, dtype=torch.float32).view(20, 4)
    memory = HugePages(4096)
    packed, halves = pack(weight, memory), pack(weight.bfloat16(), memory)
    assert packed.shape == (2, 4, 16, 1)
    assert halves.shape == (2, 2, 16, 2)
    assert packed[1, 2, 3, 0] == weight[19, 2]
    assert halves[0, 1, 5].tolist() == weight[5, 2:4].tolist()
    assert not packed[1, :, 4:].any()
    assert [t.data_ptr() % 64 for t in (packed, halves)] == [0, 0]


def test_tied_layers_stay_tied_and_their_weight_is_there_once():
    embedding = filled(Embedding(32, 16), torch.bfloat16)
    model = torch.nn.ModuleDict({"embed": embedding, "head": embedding})
    replace_layers(model, torch.bfloat16)
    assert model["embed"] is model["head"]
    assert not list(model.parameters())


# ---- the rest of a layer


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_norm_equals_the_definition(processor, dtype, num_tokens):
    layer = filled(RMSNorm(48, 1e-6), dtype)
    x = randn(num_tokens, 48, dtype=dtype) * 3
    expected = layer(x)
    torch.testing.assert_close(fast_version_of(layer, dtype)(x), expected, **one_rounding(dtype))


@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 1, 32), (5, 3, 64), (200, 2, 96)])
def test_norm_and_rotation_equal_float64(processor, dtype, num_tokens, num_heads, head_dim):
    layer = filled(RMSNorm(head_dim, 1e-6), dtype)
    qkv = randn(num_tokens, num_heads * head_dim + 40, dtype=dtype)
    x = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))  # a view, as of the fused projection
    cos, sin = ScaledRotary(head_dim, Rope(1e4), 4096)(torch.arange(num_tokens) * 3, dtype)
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * layer.weight.double()
    first, second = normed.chunk(2, dim=-1)
    c, s = cos.double(), sin.double()
    expected = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    before = qkv.clone()
    out = fast_version_of(layer, dtype)(x, cos, sin)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]  # bfloat16 is rounded three times on the way
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(qkv, before)


@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim", "rotary_dim"), [(1, 1, 32, 32), (5, 3, 96, 64)])
def test_rotation_alone_and_of_a_part_equals_the_definition(
    processor, dtype, num_tokens, num_heads, head_dim, rotary_dim
):
    layer, x = ApplyPartialRotary(), randn(num_tokens, num_heads, head_dim, dtype=dtype)
    cos, sin = ScaledRotary(rotary_dim, Rope(1e4), 4096)(torch.arange(num_tokens) * 3, dtype)
    exact = layer(x.double(), cos.double(), sin.double())
    out = fast_version_of(layer, dtype)(x, cos, sin)
    torch.testing.assert_close(out.double(), exact, **one_rounding(dtype))
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize(("norm_class", "offset"), [(UnitOffsetRMSNorm, 1), (OnceRoundedRMSNorm, 0)])
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_norms_that_round_once_equal_float64(processor, dtype, num_tokens, norm_class, offset):
    layer, x = filled(norm_class(96, 1e-6), dtype), randn(num_tokens, 96, dtype=dtype)
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (offset + layer.weight.double())
    torch.testing.assert_close(fast_version_of(layer, dtype)(x).double(), exact, **one_rounding(dtype))


@pytest.mark.parametrize("activation", [SiluAndMul, GeluAndMul, partial(ClampedSwiGLU, 1.702, 7.0)])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 16), (3, 20), (70, 256)])
def test_gate_equals_the_definition(processor, dtype, num_tokens, size, activation):
    gate, up = randn(num_tokens, 2 * size, dtype=dtype).mul(8).chunk(2, dim=1)
    gate[0, :8] = torch.tensor([-200.0, 200.0, 0.0, -88.0, 88.0, 1e-3, -86.5, -1e38]).to(dtype)
    expected = activation()(gate, up)
    torch.testing.assert_close(fast_version_of(activation(), dtype)(gate, up), expected, **one_rounding(dtype))


@pytest.mark.parametrize("gate", [SiluAndMul, GeluAndMul])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 16), (5, 48), (40, 80), (70, 176), (300, 2080)])
@pytest.mark.sparse(2)
def test_a_gate_in_the_product_gives_the_bits_of_the_two_apart(processor, dtype, num_tokens, size, gate):
    """Also where results go past the caches: 300 rows of 2,080."""
    x = randn(num_tokens, 70, dtype=dtype)
    bias = num_tokens % 2 == 0
    product = fast_version_of(filled(FusedLinear(70, {"gate": size, "up": size}, bias), dtype), dtype)
    activation = fast_version_of(gate(), dtype)
    expected = activation(*product(x))
    y = torch.full_like(expected, torch.nan)
    pointers = (None if t is None else t.data_ptr() for t in (x, product.packed, product.bias, y))
    load_library(dtype).gated_linear(*pointers, num_tokens, size, 70, activation.kind)
    assert torch.equal(y, expected)
    assert expected.isfinite().all()
    assert expected.abs().max() > 1


def test_layers_of_odd_shapes_stay_as_they_are():
    model = torch.nn.Sequential(
        filled(Linear(33, 8), torch.bfloat16),
        filled(RMSNorm(20, 1e-6), torch.bfloat16),
        filled(Linear(32, 8), torch.bfloat16),
    )
    replace_layers(model, torch.bfloat16)
    assert [type(layer).__name__ for layer in model] == ["Linear", "RMSNorm", "CpuLinear"]


# ---- attention


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block_size", [16, 32, 80])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [*HEADS, (32, 2), (40, 2)])
@pytest.mark.sparse(2)
def test_mixed_batch_equals_the_reference(dtype, num_heads, num_kv_heads, block_size, seed):
    backend = CpuAttention(num_heads, num_kv_heads, [32, 64, 96][seed], block_size, dtype)
    step = Step(backend, random_lens(block_size, seed), seed, dtype)
    check_close(step.run(backend), step)


@pytest.mark.parametrize(
    "lens",
    [
        [(0, 1)],
        [(15, 1), (16, 1), (17, 1), (31, 1), (32, 1)],
        [(0, 15), (0, 16), (0, 17), (0, 2)],
        [(5, 4), (16, 16), (32, 2), (1, 60)],
        [(300, 1), (1000, 1), (127, 1), (0, 257), (129, 20)],
    ],
    ids=["one token", "decodes", "whole prompts", "later chunks", "long"],
)
def test_each_kind_of_batch_equals_the_reference_on_each_processor(processor, dtype, lens):
    backend = CpuAttention(4, 2, 64, 16, dtype)
    step = Step(backend, lens, dtype=dtype)
    check_close(step.run(backend), step)


@pytest.mark.parametrize("options", [*OPTIONS.values(), *SINKS.values()], ids=[*OPTIONS, *SINKS])
@pytest.mark.parametrize("block_size", [16, 32, 80])
@pytest.mark.sparse
def test_windows_and_soft_caps_equal_the_reference(processor, dtype, options, block_size):
    """Blocks that no token's window reaches hold NaN in the null block's place: they are not read."""
    backend = CpuAttention(8, 2, 64, block_size, dtype)
    step = Step(backend, [(100, 1), (5, 1), (33, 1), (0, 70), (90, 40), (60, 3)], dtype=dtype, options=options)
    check_close(step.run(backend), step)


@pytest.mark.parametrize("options", [*OPTIONS.values(), *SINKS.values()], ids=[*OPTIONS, *SINKS])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.sparse
def test_with_a_window_a_token_has_the_same_bits_as_decode_and_as_part_of_a_prompt(
    processor, dtype, options, block_size
):
    backend = CpuAttention(4, 2, 32, block_size, dtype)
    whole = Step(backend, [(0, 77)], dtype=dtype, options=options)
    rows = whole.run(backend)
    for start, stop in ((76, 77), (50, 77), (33, 40)):
        seq = Sequence("seq", [0] * stop, SamplingParams())
        for block_id in whole.batch.metadata.block_tables[0].tolist():
            seq.block_table.append(block_id)
        metadata = batch_of([(seq, start, stop - start)], block_size).metadata
        part = backend.attend(whole.q[start:stop], whole.layer_cache, metadata, *whole.options)
        assert torch.equal(part, rows[start:stop])


def test_large_scores_do_not_overflow(dtype):
    backend = CpuAttention(2, 1, 32, 16, dtype)
    step = Step(backend, [(40, 1), (0, 33)], dtype=dtype)
    same = TorchAttention(2, 1, 32, 16)
    cache = torch.zeros(same.kv_cache_shape(1, 8), dtype=torch.float64)[:, 0]
    step.q, step.k = step.q * 100, step.k * 100
    backend.store_kv(step.k, step.v, step.layer_cache, step.batch.metadata.slot_mapping)
    assert backend.attend(step.q, step.layer_cache, step.batch.metadata).isfinite().all()
    assert cache.isfinite().all()


def test_block_that_is_filled_in_this_step_can_be_shared():
    out, expected = shared_step(CpuAttention(4, 2, 32, 16))
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)


def test_attention_leaves_the_cache_of_other_tokens_alone(dtype):
    """As many elements change as the new tokens have, and none that held something."""
    backend = CpuAttention(4, 2, 32, 16, dtype)
    step = Step(backend, random_lens(16, 3), dtype=dtype)
    before = step.cache.clone()
    step.run(backend)
    changed = before.isnan() & ~step.cache.isnan()
    assert not changed[:, 0].any(), "another layer"
    assert changed[:, 1].flatten(1).sum(1).tolist() == [step.k.numel(), step.v.numel()]
    blocks = {slot // 16 for slot in step.batch.metadata.slot_mapping.tolist()}
    assert set(changed[:, 1].any(-1).any(-1).nonzero()[:, 1].tolist()) == blocks
    kept = ~before.isnan()
    assert torch.equal(before[kept], step.cache[kept])


def test_reference_sees_a_slot_that_was_never_filled(dtype):
    """The poison works: with one value of the past missing, the output is NaN, and only that of its sequence."""
    backend = CpuAttention(4, 2, 32, 16, dtype)
    step = Step(backend, [(9, 1), (0, 12)], dtype=dtype)
    step.layer_cache[:, step.batch.metadata.block_tables[0, 0]] = math.nan
    out = step.run(backend)
    assert out[0].isnan().all()
    assert not out[1:].isnan().any()


# ---- the same bits in every batch


def test_a_row_has_the_same_bits_in_every_batch(processor, dtype):
    fast = fast_version_of(filled(Linear(96, 70), dtype), dtype)
    x = randn(40, 96, dtype=dtype)
    together = fast(x)
    for start, stop in [(0, 1), (3, 5), (7, 19), (1, 40)]:
        assert torch.equal(fast(x[start:stop]), together[start:stop])


@pytest.mark.parametrize("block_size", [16, 32])
def test_a_token_has_the_same_bits_as_decode_and_as_part_of_a_prompt(processor, dtype, block_size):
    backend = CpuAttention(8, 2, 64, block_size, dtype)
    whole = Step(backend, [(0, 77)], dtype=dtype)
    at_once = whole.run(backend)
    decode = Step(backend, [(76, 1)], dtype=dtype)
    decode.layer_cache[:, decode.batch.metadata.block_tables[0].long()] = whole.layer_cache[
        :, whole.batch.metadata.block_tables[0].long()
    ]
    out = backend.attend(whole.q[76:], decode.layer_cache, decode.batch.metadata)
    assert torch.equal(out[0], at_once[76])


def test_outputs_do_not_depend_on_what_else_is_in_the_batch():
    """In bfloat16, where one other bit soon is another token: alone, together, in chunks, and with a cached prefix."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ["What is paged attention? Explain it well.", "What is 17 + 25?", "Why is the sky blue?", "Name a fruit."]

    def run(options, calls):
        llm = LLM(TINY, dtype="bfloat16", attention_backend="cpu", **options)
        return [output.outputs[0].token_ids for call in calls for output in llm.generate(call, params, use_tqdm=False)]

    together = run({}, [prompts])
    assert run({}, [[prompt] for prompt in prompts]) == together
    assert run({"max_num_batched_tokens": 5}, [prompts]) == together
    assert run({"num_kv_blocks": 9}, [prompts]) == together  # with preemption
    assert run({}, [prompts, prompts])[4:] == together  # from the prefix cache


# ---- whole layers and models


def check_layer_in_one_call(config, backend, step, dtype):
    model = torch.nn.ModuleDict({"layer": filled(Qwen3DecoderLayer(config, backend), dtype)})
    replace_layers(model, dtype)
    parts = model["layer"]
    fuse_layers(model, backend)
    assert isinstance(model["layer"], CpuDecoderLayer)
    check_same_outputs(parts, model["layer"], step, dtype)


def check_same_outputs(parts, fused, step, dtype):
    """Of modules with attention in them, and the same cache afterwards."""
    x = randn(len(step.q), 96, dtype=dtype)
    cos, sin = ScaledRotary(32, Rope(), 1024)(torch.arange(len(x)), dtype)
    caches = step.cache.clone(), step.cache.clone()
    expected = parts(x, cos, sin, caches[0][:, 1], step.batch.metadata)
    assert torch.equal(fused(x, cos, sin, caches[1][:, 1], step.batch.metadata), expected)
    assert torch.equal(caches[0].nan_to_num(), caches[1].nan_to_num())
    assert expected.isfinite().all()


LAYER_LENS = [[(20, 1)], [(0, 37), (3, 5)], [(40, 1), (15, 1), (0, 300)]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lens", LAYER_LENS)
@pytest.mark.sparse(2)
def test_a_layer_in_one_call_gives_the_bits_of_its_parts(processor, dtype, lens, bias):
    config = NetworkConfig(64, 96, 176, 1, 4, 2, head_dim=32, qkv_bias=bias, o_bias=bias)
    backend = CpuAttention(4, 2, 32, 16, dtype)
    check_layer_in_one_call(config, backend, Step(backend, lens, dtype=dtype), dtype)


def test_a_layer_with_factors_in_one_call_equals_its_parts(processor, dtype):
    """In float32 a product may be added without being rounded first."""
    options = (AttentionOptions(scale=0.2),)
    config = GraniteConfig(64, 96, 176, 1, 4, 2, head_dim=32, attention_options=options, residual_multiplier=0.3)
    backend = CpuAttention(4, 2, 32, 16, dtype)
    step = Step(backend, LAYER_LENS[1], dtype=dtype)
    model = torch.nn.ModuleDict({"layer": filled(GraniteDecoderLayer(config, backend), dtype)})
    replace_layers(model, dtype)
    parts, x = model["layer"], randn(len(step.q), 96, dtype=dtype)
    angles = ScaledRotary(32, Rope(), 1024)(torch.arange(len(x)), dtype)
    expected = parts(x, *angles, step.layer_cache, step.batch.metadata)
    fuse_layers(model, backend)
    assert isinstance(model["layer"], CpuDecoderLayer)
    tolerance = 1e-5 if dtype == torch.float32 else 0
    out = model["layer"](x, *angles, step.layer_cache, step.batch.metadata)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize(
    ("attention_class", "config_class", "layer"),
    [
        (Qwen3Attention, NetworkConfig, ()),
        (Qwen3VariantAttention, NetworkConfig, (0,)),
        (Gemma3Attention, Gemma3Config, (0,)),
    ],
)
def test_heads_normalised_and_rotated_in_one_call_have_the_bits_of_two_calls(
    processor, dtype, attention_class, config_class, layer
):
    backend = CpuAttention(4, 2, 32, 16, dtype)
    attention = filled(attention_class(config_class(64, 96, 176, 1, 4, 2, head_dim=32), backend, *layer), dtype)
    model = torch.nn.ModuleDict({"self_attn": attention})
    replace_layers(model, dtype)
    fuse_head_norms(model)
    assert isinstance(model["self_attn"], CpuNormedAttention)
    check_same_outputs(attention, model["self_attn"], Step(backend, [(40, 1), (0, 30)], dtype=dtype), dtype)


def test_a_layer_of_an_odd_shape_is_called_part_by_part():
    backend = CpuAttention(4, 2, 32, 16, torch.bfloat16)
    layer = filled(Qwen3DecoderLayer(NetworkConfig(64, 96, 170, 1, 4, 2, head_dim=32), backend), torch.bfloat16)
    model = torch.nn.ModuleDict({"layer": layer})
    replace_layers(model, torch.bfloat16)
    fuse_layers(model, backend)
    assert model["layer"] is layer


def test_the_model_gives_the_same_tokens_as_with_pytorch_layers():
    prompts = ["What is paged attention?", "What is 31 + 46?", "Hello!", "Explain the KV cache in detail."]
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=2)
    fast, plain = (
        LLM(TINY, dtype="float32", attention_backend=name, enforce_eager=name == "torch").generate(
            prompts, params, use_tqdm=False
        )
        for name in ("cpu", "torch")
    )
    for ours, theirs in zip(fast, plain, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].cumulative_logprob == pytest.approx(theirs.outputs[0].cumulative_logprob, abs=1e-3)


def test_bfloat16_logits_are_as_close_to_float32_as_pytorchs():
    """The fast path may round in other places than PyTorch's, but not more coarsely."""
    prompt = [list(range(5, 105))]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(**options):
        (output,) = LLM(TINY, **options).generate(prompt, params, use_tqdm=False)
        rows = output.prompt_logprobs[1:]
        return torch.tensor([row[token].logprob for row, token in zip(rows, prompt[0][1:], strict=True)])

    exact = logprobs(dtype="float32", attention_backend="torch", enforce_eager=True)
    plain = logprobs(dtype="bfloat16", attention_backend="torch", enforce_eager=True)
    fast = logprobs(dtype="bfloat16", attention_backend="cpu")
    assert not torch.equal(fast, exact)
    assert (fast - exact).abs().mean() <= 1.1 * (plain - exact).abs().mean()


def test_enforce_eager_keeps_the_layers_of_pytorch():
    for enforce_eager, name in ((True, "Qwen3DecoderLayer"), (False, "CpuDecoderLayer")):
        llm = LLM(TINY, enforce_eager=enforce_eager, attention_backend="cpu")
        assert type(llm.engine.runner.model.model.layers[0]).__name__ == name


# ---- where it can be used


CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_it_is_chosen_on_cpu(dtype, name):
    assert select_backend(name, CPU, dtype, 64, None)[0] is CpuAttention


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"device": torch.device("cuda")}, "it runs on CPU, not on cuda"),
        ({"dtype": torch.float16}, "support bfloat16 and float32, not torch.float16"),
        ({"head_dim": 48}, "head_dim must be a multiple of 32, it is 48"),
        ({"block_size": 8}, "block_size must be a multiple of 16, got 8"),
    ],
)
def test_it_says_where_it_cannot_be_used(changed, message):
    wanted = {"name": "cpu", "device": CPU, "dtype": torch.float32, "head_dim": 64, "block_size": None, **changed}
    with pytest.raises(ValueError, match=f"attention_backend='cpu' cannot be used .*{message}"):
        select_backend(**wanted)


@pytest.fixture
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu.load_library.cache_clear()
    yield tmp_path / "nanovllm"
    cpu.load_library.cache_clear()


def test_without_a_compiler_the_engine_runs_on_pytorch(fresh_cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    llm = LLM(TINY)
    assert isinstance(llm.engine.runner.backend, TorchAttention)
    assert "not cpu: there is no C compiler" in llm.engine.description


def test_a_compiler_that_fails_is_quoted(fresh_cache, monkeypatch):
    monkeypatch.setenv("CC", f"{sys.executable} -c 'import sys; sys.exit(\"out of order\")'")
    with pytest.raises(NoLibraryError, match="could not compile cpu.c: out of order"):
        load_library(torch.float32)
    assert not list(fresh_cache.iterdir())


def test_a_compiler_that_is_not_there_is_no_disaster(fresh_cache, monkeypatch, caplog):
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(NoLibraryError, match="could not be compiled and loaded: .*/no/such/compiler"):
        load_library(torch.float32)
    with caplog.at_level("WARNING"):
        assert isinstance(LLM(TINY).engine.runner.backend, TorchAttention)
    assert "the CPU kernels cannot be used" in caplog.text
    assert "/no/such/compiler" in caplog.text


def test_it_is_compiled_once(fresh_cache, monkeypatch):
    monkeypatch.setattr(cpu, "FLAGS", (*cpu.FLAGS, "-O0"))
    load_library(torch.float32)
    (file,) = fresh_cache.glob("*.so")
    assert fresh_cache.stat().st_mode & 0o077 == 0  # nobody else can put code there
    monkeypatch.setattr(library_cache, "compile_to", lambda *_: pytest.fail("compiled again"))
    cpu.load_library.cache_clear()
    assert isinstance(load_library(torch.float32), ctypes.CDLL)
    assert list(fresh_cache.glob("*.so")) == [file]


def test_every_header_counts_for_the_cache():
    """A library that was compiled from other headers is not taken from the cache."""
    folder = cpu.SOURCE.parent
    included = {name for path in folder.glob("*.[ch]") for name in re.findall(r'#include "(.*)"', path.read_text())}
    assert included
    assert included <= {path.name for path in cpu.HEADERS}


@pytest.mark.parametrize("source", cpu.FUNCTIONS, ids=lambda source: source.name)
@pytest.mark.parametrize("level", ["-O0", pytest.param("-O3", marks=pytest.mark.slow)])
def test_the_source_compiles_without_a_warning(level, source):
    """Only the last level follows the flow of values, in five times the time. Stack frames are small: threads may have
    stacks of 128 KiB.
    """
    has_tiles = source != cpu.INT8_KV
    variants = [[], ["-DBFLOAT16", "-DAMX_EMULATED"] if has_tiles else ["-DBFLOAT16"]]
    if level == "-O3" and has_tiles and platform.machine() == "x86_64":
        variants.append(["-DBFLOAT16", "-march=sapphirerapids", "-DAMX"])
    for flags in variants:
        warnings = ["-Wall", "-Wextra", f"-Wframe-larger-than={32 << 10}", "-Werror"]
        command = ["cc", *cpu.FLAGS, level, *flags, *warnings, str(source), "-o", "/dev/null"]
        subprocess.run(command, check=True)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(0, 5), (1, 1), (2, 15), (3, 16), (5, 1000), (2, 33_333)])
def test_argmax_is_pytorchs(processor, num_rows, num_columns):
    backend = CpuAttention(4, 2, 32, 16, torch.float32)
    few = torch.randint(0, 9, (num_rows, num_columns), generator=torch.Generator().manual_seed(num_columns)).float()
    for logits in (
        randn(num_rows, num_columns, dtype=torch.float32),
        few,
        torch.full_like(few, -torch.inf),
        -few - 100,
    ):
        assert torch.equal(backend.argmax(logits), logits.argmax(dim=-1))
        for column in {0, num_columns // 2, num_columns - 1} if num_rows else ():
            for value in (torch.nan, torch.inf):
                changed = logits.clone()
                changed[-1, column:] = value
                assert torch.equal(backend.argmax(changed), changed.argmax(dim=-1))
    assert torch.equal(backend.argmax(few.bfloat16().T.contiguous().T), few.argmax(dim=-1))


@pytest.mark.parametrize("num_columns", [2080, 2112, 2100])  # 65 pairs of panels, 66, and lines that are not whole
@pytest.mark.parametrize("wants_floats", [False, True])
@pytest.mark.parametrize("bias", [None, "random"])
@pytest.mark.sparse(2)
def test_results_that_go_past_the_caches_are_those_of_one_row(processor, num_columns, wants_floats, bias):
    x, weight = (randn(rows, 64, dtype=torch.bfloat16) for rows in (300, num_columns))
    if bias:
        bias = randn(num_columns, dtype=torch.bfloat16)
    layer = CpuLinear(weight, bias, HugePages(weight.nbytes * 2))
    dtype = torch.float32 if wants_floats else torch.bfloat16
    together = layer.product(x, torch.full((300, num_columns), torch.nan, dtype=dtype))
    for row in (0, 31, 255, 256, 299):
        alone = layer.product(x[row : row + 1], torch.empty(1, num_columns, dtype=dtype))
        assert torch.equal(together[row : row + 1], alone)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(together.double(), expected, rtol=1e-2, atol=1e-2)
