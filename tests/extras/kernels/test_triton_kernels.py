"""Triton's attention against a float64 reference without a cache, blocks, tiles or splits.

Every slot that no token was stored in holds NaN, as do blocks that nobody owns and the null block, so that reading one
shows (`attention_steps.py`, `on_device.py`).
"""

import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks import kernels
from nanovllm.layers.attention import TorchAttention
from nanovllm_extras import SamplingParams
from nanovllm_extras.kernels.cuda import triton_attention
from nanovllm_extras.kernels.cuda.flash_backend import FlashAttention
from nanovllm_extras.kernels.cuda.kernel_launch import Launch
from nanovllm_extras.kernels.cuda.triton_attention import TritonAttention
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_testing.attention_steps import on_device
from nanovllm_testing.steps import batch_of
from tests.conftest import every_second
from tests.extras.attention_options import OPTIONS
from tests.extras.attention_steps import Step
from tests.extras.kernels.on_device import DEVICE, DTYPES, FP8, HALF, IS_INTERPRETED, every_second_case, only_on_gpu

TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SMALL = Launch(16, 16, 4, 3)  # tiles of 16 tokens

pytestmark = [] if IS_INTERPRETED else pytest.mark.gpu


def check(out, step):
    tolerance = TOLERANCES[out.dtype]
    assert out.dtype == step.q.dtype
    torch.testing.assert_close(out.cpu().double(), step.expected, rtol=tolerance, atol=tolerance)


# ---- store_kv


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 64), (3, 16), (8, 128)])
@pytest.mark.sparse
def test_store_kv_writes_its_slots_and_no_other(num_kv_heads, head_dim, dtype):
    """Of one layer of three, from K and V as they are in the output of the fused projection."""
    backend = TritonAttention(num_kv_heads * 2, num_kv_heads, head_dim, 16)
    cache = torch.full(backend.kv_cache_shape(3, 9), math.nan, dtype=dtype, device=DEVICE)
    slots = torch.tensor([21, 37, 22, 80, 143], dtype=torch.int32, device=DEVICE)
    qkv = torch.randn(5, 4 * num_kv_heads * head_dim, device=DEVICE).to(dtype)
    k, v = (t.unflatten(1, (-1, head_dim)) for t in qkv[:, 2 * num_kv_heads * head_dim :].chunk(2, dim=1))
    expected = cache.clone()
    for part, new in zip(expected[:, 1], (k, v), strict=True):
        part.flatten(0, 1)[slots.long()] = new
    backend.store_kv(k[:0], v[:0], cache[:, 1], slots[:0])
    backend.store_kv(k, v, cache[:, 1], slots)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


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
    """All sequences have one new token."""
    metadata, out = step.batch.metadata, torch.full_like(step.q, math.nan)
    backend.store_kv(step.k, step.v, step.layer_cache, metadata.slot_mapping)
    backend.decode(out, step.q, step.layer_cache, metadata.block_tables, metadata.seq_lens, **options)
    return out


DECODES = [  # group, num_kv_heads, head_dim, block_size, dtype
    (3, 2, 16, 16, torch.float16),
    (1, 2, 64, 16, torch.float32),
    (20, 1, 16, 16, torch.float32),
    (4, 2, 64, 32, torch.float32),
    *([(4, 2, 128, 16, torch.bfloat16), (8, 2, 64, 256, torch.bfloat16)] if not IS_INTERPRETED else []),
    (2, 3, 32, 64, torch.float32),
    (8, 1, 128, 256, torch.float16),
]


@pytest.mark.parametrize(("group", "num_kv_heads", "head_dim", "block_size", "dtype"), every_second_case(DECODES))
def test_decode_equals_the_reference(group, num_kv_heads, head_dim, block_size, dtype):
    """One to three tiles and blocks, each with a length on a border and one beside it."""
    backend = TritonAttention(group * num_kv_heads, num_kv_heads, head_dim, block_size)
    lens = [1, 15, 16, 17, 63, 64, 65, 100, block_size + 1, 2 * block_size - 1]
    step = Step(backend, [(n - 1, 1) for n in lens], dtype=dtype, device=DEVICE)
    check(run_decode(backend, step), step)


