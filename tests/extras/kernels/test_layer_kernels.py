"""The rest of a decoder layer in Triton: each kernel against float64, and bit by bit against PyTorch's layers; the
whole layer against its definition.

Where they run, and with what in memory: `on_device.py`.
"""

import json
import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks import kernel_layers
from nanovllm.layers import flash_attention as core_flash_attention
from nanovllm.layers import triton_layers
from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.layers.basic import ApplyRotary, RMSNorm, Rotary, SiluAndMul
from nanovllm.layers.triton_layers import TritonRMSNorm, norm_and_rotate, rms_norm, silu_and_mul, store_kv
from nanovllm.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from nanovllm_extras import LLM, TINY_QWEN3
from nanovllm_extras.execution.input_buffer import map_tensors
from nanovllm_extras.kernels.backend import AttentionBackend
from nanovllm_extras.kernels.cuda import cuda_decoder_layer as decoder_layer
from nanovllm_extras.kernels.cuda import few_tokens
from nanovllm_extras.kernels.cuda.cuda_decoder_layer import (
    RotaryTable,
    TritonDecoderLayer,
    replace_layers,
)
from nanovllm_extras.kernels.cuda.flash_backend import FlashAttention
from nanovllm_extras.kernels.cuda.norm_kernels import norm_rotary_store
from nanovllm_extras.kernels.cuda.triton_attention import TritonAttention
from nanovllm_extras.kernels.dense_layers import dense_parts
from nanovllm_extras.models.llama import LlamaDecoderLayer
from nanovllm_extras.models.masking import AttentionOptions
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.rope import Rope, ScaledRotary
from tests.conftest import every_second
from tests.extras.attention_steps import Step
from tests.extras.kernels.on_device import (
    DEVICE,
    DTYPES,
    FP8,
    HALF,
    IS_INTERPRETED,
    every_second_case,
    only_on_gpu,
    randn,
)

TOLERANCES = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}  # of up to four roundings
EPS = 1e-6

pytestmark = [] if IS_INTERPRETED else pytest.mark.gpu


def check(out, expected, dtype):
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def check_bits(out, same):
    """What is rounded at the same points differs only where sums in another order fall to another side of a border."""
    assert (out == same).float().mean() >= 0.99
    last_bit = torch.finfo(out.dtype).eps * same.abs().max().item()
    torch.testing.assert_close(out, same, rtol=0, atol=2 * last_bit)


