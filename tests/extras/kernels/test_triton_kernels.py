"""Triton's kernels against a float64 reference without a cache, blocks, tiles or splits.

Collected only where the kernels can run: on a CUDA device, or under TRITON_INTERPRET=1, which
`test_triton_attention.py` sets for a process that runs this file. Every slot that no token was stored in holds NaN, as
do blocks that nobody owns, the null block, outputs and workspaces before they are written, so that reading one shows.
Block tables are wider than needed; behind its last block a row points at the null block or at somebody else's.
"""

import math
import os
import random
from types import SimpleNamespace

import pytest
import torch

from benchmarks import kernels
from nanovllm.layers.attention import Attention, TorchAttention
from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.execution.input_buffer import map_tensors
from nanovllm_extras.kernels.cuda import triton_attention
from nanovllm_extras.kernels.cuda.flash_backend import FlashAttention
from nanovllm_extras.kernels.cuda.kernel_launch import Launch
from nanovllm_extras.kernels.cuda.triton_attention import TritonAttention
from nanovllm_extras.records.full_sequence import Sequence
from tests.conftest import every_second
from tests.extras.attention_options import OPTIONS
from tests.extras.attention_steps import Step, check_close
from tests.steps import batch_of

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
FP8 = torch.float8_e4m3fn
# the interpreter's product of bfloat16 matrices is wrong
HALF = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALF]
TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def only_on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(IS_INTERPRETED, reason="needs a CUDA device")(test))


@pytest.fixture(autouse=True)
def _poison_new_memory(monkeypatch):
    """torch.empty gives NaN, not zeros by luck."""

    for function in (torch.empty, torch.empty_like):

        def poisoned(*args, function=function, **kwargs):
            new = function(*args, **kwargs)
            return new.fill_(math.nan) if new.is_floating_point() and new.dtype != FP8 else new

        monkeypatch.setattr(torch, function.__name__, poisoned)


# ---- the reference


