"""The compiled CPU layers but attention against float64 arithmetic, PyTorch's layers, and themselves in other batches.

`cpu.c` is also compiled without AMX, for a processor without AVX-512, for one without vectors at all, and with AMX's
tiles in plain C, so that every branch of it is run.
"""

import ctypes
import platform
import re
import subprocess
import sys
from functools import partial

import pytest
import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm.layers.basic import Embedding, FusedLinear, Linear, RMSNorm, SiluAndMul
from nanovllm.models.qwen3 import Qwen3DecoderLayer
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.execution.choices import select_backend
from nanovllm_extras.kernels.cpu import cpu_layers as layers
from nanovllm_extras.kernels.cpu import library as cpu
from nanovllm_extras.kernels.cpu import library_cache
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.kernels.cpu.cpu_decoder_layer import CpuDecoderLayer, fuse_layers
from nanovllm_extras.kernels.cpu.cpu_layers import CpuLinear, HugePages, replace_layers
from nanovllm_extras.kernels.cpu.library import NoLibraryError, load_library
from nanovllm_extras.models.gated_mlp import GeluAndMul
from nanovllm_extras.models.gemma3 import UnitOffsetRMSNorm
from nanovllm_extras.models.gpt_oss import ClampedSwiGLU, OnceRoundedRMSNorm
from nanovllm_extras.models.granite import GraniteConfig, GraniteDecoderLayer
from nanovllm_extras.models.masking import AttentionOptions
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.rope import ApplyPartialRotary, Rope, ScaledRotary
from tests.extras.attention_steps import Step

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


def test_linear_equals_float64(processor, dtype):
    for n, k in [(1, 2), (16, 32), (17, 6), (48, 130), (100, 64)]:
        layer = filled(Linear(k, n, bias=n % 2 == 0), dtype)
        weight, bias = layer.weight.double(), 0 if layer.bias is None else layer.bias.double()
        fast = fast_version_of(layer, dtype)
        for m in (0, 1, 2, 3, 4, 11, 12, 13, 25, 40):
            x = randn(m, 2 * k, dtype=dtype)
            x = x[:, k:] if m == 13 else x[:, k:].contiguous()
            torch.testing.assert_close(fast(x).double(), x.double() @ weight.T + bias, **one_rounding(dtype))


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


def test_tied_layers_stay_tied_and_their_weight_is_there_once():
    embedding = filled(Embedding(32, 16), torch.bfloat16)
    model = torch.nn.ModuleDict({"embed": embedding, "head": embedding})
    replace_layers(model, torch.bfloat16)
    assert model["embed"] is model["head"]
    assert not list(model.parameters())


# ---- the rest of a layer


@pytest.mark.parametrize("norm_class", [RMSNorm, UnitOffsetRMSNorm, OnceRoundedRMSNorm])
def test_norms_equal_the_definition(processor, dtype, norm_class):
    fast = fast_version_of(filled(norm_class(96, 1e-6), dtype), dtype)
    wide = dtype if norm_class is RMSNorm else torch.float64  # the others round once
    definition = filled(norm_class(96, 1e-6), dtype).to(wide)
    for num_tokens in (1, 7, 300):
        x = randn(num_tokens, 96, dtype=dtype) * 3
        torch.testing.assert_close(fast(x).double(), definition(x.to(wide)).double(), **one_rounding(dtype))


def angles(size, num_tokens, dtype):
    return ScaledRotary(size, Rope(1e4), 4096)(torch.arange(num_tokens) * 3, dtype)


def test_norm_and_rotation_equal_float64(processor, dtype):
    for num_tokens, num_heads, head_dim in [(1, 1, 32), (5, 3, 64), (200, 2, 96)]:
        layer = filled(RMSNorm(head_dim, 1e-6), dtype)
        qkv = randn(num_tokens, num_heads * head_dim + 40, dtype=dtype)
        x = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))  # a view, as of the fused projection
        cos, sin = angles(head_dim, num_tokens, dtype)
        normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * layer.weight.double()
        expected = ApplyPartialRotary()(normed, cos.double(), sin.double())
        before = qkv.clone()
        out = fast_version_of(layer, dtype)(x, cos, sin)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]  # bfloat16 is rounded three times on the way
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(qkv, before)