def filled(module, dtype, seed=0):
    """Weights that keep the size of what they are multiplied with; those of norms are about one."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for name, parameter in module.named_parameters():
        scale = 1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        weight = torch.randn(parameter.shape, generator=generator, device=DEVICE)
        parameter.data = (weight * scale + ("norm" in name)).to(dtype)
    return module.requires_grad_(False)


# ---- rms_norm


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_equals_float64(dtype):
    for num_tokens, size in [(1, 1), (3, 48), (2, 1000), (5, 1024), (2, 5120), (0, 16)]:
        wide = randn(num_tokens, size + 24, dtype=dtype) * torch.logspace(-3, 2, num_tokens, device=DEVICE)[:, None]
        wide[:, size:] = math.nan  # the next row begins elsewhere
        x, weight = wide.to(dtype)[:, :size], randn(size, dtype=dtype, seed=1)
        before = x.clone()
        y = rms_norm(x, weight, EPS)
        x64 = x.double()
        expected = x64 / (x64.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        check(y, expected, dtype)
        assert y.is_contiguous()
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", HALF)
def test_rms_norm_rounds_as_the_layer_does(dtype):
    """Also of queries as a view of the fused projection, in a decoder layer that has no fast version as a whole."""
    norm = filled(RMSNorm(1000, EPS), dtype)
    x = randn(8, 1000, dtype=dtype, seed=3) * 3
    check_bits(rms_norm(x, norm.weight, EPS), norm(x))
    norm = filled(RMSNorm(48, EPS), dtype)
    x = randn(8, 300, dtype=dtype, seed=3)[:, : 3 * 48].unflatten(1, (3, 48))
    check_bits(TritonRMSNorm(norm)(x), norm(x))


def test_rms_norm_of_zeros_and_of_large_numbers():
    weight = torch.ones(16, dtype=torch.float16, device=DEVICE)
    x = torch.zeros(2, 16, dtype=torch.float16, device=DEVICE)
    x[1] = 60_000  # whose square is behind float16's end
    assert rms_norm(x, weight, EPS).tolist() == [[0.0] * 16, [1.0] * 16]


# ---- silu_and_mul


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_equals_float64_and_rounds_as_the_layer_does(dtype):
    for num_tokens, size in [(1, 8), (3, 100), (2, 1024), (4, 3000)]:
        wide = randn(num_tokens, 2 * size + 8, dtype=dtype) * 4
        wide[:, 2 * size :] = math.nan
        gate_up = wide[:, : 2 * size]
        gate_up[0, :6] = torch.tensor([-200.0, 200.0, 0.0, -88.0, 88.0, 1e-3]).to(dtype)
        gate, up = gate_up.double().chunk(2, dim=1)
        found = silu_and_mul(*gate_up.chunk(2, dim=1))
        check(found, gate * gate.sigmoid() * up, dtype)
        if dtype in HALF:
            check_bits(found, SiluAndMul()(*gate_up.chunk(2, dim=1)))
    assert silu_and_mul(*torch.zeros(0, 12, device=DEVICE).chunk(2, dim=1)).shape == (0, 6)


# ---- the core's other kernels


@pytest.mark.parametrize("dtype", HALF)
def test_heads_are_normalised_and_rotated_as_by_the_layers(dtype):
    for num_heads, head_dim in [(16, 128), (5, 64), (3, 48), (1, 2)]:
        norm = filled(RMSNorm(head_dim, EPS), dtype)
        qkv = randn(7, (num_heads + 4) * head_dim, dtype=dtype, seed=3) * 3
        x = qkv[:, head_dim : (num_heads + 1) * head_dim].unflatten(1, (num_heads, head_dim))
        positions = torch.tensor([0, 1, 2, 3, 500, 9000, 32767], device=DEVICE)
        angles = Rotary(head_dim, 1e6)(positions, dtype)
        check_bits(norm_and_rotate(x, *angles, norm.weight, EPS), ApplyRotary()(norm(x), *angles))


def test_k_and_v_are_copied_to_their_slots_and_nowhere_else():
    for num_kv_heads, head_dim in [(8, 128), (3, 48)]:
        cache = torch.full((2, 3, 4, num_kv_heads, head_dim), math.nan, device=DEVICE)
        qkv = randn(3, (2 * num_kv_heads + 5) * head_dim, dtype=torch.float32, seed=3).unflatten(1, (-1, head_dim))
        k, v = qkv[:, 5 : 5 + num_kv_heads], qkv[:, 5 + num_kv_heads :]
        expected = cache.clone()
        TorchAttention(num_kv_heads, num_kv_heads, head_dim, 4).store_kv(k, v, expected, torch.tensor([11, 0, 6]))
        store_kv(k, v, cache, torch.tensor([11, 0, 6], dtype=torch.int32, device=DEVICE))
        assert torch.equal(cache.nan_to_num(-1.0), expected.nan_to_num(-1.0))


VIEWS = {
    "view",
    "slice",
    "split",
    "split_with_sizes",
    "unsqueeze",
    "select",
    "t",
    "transpose",
    "expand",
    "alias",
    "unbind",
}
VIEWS |= {"fill_"}  # of `torch.empty` in these tests
VIEWS |= {"_unsafe_view", "detach", "empty", "empty_like", "_reshape_alias", "squeeze", "permute", "as_strided"}


class Launches(TorchDispatchMode):
    """Counts operations that a GPU launches: all but views and products."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        if name not in {*VIEWS, "mm", "addmm"}:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def launches_of_a_layer(attention, monkeypatch):
    """The launches of a decoder layer in a step of decodes, without products and attention."""
    config = Qwen3ForCausalLM.read_config(json.loads((TINY_QWEN3 / "config.json").read_text(encoding="utf-8")))
    backend = attention(config.num_attention_heads, config.num_key_value_heads, config.head_dim, 4, torch.float32)
    monkeypatch.setattr(backend, "attend", lambda q, layer_cache, metadata: q)
    layer = filled(Qwen3DecoderLayer(config, backend), torch.float32)
    if isinstance(backend, core_flash_attention.FlashAttention):
        triton_layers.replace_layers(layer)
        backend.store = triton_layers.store_kv
    x = randn(5, config.hidden_size, dtype=torch.float32)
    angles = Rotary(config.head_dim, 1e6)(torch.arange(5), torch.float32)
    cache = torch.zeros(backend.kv_cache_shape(1, 5), device=DEVICE)[:, 0]
    slots = torch.arange(5, dtype=torch.int32)
    metadata = AttentionMetadata.of_decodes(slots, slots[:, None], slots + 1, torch.arange(6, dtype=torch.int32))
    launches = Launches()
    for name in [name for name in vars(triton_layers) if name.endswith("_kernel")]:
        monkeypatch.setattr(triton_layers, name, CountedKernel(name, getattr(triton_layers, name), launches))
    with launches:
        y = layer(x, *angles, cache, metadata)
    return launches.names, y, cache