@pytest.mark.parametrize(("num_splits", "block_size", "at_a_time"), every_second_case([(3, 16, 2), (5, 256, 2)]))
def test_decode_in_splits_equals_the_reference(monkeypatch, num_splits, block_size, at_a_time):
    """Tiles of 16 and splits of one tile or more: lengths that fill all splits, a few, one and none."""
    monkeypatch.setattr(triton_attention, "SPLITS_AT_A_TIME", at_a_time)
    backend = TritonAttention(4, 2, 64, block_size)
    lens = [1, 16, 17, 33, 100, 16 * num_splits, 16 * num_splits + 1]
    step = Step(backend, [(n - 1, 1) for n in lens], device=DEVICE)
    check(run_decode(backend, step, launch=SMALL, splits=(num_splits, 16)), step)
    step.batch.metadata.seq_lens[2:4] = 0  # padding of a CUDA graph
    step.expected[2:4] = 0
    for splits in ((num_splits, 16), (1, 128)):
        check(run_decode(backend, step, launch=SMALL, splits=splits), step)


def test_decode_with_scores_far_apart():
    """Weights of 0 and 1, and splits that weigh nothing: the running maximum must not overflow or lose anything."""
    backend = TritonAttention(2, 1, 16, 16)
    step = Step(backend, [(79, 1), (64, 1)], seed=3, device=DEVICE)
    step.q *= 1000
    same = step.run(TorchAttention(2, 1, 16, 16))
    for splits in [(1, 128), (5, 16)]:
        torch.testing.assert_close(run_decode(backend, step, launch=SMALL, splits=splits), same, rtol=1e-3, atol=1e-3)


# ---- prefill


def run_prefill(backend, step, **options):
    """All sequences are chunks, also those of one token."""
    metadata, out = step.batch.metadata, torch.full_like(step.q, math.nan)
    backend.store_kv(step.k, step.v, step.layer_cache, metadata.slot_mapping)
    rows = metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q
    backend.prefill(out, step.q, step.layer_cache, *rows, **options)
    return out


PREFILLS = [  # group, num_kv_heads, head_dim, block_size, dtype, rows
    (3, 1, 16, 16, torch.float32, 16),
    (8, 1, 64, 256, torch.float32, 16),
    (4, 2, 128, 32, torch.float16, 64),
    (16, 1, 128, 16, torch.float16, 128),
    (1, 2, 64, 16, torch.float32, 16),
    (8, 1, 512, 16, torch.float16, 32),
    *([(4, 2, 128, 16, torch.bfloat16, 128), (2, 2, 64, 256, torch.bfloat16, 64)] if not IS_INTERPRETED else []),
]


@pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim", "block_size", "dtype", "rows"), every_second_case(PREFILLS)
)
def test_prefill_equals_the_reference(group, num_kv_heads, head_dim, block_size, dtype, rows):
    """Whole prompts, chunks after cached prefixes, chunks of one token, each around the borders of tiles and blocks."""
    backend = TritonAttention(group * num_kv_heads, num_kv_heads, head_dim, block_size)
    lens = [(0, 17), (block_size, 2), (block_size - 1, 33), (31, 1), (0, 1), (15, 16), (2 * block_size + 3, 5)]
    step = Step(backend, lens, dtype=dtype, device=DEVICE)
    tile = 64 if block_size == 16 else 16  # several blocks in a tile, or several tiles in a block
    check(run_prefill(backend, step, launch=Launch(rows, tile, 4, 3)), step)


@pytest.mark.parametrize(("num_splits", "at_a_time"), every_second_case([(5, 2), (17, 16)]))
def test_prefill_in_splits_equals_the_reference(monkeypatch, num_splits, at_a_time):
    """Tiles of 16: contexts that fill all splits, some, one and none; 17 splits are more than are joined at a time."""
    monkeypatch.setattr(triton_attention, "SPLITS_AT_A_TIME", at_a_time)
    backend = TritonAttention(4, 2, 16, 16)
    lens = [(0, 1), (0, 20), (15, 2), (16 * num_splits, 9), (16 * num_splits - 1, 17), (90, 3), (33, 1)]
    step = Step(backend, lens, device=DEVICE)
    check(run_prefill(backend, step, launch=SMALL, splits=(num_splits, 16)), step)