def attend_exactly(q, k, v, num_new):
    """q: [num_new, num_heads, head_dim], k, v: [seq_len, num_kv_heads, head_dim] of one sequence, in float64"""
    seq_len, num_kv_heads, head_dim = k.shape
    group = q.shape[1] // num_kv_heads
    out = torch.full(q.shape, math.nan, dtype=torch.float64)
    is_visible = torch.arange(seq_len)[None, :] <= torch.arange(seq_len - num_new, seq_len)[:, None]
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k[:, head // group].double().T / math.sqrt(head_dim)
        scores = scores.masked_fill(~is_visible, -math.inf)
        out[:, head] = scores.softmax(1) @ v[:, head // group].double()
    return out


def make_step(backend, lens, dtype=torch.float32, seed=0, is_fused=False):
    """Sequences of `num_computed` tokens in the cache and `num_new` that come: tensors as the kernels get them."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    size, num_kv_heads, head_dim = backend.block_size, backend.num_kv_heads, backend.head_dim
    cache_dtype = backend.kv_cache_dtype or dtype
    k_scale, v_scale = getattr(backend, "k_scale", 1.0), getattr(backend, "v_scale", 1.0)
    num_blocks = [-(-(computed + new) // size) for computed, new in lens]
    ids = list(range(1, sum(num_blocks) + 3))
    rng.shuffle(ids)
    cache = torch.full(backend.kv_cache_shape(1, len(ids) + 1), math.nan)[:, 0].to(cache_dtype)
    tables = torch.zeros(len(lens), max(num_blocks) + 3, dtype=torch.int32)
    qs, ks, vs, expected, slots = [], [], [], [], []
    for i, (computed, new) in enumerate(lens):
        own, ids = ids[: num_blocks[i]], ids[num_blocks[i] :]
        tables[i, : len(own)] = torch.tensor(own, dtype=torch.int32)
        if i % 2:  # what an earlier owner of this row might have left there
            tables[i, len(own) :] = torch.randint(1, cache.shape[1], (tables.shape[1] - len(own),))
        total = computed + new
        q = torch.randn(new, backend.num_heads, head_dim, generator=generator).to(dtype)
        k = torch.randn(total, num_kv_heads, head_dim, generator=generator)
        v = torch.randn(total, num_kv_heads, head_dim, generator=generator) + 0.5
        if cache_dtype == FP8:  # numbers that the cache can hold, so that the reference has the same
            k, v = (k / k_scale).to(FP8).float() * k_scale, (v / v_scale).to(FP8).float() * v_scale
        k, v = k.to(dtype), v.to(dtype)
        where = torch.tensor([own[p // size] * size + p % size for p in range(total)], dtype=torch.int64)
        flat = cache.view(2, -1, num_kv_heads, head_dim)
        flat[0, where[:computed]] = (k[:computed].float() / k_scale).to(cache_dtype)
        flat[1, where[:computed]] = (v[:computed].float() / v_scale).to(cache_dtype)
        qs.append(q)
        ks.append(k[computed:])
        vs.append(v[computed:])
        slots.append(where[computed:])
        expected.append(attend_exactly(q, k, v, new))
    q, k, v = torch.cat(qs), torch.cat(ks), torch.cat(vs)
    if is_fused:  # K and V as they are in the output of the fused projection
        qkv = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1).to(DEVICE)
        q_width, kv_width = backend.num_heads * head_dim, num_kv_heads * head_dim
        k, v = (t.unflatten(1, (-1, head_dim)) for t in qkv[:, q_width:].split(kv_width, dim=1))
        assert not k.is_contiguous()
    new_lens = torch.tensor([new for _, new in lens])
    return SimpleNamespace(
        q=q.to(DEVICE),
        k=k.to(DEVICE),
        v=v.to(DEVICE),
        cache=cache.to(DEVICE),
        slot_mapping=torch.cat(slots).int().to(DEVICE),
        block_tables=tables.to(DEVICE),
        seq_lens=torch.tensor([sum(pair) for pair in lens], dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=torch.cat([torch.zeros(1), new_lens.cumsum(0)]).int().to(DEVICE),
        expected=torch.cat(expected),
    )


def check(out, expected, dtype):
    tolerance = TOLERANCES[dtype]
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)


# ---- store_kv


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 64), (3, 16), (8, 128)])
@pytest.mark.sparse
def test_store_kv_writes_its_slots_and_no_other(num_kv_heads, head_dim, dtype):
    backend = TritonAttention(num_kv_heads * 2, num_kv_heads, head_dim, 16)
    step = make_step(backend, [(5, 3), (17, 1), (0, 16)], dtype, is_fused=True)
    expected = step.cache.clone()
    flat = expected.view(2, -1, num_kv_heads, head_dim)
    flat[0, step.slot_mapping.long()] = step.k
    flat[1, step.slot_mapping.long()] = step.v
    backend.store_kv(step.k, step.v, step.cache, step.slot_mapping)
    torch.testing.assert_close(step.cache, expected, rtol=0, atol=0, equal_nan=True)


def test_store_kv_writes_one_layer_of_many():
    backend = TritonAttention(2, 1, 16, 16)
    cache = torch.full(backend.kv_cache_shape(3, 2), math.nan, device=DEVICE)
    k, v = torch.randn(2, 1, 1, 16, device=DEVICE)
    backend.store_kv(k, v, cache[:, 1], torch.tensor([21], dtype=torch.int32, device=DEVICE))
    assert torch.equal(cache[0, 1, 1, 5], k[0])
    assert torch.equal(cache[1, 1, 1, 5], v[0])
    assert cache.isnan().sum() == cache.numel() - 2 * 16


def test_store_kv_of_nothing():
    backend = TritonAttention(2, 1, 16, 16)
    cache = torch.zeros(backend.kv_cache_shape(1, 1), device=DEVICE)[:, 0]
    empty = torch.zeros(0, 1, 16, device=DEVICE)
    backend.store_kv(empty, empty, cache, torch.zeros(0, dtype=torch.int32, device=DEVICE))
    assert not cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv_in_fp8_scales_and_saturates(dtype):
    backend = TritonAttention(2, 1, 16, 16, kv_cache_dtype="fp8", k_scale=0.5, v_scale=2.0)
    cache = torch.zeros(backend.kv_cache_shape(1, 1), device=DEVICE)[:, 0].to(FP8)
    # all of them on e4m3's grid after scaling, or behind its end: the interpreter rounds otherwise than a GPU
    k = torch.tensor([0, 1, -1.5, 224, -224, 225, 1e4, -1e4, 0.0625, 7, 13, -208, 3, 5, 26, math.inf])
    v = torch.tensor([0, 2, -3, 896, -896, 960, 4e4, -4e4, 0.25, 28, 52, -832, 12, 20, 104, -math.inf])
    tokens = [t.to(dtype).view(1, 1, 16).to(DEVICE) for t in (k, v)]
    backend.store_kv(*tokens, cache, torch.tensor([3], dtype=torch.int32, device=DEVICE))
    stored = cache.float().cpu()[:, 0, 3, 0]
    assert stored[0].tolist() == (k.to(dtype).float() / 0.5).clamp(-448, 448).tolist()
    assert stored[1].tolist() == (v.to(dtype).float() / 2).clamp(-448, 448).tolist()


@only_on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv_in_fp8_rounds_as_torch_does(dtype):
    backend = TritonAttention(16, 8, 128, 16, kv_cache_dtype="fp8", k_scale=0.7, v_scale=1.3)
    cache = torch.zeros(backend.kv_cache_shape(1, 64), device=DEVICE)[:, 0].to(FP8)
    k, v = torch.randn(2, 1024, 8, 128, device=DEVICE).mul(30).to(dtype)
    backend.store_kv(k, v, cache, torch.arange(1024, dtype=torch.int32, device=DEVICE))
    for part, x, scale in zip(cache, (k, v), (0.7, 1.3), strict=True):
        expected = (x.float() * (1 / torch.tensor(scale))).clamp(-448, 448).to(FP8).float()
        is_same = part.view_as(x).float() == expected
        assert is_same.float().mean() > 0.999  # the inverse of the scale may be rounded otherwise


# ---- decode


def run_decode(backend, step, **options):
    out = torch.full_like(step.q, math.nan)
    backend.decode(out, step.q, step.cache, step.block_tables, step.seq_lens, **options)
    return out


@pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim", "block_size", "dtype"),
    [
        (1, 2, 64, 16, torch.float32),
        (2, 2, 128, 16, torch.float16),
        (3, 2, 16, 16, torch.float16),
        (4, 2, 64, 32, torch.float32),
        (8, 1, 128, 256, torch.float16),
        (16, 1, 64, 16, torch.float16),
        (20, 1, 16, 16, torch.float32),
        (2, 3, 32, 64, torch.float32),
        (4, 1, 256, 16, torch.float16),
        (8, 1, 512, 16, torch.float16),  # Gemma 4's largest heads
        *([(4, 2, 128, 16, torch.bfloat16), (8, 2, 64, 256, torch.bfloat16)] if not IS_INTERPRETED else []),
    ],
)
def test_decode_equals_the_reference(group, num_kv_heads, head_dim, block_size, dtype):
    """One to three tiles and blocks, each with a length on a border and one beside it."""
    backend = TritonAttention(group * num_kv_heads, num_kv_heads, head_dim, block_size)
    lens = [1, 15, 16, 17, 63, 64, 65, 100, block_size + 1, 2 * block_size - 1]
    step = make_step(backend, [(n - 1, 1) for n in lens], dtype)
    backend.store_kv(step.k, step.v, step.cache, step.slot_mapping)
    check(run_decode(backend, step), step.expected, dtype)


@pytest.mark.parametrize(
    ("num_splits", "block_size", "at_a_time"), [(2, 16, 16), (3, 16, 2), (5, 256, 2), (17, 16, 2), (17, 16, 16)]
)
def test_decode_in_splits_equals_the_reference(monkeypatch, num_splits, block_size, at_a_time):
    """Tiles of 16 and splits of one tile or more: lengths that fill all splits, a few, one and none."""
    monkeypatch.setattr(triton_attention, "SPLITS_AT_A_TIME", at_a_time)
    backend = TritonAttention(4, 2, 64, block_size)
    lens = [0, 1, 16, 17, 33, 100, 16 * num_splits, 16 * num_splits + 1]
    step = make_step(backend, [(n, 0) for n in lens])
    q = torch.randn(len(lens), 4, 64, generator=torch.Generator().manual_seed(1))
    step.q = q.to(DEVICE)
    out = run_decode(backend, step, launch=Launch(16, 16, 4, 3), splits=(num_splits, 16))
    assert (out[0] == 0).all()  # padding of a CUDA graph
    # the same sequences with the query that make_step did not draw
    single = run_decode(backend, step, splits=(1, 128))
    torch.testing.assert_close(out, single, rtol=5e-6, atol=5e-6)
    check(out[1:], reference_of_cache(backend, step)[1:], torch.float32)


def reference_of_cache(backend, step):
    """The reference for one query a sequence, with K and V read back from the cache slot by slot."""
    out = torch.zeros(step.q.shape, dtype=torch.float64)
    k_cache, v_cache = step.cache.float().cpu()
    for i, seq_len in enumerate(step.seq_lens.tolist()):
        blocks = step.block_tables[i, : -(-seq_len // backend.block_size)].long().cpu()
        k, v = (part[blocks].flatten(0, 1)[:seq_len] for part in (k_cache, v_cache))
        if seq_len:
            out[i] = attend_exactly(step.q[i : i + 1].cpu(), k, v, 1)[0]
    return out


def test_decode_without_any_token_gives_zeros():
    backend = TritonAttention(4, 2, 16, 16)
    step = make_step(backend, [(0, 0), (0, 0)])
    step.q = torch.randn(2, 4, 16, device=DEVICE)
    for splits in [(1, 128), (4, 16)]:
        assert (run_decode(backend, step, launch=Launch(16, 16, 4, 3), splits=splits) == 0).all()


def test_decode_with_scores_far_apart():
    """Weights of 0 and 1, and splits that weigh nothing: the running maximum must not overflow or lose anything."""
    backend = TritonAttention(2, 1, 16, 16)
    step = make_step(backend, [(79, 1), (64, 1)], seed=3)
    backend.store_kv(step.k, step.v, step.cache, step.slot_mapping)
    step.q *= 1000
    for splits in [(1, 128), (5, 16)]:
        out = run_decode(backend, step, launch=Launch(16, 16, 4, 3), splits=splits)
        torch.testing.assert_close(out.cpu().double(), reference_of_cache(backend, step), rtol=1e-3, atol=1e-3)


# ---- prefill


def run_prefill(backend, step, **options):
    out = torch.full_like(step.q, math.nan)
    backend.prefill(out, step.q, step.cache, step.block_tables, step.seq_lens, step.cu_seqlens_q, **options)
    return out


@pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim", "block_size", "dtype", "rows"),
    [
        (1, 2, 64, 16, torch.float32, 16),
        (2, 2, 64, 16, torch.float16, 32),
        (3, 1, 16, 16, torch.float32, 16),
        (4, 2, 128, 32, torch.float16, 64),
        (8, 1, 64, 256, torch.float32, 16),
        (16, 1, 128, 16, torch.float16, 128),
        (8, 1, 512, 16, torch.float16, 32),
        *([(4, 2, 128, 16, torch.bfloat16, 128), (2, 2, 64, 256, torch.bfloat16, 64)] if not IS_INTERPRETED else []),
    ],
)
def test_prefill_equals_the_reference(group, num_kv_heads, head_dim, block_size, dtype, rows):
    """Whole prompts, chunks after cached prefixes, chunks of one token, each around the borders of tiles and blocks."""
    backend = TritonAttention(group * num_kv_heads, num_kv_heads, head_dim, block_size)
    lens = [(0, 17), (block_size, 2), (block_size - 1, 33), (31, 1), (0, 1), (15, 16), (2 * block_size + 3, 5)]
    step = make_step(backend, lens, dtype, is_fused=True)
    backend.store_kv(step.k, step.v, step.cache, step.slot_mapping)
    tile = 64 if block_size == 16 else 16  # several blocks in a tile, or several tiles in a block
    check(run_prefill(backend, step, launch=Launch(rows, tile, 4, 3)), step.expected, dtype)


@pytest.mark.parametrize(("num_splits", "at_a_time"), [(2, 16), (5, 2), pytest.param(17, 16, marks=pytest.mark.slow)])
def test_prefill_in_splits_equals_the_reference(monkeypatch, num_splits, at_a_time):
    """Tiles of 16: contexts that fill all splits, some, one and none; 17 splits are more than are joined at a time."""
    monkeypatch.setattr(triton_attention, "SPLITS_AT_A_TIME", at_a_time)
    backend = TritonAttention(4, 2, 16, 16)
    lens = [(0, 1), (0, 20), (15, 2), (16 * num_splits, 9), (16 * num_splits - 1, 17), (90, 3), (33, 1)]
    step = make_step(backend, lens)
    backend.store_kv(step.k, step.v, step.cache, step.slot_mapping)
    out = run_prefill(backend, step, launch=Launch(16, 16, 4, 3), splits=(num_splits, 16))
    check(out, step.expected, torch.float32)


def test_short_chunks_over_long_contexts_are_split(monkeypatch):
    """By the batch's longest context, which the host knows: the answer is that of one split."""
    backend = TritonAttention(2, 1, 16, 256)
    step = Step(backend, [(1100, 2), (3, 5)], device=DEVICE)
    launched = []
    choose = triton_attention.choose_chunk_splits
    monkeypatch.setattr(triton_attention, "choose_chunk_splits", lambda *a: launched.append(choose(*a)) or launched[-1])
    check_close(step.run(backend), step)
    assert launched == [(2, 512)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_with_its_own_launch_equals_the_reference(dtype):
    backend = TritonAttention(4, 2, 64, 16)
    step = make_step(backend, [(0, 40), (70, 30)], dtype)
    backend.store_kv(step.k, step.v, step.cache, step.slot_mapping)
    check(run_prefill(backend, step), step.expected, dtype)


@pytest.mark.parametrize("options", every_second(OPTIONS.values()), ids=OPTIONS)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.sparse
def test_windows_and_soft_caps_equal_the_reference(monkeypatch, options, block_size):
    """Decodes, also in splits, and chunks; windows begin and end inside a tile, and blocks before are not read."""
    backend = TritonAttention(2, 1, 32, block_size)
    lens = [(100, 1), (5, 1), (33, 1), (0, 70), (90, 40), (60, 3)]
    step = Step(backend, lens, options=options, device=DEVICE)
    out = step.run(backend)
    check_close(out, step)
    rows, metadata = slice(0, 3), step.batch.metadata
    for splits in ((1, 128), (3, 16), (9, 16)):
        parts = torch.empty_like(step.q[rows])
        args = (step.layer_cache, metadata.block_tables[rows], metadata.seq_lens[rows])
        backend.decode(parts, step.q[rows].contiguous(), *args, Launch(16, 16, 4, 3), splits, options)
        torch.testing.assert_close(parts, out[rows], rtol=5e-6, atol=5e-6)
    step_of_chunks = (step.layer_cache, metadata.block_tables[3:], metadata.seq_lens[3:], metadata.prefill_cu_seqlens_q)
    monkeypatch.setattr(triton_attention, "SPLITS_AT_A_TIME", 1)  # some rows see no token of the first
    parts = torch.empty_like(step.q[3:])
    backend.prefill(parts, step.q[3:], *step_of_chunks, 0, Launch(32, 16, 4, 3), (4, 16), options)
    torch.testing.assert_close(parts, out[3:], rtol=5e-6, atol=5e-6)


def test_every_chunk_finds_its_tiles():
    """More chunks than the search looks at in one go, of one to five tokens."""
    backend = TritonAttention(2, 1, 16, 16)
    rng = random.Random(0)
    step = make_step(backend, [(rng.randrange(3), rng.randrange(1, 6)) for _ in range(135)])
    backend.store_kv(step.k, step.v, step.cache, step.slot_mapping)
    check(run_prefill(backend, step, launch=Launch(16, 16, 1, 1)), step.expected, torch.float32)


# ---- the backend


def make_batch(step, lens, block_size):
    chunks = []
    for row, (computed, new) in enumerate(lens):
        seq = Sequence("seq", [0] * (computed + new), SamplingParams())
        seq.num_computed_tokens = computed
        for block_id in step.block_tables[row, : -(-(computed + new) // block_size)].tolist():
            seq.block_table.append(block_id)
        chunks.append((seq, computed, new))
    batch = batch_of(chunks, block_size)
    return map_tensors(batch, lambda tensor: tensor.to(DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize(
    "lens",
    [[(16, 1), (40, 1), (0, 5), (33, 20)], [(0, 1), (255, 1)], [(0, 3), (16, 17)]],
    ids=["mixed", "decodes", "chunks"],
)
def test_batch_equals_the_reference_and_the_torch_backend(lens, block_size, dtype):
    backend = TritonAttention(4, 2, 64, block_size)
    step = make_step(backend, lens, dtype, is_fused=True)
    batch = make_batch(step, lens, block_size)
    assert batch.metadata.slot_mapping.tolist() == step.slot_mapping.tolist()
    out = Attention(backend)(step.q, step.k, step.v, step.cache, batch.metadata)
    check(out, step.expected, dtype)
    same = TorchAttention(4, 2, 64, block_size).attend(step.q, step.cache, batch.metadata)
    torch.testing.assert_close(out, same, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])  # the last is computed in float16
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 256)])
def test_batch_over_an_fp8_cache_equals_the_reference(head_dim, block_size, dtype):
    """With scales that are powers of two, the reference's K and V are the very numbers that the cache holds."""
    backend = TritonAttention(4, 2, head_dim, block_size, kv_cache_dtype="fp8", k_scale=0.5, v_scale=4.0)
    lens = [(16, 1), (100, 1), (0, 5), (33, 20)]
    step = make_step(backend, lens, dtype, is_fused=True)
    batch = make_batch(step, lens, block_size)
    if IS_INTERPRETED:  # which rounds otherwise, and so is given what it has not to round
        flat = step.cache.view(torch.uint8).view(2, -1, 2, head_dim)
        for part, x, scale in zip(flat, (step.k, step.v), (0.5, 4.0), strict=True):
            part[step.slot_mapping.long()] = (x.float() / scale).to(FP8).view(torch.uint8)
        out = backend.attend(step.q, step.cache, batch.metadata)
    else:
        out = Attention(backend)(step.q, step.k, step.v, step.cache, batch.metadata)
    check(out, step.expected, dtype)


@pytest.mark.parametrize("splits", [(1, 128), (4, 16)])
def test_decode_over_an_fp8_cache_in_splits(splits):
    backend = TritonAttention(4, 2, 64, 16, kv_cache_dtype="fp8", k_scale=0.5, v_scale=4.0)
    step = make_step(backend, [(60, 0), (17, 0), (0, 0)])
    step.q = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    out = run_decode(backend, step, launch=Launch(16, 16, 4, 3), splits=splits)
    step.cache = step.cache.float()
    step.cache *= torch.tensor([0.5, 4.0], device=DEVICE)[:, None, None, None, None]
    check(out, reference_of_cache(backend, step), torch.float32)


def test_the_poison_shows():
    """With one token of the past missing, the outputs that see it are NaN, and no others."""
    backend = TritonAttention(4, 2, 16, 16)
    lens = [(9, 1), (20, 1), (0, 12)]
    step = make_step(backend, lens)
    batch = make_batch(step, lens, 16)
    step.cache[:, step.block_tables[0, 0].item(), 3] = math.nan
    out = Attention(backend)(step.q, step.k, step.v, step.cache, batch.metadata)
    assert out[0].isnan().all()
    assert not out[1:].isnan().any()


# ---- the engine


def greedy(folder, prompts, **options):
    """With PyTorch's layers around attention; test_layer_kernels.py has the others."""
    options |= {"dtype": "float32", "enforce_eager": True}
    llm = LLM(folder, device=DEVICE.type, block_size=16, num_kv_blocks=24, **options)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], llm


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, 2])
def test_engine_gives_the_same_tokens_as_with_the_torch_backend(checkpoints, num_layers):
    folder, _ = checkpoints.make(num_hidden_layers=num_layers, head_dim=16)
    rng = random.Random(0)
    shared = [rng.randrange(300) for _ in range(20)]
    prompts = [[rng.randrange(300) for _ in range(n)] for n in (3, 16, 37)]
    prompts += [[*shared, 5, 6], [*shared, 7]]
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 4}  # chunks, mixed steps, prefix hits
    expected, _ = greedy(folder, prompts, attention_backend="torch", **options)
    tokens, llm = greedy(folder, prompts, attention_backend="triton", **options)
    assert type(llm.engine.runner.backend) is TritonAttention
    assert llm.get_stats().prefix_cache_hit_tokens > 0
    assert tokens == expected