class CountedKernel:
    def __init__(self, name, kernel, launches):
        self.name, self.kernel, self.launches = name, kernel, launches

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.launches.names.append(self.name)
            with _disable_current_modes():
                self.kernel[grid](*args, **kwargs)

        return launch


def test_a_decoder_layer_of_the_core_takes_eight_launches(monkeypatch):
    names, y, cache = launches_of_a_layer(core_flash_attention.FlashAttention, monkeypatch)
    expected = ["add", "norm_and_rotate_kernel", "rms_norm_kernel"] * 2 + ["silu_and_mul_kernel", "store_kv_kernel"]
    assert sorted(names) == sorted(expected)
    plain_names, plain_y, plain_cache = launches_of_a_layer(TorchAttention, monkeypatch)
    assert len(plain_names) == 44, "54 in bfloat16, with conversions to float32 and back, and of the slots"
    torch.testing.assert_close(y, plain_y)
    torch.testing.assert_close(cache, plain_cache)


# ---- norm_rotary_store

SHAPES = [(4, 2, 16), (16, 8, 128), (6, 3, 64), (5, 1, 32), (20, 5, 16), (2, 1, 256), (3, 3, 8), (32, 4, 64)]


def make_projections(num_heads, num_kv_heads, head_dim, num_tokens, dtype, slots, block_size=16, seed=0):
    """What the kernel gets: qkv as rows of something wider, angles as the table gives them, a cache full of NaN."""
    width = (num_heads + 2 * num_kv_heads) * head_dim
    wide = torch.cat([randn(num_tokens, width, dtype=dtype, seed=seed), randn(num_tokens, 8, dtype=dtype)], dim=1)
    wide[:, width:] = math.nan
    positions = torch.arange(num_tokens, device=DEVICE, dtype=torch.int32) * 7 % 100
    rotary = ScaledRotary(head_dim, Rope(1e4), 4096)
    cache = torch.full((2, 5, block_size, num_kv_heads, head_dim), math.nan, device=DEVICE, dtype=dtype)
    return SimpleNamespace(
        qkv=wide[:, :width],
        norms=[filled(RMSNorm(head_dim, EPS), dtype, seed) for seed in (1, 2)],
        rotary=rotary,
        positions=positions,
        angles=RotaryTable(rotary, 100, dtype, DEVICE)(positions, dtype),
        cache=cache,
        slots=torch.tensor(slots, dtype=torch.int32, device=DEVICE),
        heads=[part.unflatten(1, (-1, head_dim)) for part in wide[:, :width].split(
            [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], dim=1
        )],
    )  # fmt: skip