def test_rotation_alone_and_of_a_part_equals_the_definition(processor, dtype):
    for num_tokens, num_heads, head_dim, rotary_dim in [(1, 1, 32, 32), (5, 3, 96, 64)]:
        layer, x = ApplyPartialRotary(), randn(num_tokens, num_heads, head_dim, dtype=dtype)
        cos, sin = angles(rotary_dim, num_tokens, dtype)
        out = fast_version_of(layer, dtype)(x, cos, sin)
        first, second, rest = x.double().split([rotary_dim // 2, rotary_dim // 2, head_dim - rotary_dim], dim=-1)
        turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double())
        exact = torch.cat((turned.real, turned.imag, rest), dim=-1)
        torch.testing.assert_close(out.double(), exact, **one_rounding(dtype))
        assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("activation", [SiluAndMul, GeluAndMul, partial(ClampedSwiGLU, 1.702, 7.0)])
def test_gate_equals_the_definition(processor, dtype, activation):
    for num_tokens, size in [(1, 16), (3, 20), (70, 256)]:
        gate, up = randn(num_tokens, 2 * size, dtype=dtype).mul(8).chunk(2, dim=1)
        gate[0, :8] = torch.tensor([-200.0, 200.0, 0.0, -88.0, 88.0, 1e-3, -86.5, -1e38]).to(dtype)
        expected = activation()(gate, up)
        torch.testing.assert_close(fast_version_of(activation(), dtype)(gate, up), expected, **one_rounding(dtype))


def test_a_gate_in_the_product_gives_the_bits_of_the_two_apart(processor, dtype):
    """Also where results go past the caches: 300 rows of 2,080."""
    for i, (num_tokens, size) in enumerate([(1, 16), (5, 48), (40, 80), (70, 176), (300, 2080)]):
        x = randn(num_tokens, 70, dtype=dtype)
        bias = num_tokens % 2 == 0
        product = fast_version_of(filled(FusedLinear(70, {"gate": size, "up": size}, bias), dtype), dtype)
        activation = fast_version_of([SiluAndMul, GeluAndMul][i % 2](), dtype)
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


# ---- the same bits in every batch


def test_a_row_has_the_same_bits_in_every_batch(processor, dtype):
    fast = fast_version_of(filled(Linear(96, 70), dtype), dtype)
    x = randn(40, 96, dtype=dtype)
    together = fast(x)
    for start, stop in [(0, 1), (3, 5), (7, 19), (1, 40)]:
        assert torch.equal(fast(x[start:stop]), together[start:stop])


def test_outputs_do_not_depend_on_what_else_is_in_the_batch():
    """In bfloat16, where one other bit soon is another token: alone, together, in chunks, and with a cached prefix."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = ["What is paged attention? Explain it well.", "What is 17 + 25?", "Why is the sky blue?", "Name a fruit."]

    def run(options, calls):
        llm = LLM(TINY, dtype="bfloat16", attention_backend="cpu", **options)
        return [output.outputs[0].token_ids for call in calls for output in llm.generate(call, params, use_tqdm=False)]

    together = run({}, [prompts])
    assert run({"max_num_batched_tokens": 5}, [[prompt] for prompt in prompts]) == together
    assert run({"num_kv_blocks": 9}, [prompts]) == together  # with preemption
    assert run({}, [prompts, prompts])[4:] == together  # from the prefix cache


# ---- whole layers and models


def check_same_outputs(parts, fused, step, dtype):
    """Of modules with attention in them, and the same cache afterwards."""
    x = randn(len(step.q), 96, dtype=dtype)
    cos, sin = angles(32, len(x), dtype)
    caches = step.cache.clone(), step.cache.clone()
    expected = parts(x, cos, sin, caches[0][:, 1], step.batch.metadata)
    assert torch.equal(fused(x, cos, sin, caches[1][:, 1], step.batch.metadata), expected)
    assert torch.equal(caches[0].nan_to_num(), caches[1].nan_to_num())
    assert expected.isfinite().all()


def test_a_layer_with_factors_in_one_call_equals_its_parts(processor, dtype):
    """In float32 a product may be added without being rounded first."""
    options = (AttentionOptions(scale=0.2),)
    config = GraniteConfig(64, 96, 176, 1, 4, 2, head_dim=32, attention_options=options, residual_multiplier=0.3)
    backend = CpuAttention(4, 2, 32, 16, dtype)
    step = Step(backend, [(0, 37), (3, 5)], dtype=dtype)
    model = torch.nn.ModuleDict({"layer": filled(GraniteDecoderLayer(config, backend), dtype)})
    replace_layers(model, dtype)
    parts, x = model["layer"], randn(len(step.q), 96, dtype=dtype)
    cos_sin = angles(32, len(x), dtype)
    expected = parts(x, *cos_sin, step.layer_cache, step.batch.metadata)
    fuse_layers(model, backend)
    assert isinstance(model["layer"], CpuDecoderLayer)
    tolerance = 1e-5 if dtype == torch.float32 else 0
    out = model["layer"](x, *cos_sin, step.layer_cache, step.batch.metadata)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize("norm_class", [RMSNorm, UnitOffsetRMSNorm, OnceRoundedRMSNorm])
def test_heads_normalised_and_rotated_in_one_call_have_the_bits_of_two_calls(processor, dtype, norm_class):
    norm = fast_version_of(filled(norm_class(64, 1e-6), dtype), dtype)
    rotate = fast_version_of(ApplyPartialRotary(), dtype)
    x = randn(5, 9, 64, dtype=dtype)[:, 2:7]  # heads of a wider projection
    for rotary_dim in (64, 32, 24):  # all of a head, a half of it, and no whole vectors
        cos_sin = angles(rotary_dim, len(x), dtype)
        assert torch.equal(rotate(x, *cos_sin, norm), rotate(norm(x), *cos_sin))


def test_a_layer_of_an_odd_shape_is_called_part_by_part():
    backend = CpuAttention(4, 2, 32, 16, torch.bfloat16)
    layer = filled(Qwen3DecoderLayer(NetworkConfig(64, 96, 170, 1, 4, 2, head_dim=32), backend), torch.bfloat16)
    model = torch.nn.ModuleDict({"layer": layer})
    replace_layers(model, torch.bfloat16)
    fuse_layers(model, backend)
    assert model["layer"] is layer


def test_enforce_eager_keeps_the_layers_of_pytorch():
    for enforce_eager, name in ((True, "Qwen3DecoderLayer"), (False, "CpuDecoderLayer")):
        llm = LLM(TINY, enforce_eager=enforce_eager, attention_backend="cpu")
        assert type(llm.engine.runner.model.model.layers[0]).__name__ == name


# ---- where it can be used


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"name": "auto", "dtype": torch.bfloat16}, None),
        ({"device": torch.device("cuda")}, "it runs on CPU, not on cuda"),
        ({"dtype": torch.float16}, "support bfloat16 and float32, not torch.float16"),
        ({"head_dim": 48}, "head_dim must be a multiple of 32, it is 48"),
        ({"block_size": 8}, "block_size must be a multiple of 16, got 8"),
    ],
)
def test_it_says_where_it_cannot_be_used(changed, message):
    wanted = {"name": "cpu", "device": CPU, "dtype": torch.float32, "head_dim": 64, "block_size": None, **changed}
    if message is None:
        assert select_backend(**wanted)[0] is CpuAttention
        return
    with pytest.raises(ValueError, match=f"attention_backend='cpu' cannot be used .*{message}"):
        select_backend(**wanted)


@pytest.fixture
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu.load_library.cache_clear()
    yield tmp_path / "nanovllm"
    cpu.load_library.cache_clear()


def test_without_a_compiler_the_engine_runs_on_pytorch(fresh_cache, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level("WARNING"):
        llm = LLM(TINY)
    assert "the CPU kernels cannot be used" in caplog.text
    assert isinstance(llm.engine.runner.backend, TorchAttention)
    assert "not cpu: there is no C compiler" in llm.engine.description


def test_a_compiler_that_fails_is_quoted(fresh_cache, monkeypatch):
    monkeypatch.setenv("CC", f"{sys.executable} -c 'import sys; sys.exit(\"out of order\")'")
    with pytest.raises(NoLibraryError, match="could not compile cpu.c: out of order"):
        load_library(torch.float32)
    assert not list(fresh_cache.iterdir())
    cpu.load_library.cache_clear()
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(NoLibraryError, match="could not be compiled and loaded: .*/no/such/compiler"):
        load_library(torch.float32)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("source", cpu.FUNCTIONS, ids=lambda source: source.name)
def test_the_source_compiles_without_a_warning(source):
    """At the level that follows the flow of values. Stack frames are small: threads may have stacks of 128 KiB."""
    flags = ["-DBFLOAT16"]
    if platform.machine() == "x86_64" and source != cpu.INT8_KV:
        flags += ["-march=sapphirerapids", "-DAMX"]
    warnings = ["-Wall", "-Wextra", f"-Wframe-larger-than={32 << 10}", "-Werror"]
    subprocess.run(["cc", *cpu.FLAGS, "-O3", *flags, *warnings, str(source), "-o", "/dev/null"], check=True)


def test_argmax_is_pytorchs(processor):
    backend = CpuAttention(4, 2, 32, 16, torch.float32)
    for num_rows, num_columns in [(0, 5), (1, 1), (2, 15), (3, 16), (5, 1000), (2, 33_333)]:
        few = torch.randint(0, 9, (num_rows, num_columns), generator=torch.Generator().manual_seed(num_columns)).float()
        random = randn(num_rows, num_columns, dtype=torch.float32)
        for logits in (random, few, torch.full_like(few, -torch.inf), -few - 100):
            assert torch.equal(backend.argmax(logits), logits.argmax(dim=-1))
            for column in {0, num_columns // 2, num_columns - 1} if num_rows else ():
                for value in (torch.nan, torch.inf):
                    changed = logits.clone()
                    changed[-1, column:] = value
                    assert torch.equal(backend.argmax(changed), changed.argmax(dim=-1))
        assert torch.equal(backend.argmax(few.bfloat16().T.contiguous().T), few.argmax(dim=-1))


@pytest.mark.parametrize(
    ("num_columns", "wants_floats", "bias"),  # 65 pairs of panels, 66, and lines that are not whole
    [(2080, True, None), (2112, False, "random"), (2100, True, "random")],
)
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