@pytest.mark.slow
def test_engine_with_an_fp8_cache(checkpoints):
    """Half or a quarter of the memory; swapping and copying blocks included."""
    folder, _ = checkpoints.make(num_hidden_layers=1, head_dim=16)
    prompts = [[1, 2, 3] * 9, [4, 5] * 9]
    sizes = {}
    for kv_cache_dtype, served in (("auto", []), ("fp8", prompts)):
        _, llm = greedy(
            folder,
            served,
            attention_backend="triton",
            kv_cache_dtype=kv_cache_dtype,
            preemption_mode="swap",
            swap_space_bytes=1 << 20,
        )
        sizes[kv_cache_dtype] = llm.engine.runner.kv_cache.bytes_per_block
        assert llm.engine.runner.kv_cache.tensor.dtype == (FP8 if kv_cache_dtype == "fp8" else torch.float32)
    llm.generate(prompts[0], SamplingParams(n=3, max_tokens=4, temperature=1.0, ignore_eos=True), use_tqdm=False)
    assert sizes["auto"] == 4 * sizes["fp8"]


# ---- the benchmark


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_benchmark_checks_and_measures(monkeypatch, kv_cache_dtype):
    """Its own code, on what the interpreter can bear; the figures mean nothing here."""

    def call_once(function):
        function()
        return 1.0

    backend = TritonAttention(4, 2, 16, 16, kv_cache_dtype=kv_cache_dtype)
    args = SimpleNamespace(dtype=torch.float16, batch=[2], context=[40])
    for name, value in {
        "DEVICE": DEVICE.type,
        "PREFILLS": {"tiny": [(17, 3), (2, 0)]},
        "STORES": [3] if kv_cache_dtype == "auto" else [],  # the interpreter rounds otherwise
        "SWEPT_DECODES": [(1, 20)] if kv_cache_dtype == "auto" else [],
        "SWEPT_PREFILLS": [],
        "seconds": call_once,
    }.items():
        monkeypatch.setattr(kernels, name, value)
    (decode,) = kernels.measure_decode(backend, args, bandwidth=1e6)
    assert decode["of copy"] == f"{2 * 2 * 40 * 2 * 16 * (1 if kv_cache_dtype == 'fp8' else 2) / 1e6:.0%}"
    assert len(list(kernels.measure_prefill(backend, args))) == 1
    assert len(list(kernels.measure_store(backend, args))) == len(kernels.STORES)
    swept = list(kernels.sweep(backend, args))
    assert sum(row[""] == "chosen" for row in swept) == len(kernels.SWEPT_DECODES)


