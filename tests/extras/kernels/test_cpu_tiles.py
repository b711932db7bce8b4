"""AMX's tiles in `cpu.c`: the emulation against Intel's definition, the processor against the emulation, all sizes.

Products reach the tiles through `linear` and `attend`, as in the engine. Where the processor has no AMX, or Linux does
not allow it, only the emulation is tested.
"""

import math

import numpy as np
import pytest
import torch

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.kernels.cpu import library as cpu
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.kernels.cpu.cpu_layers import CpuLinear, HugePages
from nanovllm_extras.kernels.cpu.library import load_library
from tests.extras.attention_steps import Step, check_close
from tests.extras.kernels.processors import need_a_compiler, pretend
from tests.extras.kernels.test_cpu_kernels import TINY, randn

LEAST_NORMAL = 2.0**-126


@pytest.fixture(scope="module", autouse=True)
def _needs_a_compiler():
    need_a_compiler(torch.bfloat16)


@pytest.fixture
def emulation(monkeypatch):
    with pretend(monkeypatch, "AMX, emulated"):
        assert load_library(torch.bfloat16).description == "AMX BF16, emulated"
        yield


@pytest.fixture
def _needs_amx():
    if load_library(torch.bfloat16).description != "AMX BF16":
        pytest.skip("the processor has no AMX, or it is not allowed")


def product(x, weight):
    """x weight^T in float32 by `cpu.c`. x: [m, k], weight: [n, k], bfloat16"""
    layer = CpuLinear(weight, None, HugePages(weight.nbytes * 16))
    return layer.product(x, torch.empty(len(x), len(weight)))


def flush(x):
    """float64 -> float32 as tiles round it, in float64: what is too small for a normal number is 0."""
    rounded = x.astype(np.float32).astype(np.float64)
    return np.where(np.abs(rounded) < LEAST_NORMAL, 0.0, rounded)


def product_by_the_manual(x, weight):
    """TDPBF16PS, 16 pairs of k after the other. Products of bfloat16 are exact in float64."""
    x, weight = (flush(t.double().numpy()) for t in (x, weight))  # denormals count as 0
    sums = np.zeros((len(x), len(weight)))
    for start in range(0, x.shape[1], 32):
        even_odd = [np.zeros_like(sums), np.zeros_like(sums)]
        for k in range(start, min(start + 32, x.shape[1])):
            even_odd[k % 2] = flush(even_odd[k % 2] + np.multiply.outer(x[:, k], weight[:, k]))
        sums = flush(sums + flush(even_odd[0] + even_odd[1]))
    return torch.from_numpy(sums.astype(np.float32))


def numbers(kind, *shape, seed=0):
    """bfloat16 of random bits: exponents around 1, any, or such that inputs, products or sums are denormal."""
    low, high = {"ordinary": (120, 132), "any": (50, 185), "denormal": (0, 3), "small": (54, 66)}[kind]
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(low, high, shape, generator=generator)
    others = torch.randint(0, 1 << 8, shape, generator=generator)  # sign and mantissa
    bits = (others >> 7 << 15) | (exponents << 7) | (others & 127)
    return bits.to(torch.uint16).view(torch.bfloat16)


KINDS = [("ordinary", "ordinary"), ("any", "any"), ("denormal", "ordinary"), ("small", "small")]


@pytest.mark.parametrize(("x_kind", "weight_kind"), KINDS)
@pytest.mark.parametrize("k", [32, 70])
def test_emulation_follows_the_manual_bit_for_bit(emulation, x_kind, weight_kind, k):
    x, weight = numbers(x_kind, 17, k), numbers(weight_kind, 33, k, seed=1)
    expected = product_by_the_manual(x, weight)
    assert torch.equal(product(x, weight), expected)
    if x_kind in ("denormal", "small"):
        exact = x.double() @ weight.double().T
        assert not torch.allclose(expected.double(), exact, rtol=1e-3, atol=0), "nothing was flushed"


@pytest.mark.usefixtures("_needs_amx")
@pytest.mark.parametrize(("x_kind", "weight_kind"), KINDS)
def test_the_processor_gives_the_bits_of_the_emulation(monkeypatch, x_kind, weight_kind):
    for m, n, k in [(1, 16, 32), (16, 64, 64), (37, 100, 130), (300, 48, 600)]:
        x, weight = numbers(x_kind, m, k), numbers(weight_kind, n, k, seed=1)
        on_tiles = product(x, weight)
        with pretend(monkeypatch, "AMX, emulated"):
            emulated = product(x, weight)
        assert torch.equal(on_tiles.view(torch.int32), emulated.view(torch.int32))


@pytest.mark.usefixtures("_needs_amx")
@pytest.mark.parametrize("block_size", [16, 32, 80])
def test_attention_on_the_processor_gives_the_bits_of_the_emulation(monkeypatch, block_size):
    def run():
        backend = CpuAttention(8, 2, 64, block_size, torch.bfloat16)
        return Step(backend, [(100, 1), (31, 1), (0, 33), (50, 47)], dtype=torch.bfloat16).run(backend)

    on_tiles = run()
    with pretend(monkeypatch, "AMX, emulated"):
        assert torch.equal(on_tiles, run())