@pytest.mark.slow
def test_short_chunks_over_long_contexts_are_split(monkeypatch):
    """By the batch's longest context, which the host knows: the answer is that of one split."""
    backend = TritonAttention(2, 1, 16, 256)
    step = Step(backend, [(1100, 2), (3, 5)], device=DEVICE)
    launched = []
    choose = triton_attention.choose_chunk_splits
    monkeypatch.setattr(triton_attention, "choose_chunk_splits", lambda *a: launched.append(choose(*a)) or launched[-1])
    check(step.run(backend), step)
    assert launched == [(2, 512)]


@pytest.mark.slow
def test_every_chunk_finds_its_tiles():
    """More chunks than the search looks at in one go, of one to five tokens."""
    backend = TritonAttention(2, 1, 16, 16)
    step = Step(backend, [(i % 3, 1 + 7 * i % 5) for i in range(135)], device=DEVICE)
    check(run_prefill(backend, step, launch=Launch(16, 16, 1, 1)), step)


# ---- the backend


@pytest.mark.parametrize("options", every_second(OPTIONS.values()), ids=OPTIONS)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.sparse
def test_windows_and_soft_caps_equal_the_reference(monkeypatch, options, block_size):
    """Decodes, also in splits, and chunks; windows begin and end inside a tile, and blocks before are not read."""
    backend = TritonAttention(2, 1, 32, block_size)
    lens = [(100, 1), (5, 1), (33, 1), (0, 70), (90, 40), (60, 3)]
    step = Step(backend, lens, options=options, device=DEVICE)
    out = step.run(backend)
    check(out, step)
    rows, metadata = slice(0, 3), step.batch.metadata
    for splits in ((1, 128), (3, 16), (9, 16)):
        parts = torch.empty_like(step.q[rows])
        args = (step.layer_cache, metadata.block_tables[rows], metadata.seq_lens[rows])
        backend.decode(parts, step.q[rows].contiguous(), *args, SMALL, splits, options)
        torch.testing.assert_close(parts, out[rows], rtol=5e-6, atol=5e-6)
    step_of_chunks = (step.layer_cache, metadata.block_tables[3:], metadata.seq_lens[3:], metadata.prefill_cu_seqlens_q)
    monkeypatch.setattr(triton_attention, "SPLITS_AT_A_TIME", 1)  # some rows see no token of the first
    parts = torch.empty_like(step.q[3:])
    backend.prefill(parts, step.q[3:], *step_of_chunks, 0, Launch(32, 16, 4, 3), (4, 16), options)
    torch.testing.assert_close(parts, out[3:], rtol=5e-6, atol=5e-6)


BATCHES = {
    "mixed": ([(16, 1), (40, 1), (0, 5), (33, 20)], 256, torch.float16),
    "decodes": ([(0, 1), (255, 1)], 16, torch.float32),
    "chunks": ([(0, 3), (16, 17)], 16, HALF[-1]),
}


@pytest.mark.parametrize(("lens", "block_size", "dtype"), every_second_case(BATCHES.values()), ids=BATCHES)
def test_batch_equals_the_reference(lens, block_size, dtype):
    backend = TritonAttention(4, 2, 64, block_size)
    step = Step(backend, lens, dtype=dtype, device=DEVICE)
    check(step.run(backend), step)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "splits"),  # bfloat16 is computed in float16
    every_second_case([(64, 16, torch.float32, (4, 16)), (128, 256, torch.bfloat16, (1, 128))]),
)
def test_an_fp8_cache_is_read_as_what_it_means(head_dim, block_size, dtype, splits):
    """With scales that are powers of two, another backend may have the very numbers that the cache holds."""
    plain = TritonAttention(4, 2, head_dim, block_size)
    backend = TritonAttention(4, 2, head_dim, block_size, kv_cache_dtype="fp8", k_scale=0.5, v_scale=4.0)
    step = Step(plain, [(16, 1), (100, 1), (0, 5), (33, 20)], device=DEVICE)
    step.run(plain)
    scales = torch.tensor([0.5, 4.0], device=DEVICE)[:, None, None, None, None]
    cache, q = (step.layer_cache / scales).to(FP8), step.q.to(dtype)
    exact = plain.attend(q.float(), cache.float() * scales, step.batch.metadata)
    tolerance = TOLERANCES[dtype]
    out = backend.attend(q, cache, step.batch.metadata)
    torch.testing.assert_close(out.float(), exact, rtol=tolerance, atol=tolerance)
    tables, lens, parts = (
        step.batch.metadata.block_tables[:2],
        step.batch.metadata.seq_lens[:2],
        torch.empty_like(q[:2]),
    )
    backend.decode(parts, q[:2].contiguous(), cache, tables, lens, SMALL, splits)
    torch.testing.assert_close(parts.float(), exact[:2], rtol=tolerance, atol=tolerance)