def run(step, cache=None, **scales):
    weights = [norm.weight for norm in step.norms]
    return norm_rotary_store(
        step.qkv, *weights, EPS, *step.angles, step.cache if cache is None else cache, step.slots, **scales
    )


def turn_exactly(x, weight, angles):
    """[num_tokens, heads, head_dim] -> the same normalised and turned, in float64, pair by pair as complex numbers"""
    x, half = x.double(), x.shape[-1] // 2
    x = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(*(t.double() for t in angles))
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), every_second_case(SHAPES))
@pytest.mark.sparse
@pytest.mark.thinned
def test_norm_rotary_store_equals_float64(num_heads, num_kv_heads, head_dim, dtype):
    """Three tokens anywhere in the cache, and two of padding, both of which go to the null block's first slot."""
    slots = [37, 0, 16, 79, 0]
    step = make_projections(num_heads, num_kv_heads, head_dim, 5, dtype, slots)
    before = step.qkv.clone()
    q = run(step)
    assert q.shape == (5, num_heads, head_dim)
    check(q, turn_exactly(step.heads[0], step.norms[0].weight, step.angles), dtype)
    k_slots, v_slots = step.cache.flatten(1, 2)  # [num_slots, num_kv_heads, head_dim]
    k = turn_exactly(step.heads[1], step.norms[1].weight, step.angles)
    for token, slot in enumerate(slots):
        if slot:
            check(k_slots[slot], k[token], dtype)
            assert torch.equal(v_slots[slot], step.heads[2][token])
    is_written = torch.zeros(80, dtype=torch.bool, device=DEVICE).index_fill(0, step.slots.long(), True)
    for part in (k_slots, v_slots):
        assert not part[is_written].isnan().any()
        assert part[~is_written].isnan().all()
    assert torch.equal(step.qkv, before)


@pytest.mark.parametrize("dtype", HALF)
def test_norm_rotary_store_rounds_as_the_layers_do(dtype):
    step = make_projections(16, 8, 128, 12, dtype, range(20, 32))
    q = run(step)
    angles = step.rotary(step.positions, dtype)  # of other strides
    check_bits(q, ApplyRotary()(step.norms[0](step.heads[0]), *angles))
    check_bits(step.cache[0].flatten(0, 1)[20:32], ApplyRotary()(step.norms[1](step.heads[1]), *angles))
    step.angles = angles
    assert torch.equal(run(step), q)


def test_a_token_that_is_nan_spoils_no_other():
    step = make_projections(4, 2, 16, 4, torch.float32, [17, 0, 18, 19])
    clean = run(step)
    step.cache.fill_(0)
    step.qkv[1] = math.nan
    q = run(step)
    assert q[1].isnan().all()
    assert torch.equal(q[[0, 2, 3]], clean[[0, 2, 3]])
    assert not step.cache[:, 1:].isnan().any()