@pytest.fixture(params=["native", "AMX, emulated"])
def tiles(request, monkeypatch):
    if request.param == "native":
        request.getfixturevalue("_needs_amx")
        yield
        return
    with pretend(monkeypatch, request.param):
        yield


# Rows: a tile, two, several pairs of them, more than stay in L2. Columns: 1 to 5 panels. k: with tails, in parts.
def test_every_size_equals_float64(tiles):
    for n, k in [(1, 2), (16, 30), (33, 34), (50, 64), (70, 290), (48, 258)]:
        weight, inputs = randn(n, k, dtype=torch.bfloat16, seed=2), randn(260, k, dtype=torch.bfloat16)
        expected = inputs.double() @ weight.double().T
        for m in (1, 15, 16, 17, 31, 32, 33, 65, 100, 260):
            y = product(inputs[:m], weight)
            torch.testing.assert_close(y.double(), expected[:m], rtol=1e-5, atol=2e-5)
            assert torch.equal(y[-1:], product(inputs[m - 1 : m], weight)), "the same bits in every batch"


def test_what_lies_beside_the_inputs_is_not_read(tiles):
    """Rows of x are followed by NaN, and one output's weights are NaN: no other sum may know of it."""
    for m, k in [(1, 6), (20, 64), (40, 290), (70, 6)]:
        x = torch.full((m + 40, k), math.nan, dtype=torch.bfloat16)
        x[:m] = randn(m, k, dtype=torch.bfloat16)
        weight = randn(40, k, dtype=torch.bfloat16, seed=2)
        expected = x[:m].double() @ weight.double().T
        weight[16] = math.nan  # the first lane of the second panel
        expected[:, 16] = math.nan
        y = product(x[:m], weight)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=2e-5, equal_nan=True)


def test_attention_equals_the_reference(tiles):
    """Unfilled slots hold NaN. Sequences end at, before and after the ends of blocks, tiles and pairs of tokens."""
    for *sizes, block_size in [(4, 4, 32, 16), (8, 2, 64, 32), (40, 2, 96, 48), (8, 2, 64, 80)]:
        backend = CpuAttention(*sizes, block_size, torch.bfloat16)
        lens = [(0, 1), (15, 1), (block_size, 1), (64, 1), (3 * block_size - 2, 1), (0, 33), (30, 3),
                (block_size - 1, 50)]  # fmt: skip
        step = Step(backend, lens, dtype=torch.bfloat16)
        check_close(step.run(backend), step)


# ---- where there are no tiles


@pytest.fixture(scope="module")
def hasty_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def fresh_library(monkeypatch, hasty_cache):
    """Compiled for these tests, and so in a hurry."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(hasty_cache))
    monkeypatch.setattr(cpu, "FLAGS", (*cpu.FLAGS, "-O0"))
    cpu.load_library.cache_clear()
    yield
    cpu.load_library.cache_clear()


def test_a_permission_that_is_refused_is_named(fresh_library, monkeypatch):
    monkeypatch.setattr(cpu, "has_tiles", lambda: True)
    monkeypatch.setattr(cpu, "ask_for_tiles", lambda: "Linux does not allow it: Operation not permitted")
    llm = LLM(TINY, dtype="bfloat16")
    assert "(no AMX: Linux does not allow it: Operation not permitted) on cpu" in llm.engine.description
    assert llm.generate(["Hello"], SamplingParams(max_tokens=2), use_tqdm=False)


def test_tiles_that_a_hypervisor_hides_are_named(fresh_library, monkeypatch):
    monkeypatch.setattr(cpu, "cpu_flags", lambda: ["avx512_bf16", "avx512_fp16"])
    assert "(no AMX: Linux shows no amx_tile and amx_bf16)" in load_library(torch.bfloat16).description


@pytest.mark.slow
def test_a_compiler_without_amx_is_named(fresh_library, monkeypatch):
    monkeypatch.setattr(cpu, "has_tiles", lambda: True)
    monkeypatch.setattr(cpu, "ask_for_tiles", lambda: None)
    monkeypatch.setattr(cpu, "FLAGS", tuple(flag.replace("=native", "=x86-64-v3") for flag in cpu.FLAGS))
    assert load_library(torch.bfloat16).description.startswith("AVX2 (no AMX: ")
    assert load_library(torch.bfloat16).description.endswith(" cannot compile it)")


def test_float32_knows_nothing_of_tiles(monkeypatch):
    monkeypatch.setattr(cpu, "ask_for_tiles", lambda: pytest.fail("asked"))
    cpu.load_library.cache_clear()
    assert "AMX" not in load_library(torch.float32).description


def test_linux_refuses_what_is_no_feature(monkeypatch):
    """The answer of Linux is understood: the permission is asked for with a number that it does not know."""
    assert "does not allow it: Invalid argument" in (cpu.ask_for_tiles(feature=63) or "")