# ---- the benchmark


@pytest.mark.slow
def test_benchmark_checks_and_measures(monkeypatch):
    """Its own code, on what the interpreter can bear; the figures mean nothing here."""

    def call_once(function):
        function()
        return 1.0

    backend = TritonAttention(4, 2, 16, 16)
    args = SimpleNamespace(dtype=torch.float16, batch=[2], context=[40])
    for name, value in {
        "DEVICE": DEVICE.type,
        "PREFILLS": {"tiny": [(17, 3), (2, 0)]},
        "STORES": [3],
        "SWEPT_DECODES": [(1, 20)],
        "SWEPT_PREFILLS": [],
        "seconds": call_once,
    }.items():
        monkeypatch.setattr(kernels, name, value)
    (decode,) = kernels.measure_decode(backend, args, bandwidth=1e6)
    assert decode["of copy"] == f"{2 * 2 * 40 * 2 * 16 * 2 / 1e6:.0%}"
    assert len(list(kernels.measure_prefill(backend, args))) == 1
    assert len(list(kernels.measure_store(backend, args))) == 1
    assert sum(row[""] == "chosen" for row in kernels.sweep(backend, args)) == 1


# ---- on a GPU: real sizes, other backends, graphs


def fill(backend, lens, dtype, seed=0):
    """Return Q, a cache and the metadata of a step, made on the GPU without a reference."""
    torch.manual_seed(seed)
    size, chunks = backend.block_size, []
    num_blocks = [-(-sum(pair) // size) for pair in lens]
    ids = (torch.randperm(sum(num_blocks)) + 1).split(num_blocks)
    for (computed, new), table in zip(lens, ids, strict=True):
        seq = Sequence("seq", [0] * (computed + new), SamplingParams())
        seq.num_computed_tokens = computed
        for block_id in table.tolist():
            seq.block_table.append(block_id)
        chunks.append((seq, computed, new))
    return SimpleNamespace(
        q=torch.randn(sum(n for _, n in lens), backend.num_heads, backend.head_dim, device=DEVICE).to(dtype),
        cache=torch.randn(backend.kv_cache_shape(1, sum(num_blocks) + 1), device=DEVICE)[:, 0].to(dtype),
        metadata=on_device(batch_of(chunks, size), DEVICE).metadata,
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
@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 4, 64), (16, 1, 128)], ids=str)
@pytest.mark.parametrize("lens", LONG.values(), ids=LONG)
@pytest.mark.sparse  # each is a compilation of its own
def test_real_sizes_equal_the_other_backends(lens, heads, block_size, dtype):
    backend = TritonAttention(*heads, block_size)
    step = fill(backend, lens, dtype)
    given = (step.q, step.cache, step.metadata)
    out = backend.attend(*given)
    check_rows(out, TorchAttention(*heads, block_size).attend(*given), dtype)
    if FlashAttention.why_not(DEVICE, dtype, heads[2], block_size) is None:
        check_rows(out, FlashAttention(*heads, block_size).attend(*given), dtype)


@only_on_gpu
@pytest.mark.parametrize("num_seqs", [1, 4, 64])
def test_a_graph_is_right_for_every_length(num_seqs):
    """Recorded with one set of lengths, replayed with others; rows of padding have length 0. And with the same bits."""
    backend = TritonAttention(16, 8, 128, 16)
    step = fill(backend, [(4095, 1)] * num_seqs, torch.bfloat16)
    out, lens = torch.empty_like(step.q), step.metadata.seq_lens
    given = (out, step.q, step.cache, step.metadata.block_tables, lens)
    backend.decode(*given)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.decode(*given)
    for seed in range(3):
        torch.manual_seed(seed)
        lens.copy_(torch.randint(1, 4097, (num_seqs,)))
        lens[-1] = [0, 1, 4096][seed]
        graph.replay()
        is_read = lens > 0
        assert not out[~is_read].any()
        same = TorchAttention(16, 8, 128, 16).attend(step.q, step.cache, step.metadata)
        check_rows(out[is_read], same[is_read], torch.bfloat16)
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first)