# all of them on e4m3's grid if divided by 2, or behind its end: the interpreter rounds otherwise than a GPU
GRID = [0, 2, -3, 896, -896, 960, 4e4, -4e4, 0.25, 28, 52, -832, 12, 20, 104, -1e3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rotary_store_in_fp8_scales_and_saturates(dtype):
    """Keys of ones at position 0: neither the norm nor the rotation changes them, and the weight can be anything."""
    step = make_projections(4, 2, 16, 1, dtype, [37])
    cache = torch.zeros(step.cache.shape, device=DEVICE).to(FP8)
    grid = torch.tensor(GRID).to(DEVICE, dtype)
    step.heads[1][0] = torch.tensor([1.0, -1.0]).to(DEVICE)[:, None]
    step.heads[2][0] = grid
    step.norms[1].weight.copy_(grid)
    weights = [norm.weight for norm in step.norms]
    q = norm_rotary_store(step.qkv, *weights, 0.0, *step.angles, cache, step.slots, k_scale=2.0, v_scale=0.5)
    torch.testing.assert_close(q, run(step), rtol=2e-2, atol=2e-2)  # queries are not scaled
    k, v = cache.flatten(1, 2)[:, 37].float()  # [num_kv_heads, head_dim] each
    expected = (grid.float() / 2).clamp(-448, 448)
    assert torch.equal(k, torch.stack([expected, -expected]))
    assert torch.equal(v, (grid.float() / 0.5).clamp(-448, 448).expand(2, -1))
    assert not cache.flatten(1, 2).float().index_fill(1, step.slots.long(), 0).any()


@only_on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rotary_store_in_fp8_rounds_as_torch_does(dtype):
    step = make_projections(16, 8, 128, 30, dtype, range(20, 50))
    run(step)
    cache = torch.zeros(step.cache.shape, device=DEVICE).to(FP8)
    run(step, cache, k_scale=0.7, v_scale=1.3)
    for part, exact, scale in zip(cache.flatten(1, 2), step.cache.flatten(1, 2), (0.7, 1.3), strict=True):
        expected = (exact[20:50].float() * (1 / torch.tensor(scale))).clamp(-448, 448).to(FP8).float()
        assert (part[20:50].float() == expected).float().mean() > 0.999  # the inverse may be rounded otherwise


# ---- the rotary angles


@pytest.mark.parametrize(("head_dim", "dtype"), [(6, torch.float32), (128, torch.bfloat16)])
def test_the_table_holds_the_very_bits(head_dim, dtype):
    rotary = ScaledRotary(head_dim, Rope(1e6), 4096)
    table = RotaryTable(rotary, 40_960, dtype, DEVICE)
    positions = torch.tensor([0, 1, 2, 17, 1023, 4096, 40_959, 5, 5], dtype=torch.int32, device=DEVICE)
    for looked_up, computed in zip(table(positions, dtype), rotary(positions, dtype), strict=True):
        assert looked_up.shape == (9, 1, head_dim // 2)
        assert torch.equal(looked_up, computed)


# ---- the layer


def small_config(**options):
    shape = {
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    return NetworkConfig(**{**shape, **options})


LENS = [(20, 1), (15, 1), (0, 1), (16, 5), (0, 7)]


def run_layer(
    config,
    dtype,
    fast_backend=TritonAttention,
    plain_backend=AttentionBackend,
    lens=LENS,
    layer_class=Qwen3DecoderLayer,
    has_ranks=False,
    **options,
):
    """(what the layer gives, what its fast version gives, the cache behind each)"""
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    backends = [backend_class(*heads, 16, dtype, **options) for backend_class in (plain_backend, fast_backend)]
    step = Step(TorchAttention(*heads, 16), lens, dtype=dtype)
    batch = map_tensors(step.batch, lambda t: t.to(DEVICE))
    with DEVICE:
        layers = [filled(layer_class(config, backend), dtype) for backend in backends]
    scales = [getattr(backends[1], name, 1.0) for name in ("k_scale", "v_scale")]
    layers[1] = TritonDecoderLayer(dense_parts(layers[1]), backends[1], *scales)
    if has_ranks:  # another rank gives the same as this one: all that a half of the layer adds comes twice
        assert layers[1].join(SimpleNamespace(all_reduce=lambda product: product.mul_(2)))
        for product in (layers[0].self_attn.o_proj, layers[0].mlp.down_proj):
            for parameter in product.parameters():
                parameter.data.mul_(2)
    cos_sin = ScaledRotary(config.head_dim, config.rope or Rope(config.rope_theta), 128)(batch.positions, dtype)
    x, results = randn(len(batch.positions), config.hidden_size, dtype=dtype, seed=5), []
    for layer, backend in zip(layers, backends, strict=True):
        cache = step.layer_cache.to(DEVICE, backend.kv_cache_dtype or dtype)
        given = x.clone()
        out = layer(given, *cos_sin, cache, batch.metadata)
        assert (out is given) == isinstance(layer, TritonDecoderLayer)
        results.append((out, cache))
    (plain, plain_cache), (fast, fast_cache) = results
    return plain, fast, plain_cache, fast_cache


MAX_FEW = few_tokens.MAX_TOKENS
LAYERS = [
    ({"hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 5, "num_key_value_heads": 1}, True, 0),
    ({"head_dim": 64, "rope": Rope(100.0)}, False, MAX_FEW),
    ({}, True, MAX_FEW),
    (
        {"qkv_bias": True, "o_bias": True, "num_attention_heads": 6, "num_key_value_heads": 3, "rms_norm_eps": 0.1},
        False,
        MAX_FEW,
    ),
]


@pytest.mark.parametrize(
    ("options", "has_triton_attention", "max_few_tokens"),
    [pytest.param(*layer, marks=[pytest.mark.slow] * (i in (2,))) for i, layer in enumerate(LAYERS)],
    ids=str,
)
def test_the_fast_version_equals_the_layer(monkeypatch, options, has_triton_attention, max_few_tokens):
    monkeypatch.setattr(few_tokens, "MAX_TOKENS", max_few_tokens)
    backend = TritonAttention if has_triton_attention else AttentionBackend
    plain, fast, plain_cache, fast_cache = run_layer(small_config(**options), torch.float32, backend)
    torch.testing.assert_close(fast, plain, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(fast_cache, plain_cache, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "max_few_tokens"),
    [
        ({"qkv_bias": True, "o_bias": True, "mlp_bias": True}, 0),
        pytest.param({}, MAX_FEW, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_fast_version_equals_a_layer_without_head_norms(monkeypatch, options, max_few_tokens):
    """Llama's, with all biases that it may have, and with a window."""
    monkeypatch.setattr(few_tokens, "MAX_TOKENS", max_few_tokens)
    config = small_config(**options, attention_options=(AttentionOptions(window=6),) * 2)
    results = run_layer(config, torch.float32, AttentionBackend, layer_class=LlamaDecoderLayer)
    plain, fast, plain_cache, fast_cache = results
    torch.testing.assert_close(fast, plain, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(fast_cache, plain_cache, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("max_few_tokens", every_second([MAX_FEW, 0]))
def test_the_fast_version_is_as_close_to_float32_as_the_layer(monkeypatch, dtype, max_few_tokens):
    """It rounds less; compared are weights and inputs that are numbers in `dtype`."""
    monkeypatch.setattr(few_tokens, "MAX_TOKENS", max_few_tokens)
    config = small_config(head_dim=64)
    plain, fast, *_ = run_layer(config, dtype)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    layer = filled(Qwen3DecoderLayer(config, TorchAttention(*heads, 16)), dtype).float()
    step = Step(TorchAttention(*heads, 16), LENS, dtype=dtype)
    batch = map_tensors(step.batch, lambda t: t.to(DEVICE))
    x = randn(len(batch.positions), config.hidden_size, dtype=dtype, seed=5).float()
    angles = ScaledRotary(config.head_dim, config.rope or Rope(config.rope_theta), 128)(batch.positions, torch.float32)
    exact = layer(x, *angles, step.layer_cache.to(DEVICE).float(), batch.metadata)
    assert (fast - exact).norm() <= 1.1 * (plain - exact).norm()
    torch.testing.assert_close(fast, plain, rtol=TOLERANCES[dtype], atol=4 * TOLERANCES[dtype])


def test_the_fast_version_scales_an_fp8_cache():
    """Against the layer's own steps over the same backend."""

    def fp8_attention(*args):
        return TritonAttention(*args, kv_cache_dtype="fp8", k_scale=0.25, v_scale=4.0)

    plain, fast, plain_cache, fast_cache = run_layer(
        small_config(head_dim=64), torch.float32, fp8_attention, fp8_attention, [(0, 1), (0, 7), (0, 17)]
    )
    is_same = fast_cache.view(torch.uint8) == plain_cache.view(torch.uint8)
    assert is_same.float().mean() > 0.999  # K beside the border between two numbers may fall to either side
    torch.testing.assert_close(fast, plain, rtol=1e-2, atol=1e-2)


def make_model(config, backend, dtype=torch.float32):
    return filled(Qwen3ForCausalLM(config, backend), dtype)


@pytest.mark.parametrize("max_few_tokens", every_second([MAX_FEW, 0]))
def test_the_fast_version_sums_each_half_over_the_ranks(monkeypatch, max_few_tokens):
    monkeypatch.setattr(few_tokens, "MAX_TOKENS", max_few_tokens)
    config = small_config(o_bias=True)
    plain, fast, plain_cache, fast_cache = run_layer(config, torch.float32, AttentionBackend, has_ranks=True)
    torch.testing.assert_close(fast, plain, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(fast_cache, plain_cache, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_all_layers_are_replaced_and_keep_their_weights():
    config = small_config()
    backend = TritonAttention(4, 2, 16, 16, kv_cache_dtype="fp8", k_scale=0.5, v_scale=3.0)
    model = make_model(config, backend)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    backend.make_fast(model, 128)
    assert {parameter.data_ptr() for parameter in model.parameters()} == weights
    decoder = model.model
    assert [type(layer) for layer in decoder.layers] == [TritonDecoderLayer] * 2
    assert [(layer.k_scale, layer.v_scale) for layer in decoder.layers] == [(0.5, 3.0)] * 2
    assert type(decoder.norm) is TritonRMSNorm
    assert type(decoder.rotary) is RotaryTable
    assert decoder.rotary.table.shape == (128, 16)


def test_a_layer_of_other_head_dims_is_left_alone():
    backend = TorchAttention(4, 2, 24, 16)
    model = make_model(small_config(head_dim=24), backend)
    replace_layers(model, backend, 128)
    assert [type(layer) for layer in model.model.layers] == [Qwen3DecoderLayer] * 2
    assert type(model.model.norm) is TritonRMSNorm
    assert type(model.model.rotary) is RotaryTable


def test_rows_that_no_program_can_hold_are_left_alone(monkeypatch):
    monkeypatch.setattr(decoder_layer, "MAX_SIZE", 63)
    backend = TorchAttention(4, 2, 16, 16)
    model = make_model(small_config(), backend)
    replace_layers(model, backend, 128)
    assert type(model.model.layers[0]) is Qwen3DecoderLayer
    assert type(model.model.norm) is RMSNorm


def test_flash_attention_replaces_layers_where_triton_is_installed(monkeypatch):
    library = types.SimpleNamespace(flash_attn_with_kvcache=None, flash_attn_varlen_func=None)
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    backend = FlashAttention(4, 2, 16, 256)
    for is_installed in (False, True):
        with monkeypatch.context() as patch:
            if not is_installed:
                patch.setitem(sys.modules, "triton", None)
            model = make_model(small_config(), backend)
            backend.make_fast(model, 128)
        assert (type(model.model.layers[1]) is TritonDecoderLayer) == is_installed
        assert (type(model.model.norm) is TritonRMSNorm) == is_installed


# ---- the engine


def test_enforce_eager_keeps_the_layers_of_pytorch(tiny_checkpoint):
    options = {"dtype": "float32", "device": DEVICE.type, "num_kv_blocks": 4, "attention_backend": "triton"}
    model = LLM(tiny_checkpoint[0], enforce_eager=True, **options).engine.runner.model.model
    assert {type(layer) for layer in model.layers} == {Qwen3DecoderLayer}
    assert type(model.norm) is RMSNorm
    assert type(model.rotary) is Rotary


# ---- the benchmark


@pytest.mark.slow
def test_benchmark_checks_and_measures(monkeypatch):
    """Its own code, on what the interpreter can bear; the figures mean nothing here."""

    def call_once(function):
        function()
        return 1e-6

    monkeypatch.setattr(kernel_layers, "compiled", lambda function: function)
    shape = kernel_layers.Shape(hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16)
    args = (shape, torch.float16, DEVICE, call_once)
    small = list(kernel_layers.measure_kernels(*args, num_tokens=[1, 3]))
    assert [row["kernel"] for row in small[::2]] == ["rms_norm", "norm_rotary_store", "silu_and_mul"]
    assert small[1]["GB/s"] == round((2 * 3 * 64 + 64) * 2 / 1e-6 / 1e9, 1)
    products = list(kernel_layers.measure_products(*args, bandwidth=1e9, num_tokens=[2, 17]))
    assert [row["product"] for row in products[::2]] == ["qkv", "o + residual", "gate_up", "down + residual"]
    assert products[0]["TFLOP/s"] == round(2 * 2 * 64 * 128 / 1e-6 / 1e12, 1)
    # 17 tokens are too many for the fused products, and 96 inputs are not a multiple of a tile
    assert [row["fused us"] for row in products] == [1.0, "-", 1.0, "-", 1.0, "-", "-", "-"]
    assert [row["separate us"] for row in products] == [1.0, "-", 1.0, "-", 1.0, "-", "-", "-"]


# ---- on a GPU: real sizes, graphs

QWEN3 = {
    "0.6B": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    },
    "32B": {
        "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_key_value_heads": 8,
    },
}  # fmt: skip


@only_on_gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("lens", [[(500, 1)] * 3, [(100, 1), (37, 1), (0, 300), (64, 50)]], ids=["decodes", "mixed"])
@pytest.mark.parametrize("name", QWEN3)
def test_real_sizes_equal_the_layer(name, lens, dtype):
    config = small_config(head_dim=128, max_position_embeddings=1024, **QWEN3[name])
    plain, fast, plain_cache, fast_cache = run_layer(config, dtype, lens=lens)
    assert ((fast - plain).norm(dim=-1) <= TOLERANCES[dtype] * plain.norm(dim=-1)).all()
    assert torch.equal(fast_cache.isnan(), plain_cache.isnan())
    error = (fast_cache - plain_cache).nan_to_num().norm()
    assert error <= TOLERANCES[dtype] * plain_cache.nan_to_num().norm()


@only_on_gpu
def test_a_graph_of_the_layer_is_right_for_other_inputs_and_waits_for_nothing():
    config = small_config(head_dim=128, max_position_embeddings=1024, **QWEN3["0.6B"])
    backend = TritonAttention(16, 8, 128, 16)
    layer = TritonDecoderLayer(dense_parts(filled(Qwen3DecoderLayer(config, backend), torch.bfloat16)), backend)
    table = RotaryTable(ScaledRotary(128, Rope(1e6), 1024), 1024, torch.bfloat16, DEVICE)
    batches = []
    for lens in ([(500, 1), (3, 1)], [(499, 1), (9, 1)]):
        step = Step(TorchAttention(16, 8, 128, 16), lens, dtype=torch.bfloat16)
        x = randn(2, 1024, dtype=torch.bfloat16, seed=lens[1][0])
        batches.append((x, step.layer_cache.to(DEVICE), map_tensors(step.batch, lambda t: t.to(DEVICE))))

    def forward(x, cache, batch):
        return layer(x.clone(), *table(batch.positions, x.dtype), cache, batch.metadata)

    expected = [forward(*inputs) for inputs in batches]
    x, cache, batch = batches[0]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(x, cache, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(x, cache, batch)
    for (new_x, new_cache, new_batch), wanted in zip(batches, expected, strict=True):
        x.copy_(new_x)
        cache.copy_(new_cache)
        batch.positions.copy_(new_batch.positions)
        for field in ("slot_mapping", "block_tables", "seq_lens"):
            getattr(batch.metadata, field).copy_(getattr(new_batch.metadata, field))
        graph.replay()
        tolerance = TOLERANCES[torch.bfloat16]
        torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