# ---- on a GPU: real sizes, other backends, graphs


def fill(backend, lens, dtype, seed=0):
    """As make_step, made on the GPU, without a reference."""
    torch.manual_seed(seed)
    size = backend.block_size
    num_blocks = [-(-sum(pair) // size) for pair in lens]
    ids = torch.randperm(sum(num_blocks), device=DEVICE, dtype=torch.int32) + 1
    tables = torch.zeros(len(lens), max(num_blocks), dtype=torch.int32, device=DEVICE)
    for row, part in enumerate(ids.split(num_blocks)):
        tables[row, : len(part)] = part
    cache = torch.randn(backend.kv_cache_shape(1, len(ids) + 1), device=DEVICE)[:, 0].to(dtype)
    new = torch.tensor([n for _, n in lens])
    return SimpleNamespace(
        q=torch.randn(sum(n for _, n in lens), backend.num_heads, backend.head_dim, device=DEVICE).to(dtype),
        cache=cache,
        block_tables=tables,
        seq_lens=torch.tensor([sum(pair) for pair in lens], dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=torch.cat([torch.zeros(1), new.cumsum(0)]).int().to(DEVICE),
    )


def check_rows(out, expected, dtype):
    """Over a long context outputs are small, so each is judged by its own length."""
    errors = (out.double().cpu() - expected.double().cpu()).norm(dim=-1)  # [num_tokens, num_heads]
    assert (errors <= TOLERANCES[dtype] * expected.double().cpu().norm(dim=-1)).all(), errors.max()


LONG = {
    "one of 32k": [(32767, 1)],
    "one long among short ones": [(n, 1) for n in (32000, 5, 100, 1023, 1024, 1025, 16)],
    "256 decodes": [(37 * i % 2000, 1) for i in range(256)],
    "a prompt of 8k": [(0, 8192)],
    "mixed, chunks after 32k and after nothing": [(4000, 1), (8191, 1), (32000, 777), (0, 300), (255, 2)],
}


@only_on_gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (32, 4, 64), (16, 1, 128)])
@pytest.mark.parametrize("lens", LONG.values(), ids=LONG)
@pytest.mark.sparse  # each is a compilation of its own
def test_real_sizes_equal_the_other_backends(lens, num_heads, num_kv_heads, head_dim, block_size, dtype):
    backend = TritonAttention(num_heads, num_kv_heads, head_dim, block_size)
    step = fill(backend, lens, dtype)
    batch = make_batch(step, lens, block_size)
    out = backend.attend(step.q, step.cache, batch.metadata)
    same = TorchAttention(num_heads, num_kv_heads, head_dim, block_size).attend(step.q, step.cache, batch.metadata)
    check_rows(out, same, dtype)
    if FlashAttention.why_not(DEVICE, dtype, head_dim, block_size) is None:
        flash = FlashAttention(num_heads, num_kv_heads, head_dim, block_size).attend(step.q, step.cache, batch.metadata)
        check_rows(out, flash, dtype)


@only_on_gpu
@pytest.mark.parametrize("num_seqs", [1, 4, 64])
def test_a_graph_is_right_for_every_length(num_seqs):
    """Recorded with one set of lengths, replayed with others; rows of padding have length 0."""
    backend = TritonAttention(16, 8, 128, 16)
    step = fill(backend, [(4095, 1)] * num_seqs, torch.bfloat16)
    out = torch.empty_like(step.q)
    backend.decode(out, step.q, step.cache, step.block_tables, step.seq_lens)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.decode(out, step.q, step.cache, step.block_tables, step.seq_lens)
    for seed in range(3):
        torch.manual_seed(seed)
        step.seq_lens.copy_(torch.randint(0, 4097, (num_seqs,)))
        step.seq_lens[-1] = [0, 1, 4096][seed]
        graph.replay()
        check_rows(out, reference_of_cache(backend, step), torch.bfloat16)


@only_on_gpu
def test_the_same_batch_gives_the_same_bits():
    backend = TritonAttention(16, 8, 128, 16)
    step = fill(backend, [(3000, 1), (100, 1)], torch.bfloat16)
    assert torch.equal(run_decode(backend, step), run_decode(backend, step))
