"""Attention in C over each of its caches: against float64 loops, with NaN in each slot without a token, and itself.

A cache keeps K and V as they are, in 8 bits, or as latents. `test_cpu_int8_kv.py` and `test_cpu_latents.py` have what
only one of them does.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from nanovllm.models.qwen3 import Qwen3DecoderLayer
from nanovllm_extras import SamplingParams
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.kernels.cpu.cpu_decoder_layer import CpuDecoderLayer, fuse_layers
from nanovllm_extras.kernels.cpu.cpu_latent_attention import CpuLatentAttention
from nanovllm_extras.kernels.cpu.cpu_layers import replace_layers
from nanovllm_extras.models.masking import PLAIN, AttentionOptions
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_testing.steps import batch_of
from tests.extras.attention_options import OPTIONS, SINKS
from tests.extras.attention_steps import Int8Step, LatentStep, Step, random_lens, shared_step
from tests.extras.kernels.processors import DISTINCT, OF_K_AND_V, in_sweeps, pretend
from tests.extras.kernels.test_cpu_kernels import check_same_outputs, filled

pytestmark = pytest.mark.usefixtures("needs_a_compiler")


class Cache(NamedTuple):
    make: Any  # num_heads, num_kv_heads, head_dim, block_size, dtype -> backend
    step: type
    processors: list
    tolerance: float  # in float32
    shapes: list  # num_heads, num_kv_heads, head_dim, block_size


def make_latent_attention(num_heads, num_kv_heads, head_dim, block_size, dtype):
    """Latents are most of what is kept; a key that is rotated is the rest."""
    rank = {48: 32, 96: 64, 64: 40, 32: 16}[head_dim]
    return CpuLatentAttention(num_heads, num_kv_heads, head_dim, block_size, dtype, rank=rank)


SHAPES = [(40, 2, 64, 80), (32, 2, 32, 32), (8, 1, 64, 16), (8, 2, 96, 80), (4, 2, 64, 32), (4, 4, 32, 16)]
LATENT_SHAPES = [(33, 1, 32, 48), (20, 1, 64, 16), (16, 1, 96, 48), (4, 1, 48, 16)]
CACHES = {
    "plain": Cache(CpuAttention, Step, DISTINCT, 2e-6, SHAPES),
    # queries and weights are rounded to 16 bits besides
    "int8": Cache(partial(CpuAttention, kv_cache_dtype="int8"), Int8Step, OF_K_AND_V, 3e-4, SHAPES),
    "latents": Cache(make_latent_attention, LatentStep, DISTINCT, 2e-6, LATENT_SHAPES),
}
KINDS = {**OPTIONS, **SINKS}
BATCHES = [
    [(0, 1)],
    [(15, 1), (16, 1), (17, 1), (31, 1), (32, 1)],
    [(0, 15), (0, 16), (0, 17), (0, 2)],
    [(5, 4), (16, 16), (32, 2), (1, 60)],
    [(300, 1), (1000, 1), (127, 1), (0, 257), (129, 20)],
    [(3000, 1), (2500, 6)],  # not in the L2 cache
]


def on_each_processor(*names):
    params = [param for name in names for param in in_sweeps(CACHES[name].processors, name)]
    return pytest.mark.parametrize(("cache", "processor"), params, indirect=True)


@pytest.fixture
def cache(request):
    return CACHES[request.param]


@pytest.fixture
def processor(request, monkeypatch):
    with pretend(monkeypatch, request.param):
        yield


def check(cache, out, step):
    tolerance = cache.tolerance if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), step.expected, rtol=tolerance, atol=tolerance)


@on_each_processor(*CACHES)
def test_batches_equal_the_reference(cache, processor, dtype):
    for i, lens in enumerate([*BATCHES, *(random_lens(16, seed) for seed in range(2))]):
        backend = cache.make(*cache.shapes[i % len(cache.shapes)], dtype)
        step = cache.step(backend, lens, seed=i, dtype=dtype)
        check(cache, step.run(backend), step)


@on_each_processor("plain", "int8")
def test_windows_soft_caps_and_sinks_equal_the_reference(cache, processor, dtype):
    """Blocks that no token's window reaches hold NaN in the null block's place: they are not read."""
    for i, options in enumerate(KINDS.values()):
        backend = cache.make(4, 2, 64, [16, 32, 80][i % 3], dtype)
        lens = [(100, 1), (5, 1), (33, 1), (0, 70), (90, 40), (60, 3)]
        step = cache.step(backend, lens, dtype=dtype, options=options)
        check(cache, step.run(backend), step)


def tokens_of_one(step, start, stop, block_size):
    """Return a batch of some tokens of the step's first sequence, whose others are in the cache."""
    seq = Sequence("seq", [0] * stop, SamplingParams())
    for block_id in step.batch.metadata.block_tables[0].tolist():
        seq.block_table.append(block_id)
    return batch_of([(seq, start, stop - start)], block_size).metadata


@on_each_processor(*CACHES)
def test_a_token_has_the_same_bits_as_decode_and_as_part_of_a_prompt(cache, processor, dtype):
    for i, options in enumerate([None, *KINDS.values()]):
        num_heads, num_kv_heads, head_dim, block_size = cache.shapes[-1 - i % 2]
        backend = cache.make(num_heads, num_kv_heads, head_dim, block_size, dtype)
        asked = {} if options is None else {"options": options}
        whole = cache.step(backend, [(0, 77 if i else 277)], dtype=dtype, **asked)
        rows = whole.run(backend)
        for start, stop in ((len(rows) - 1, len(rows)), (50, 77), (33, 40)):
            metadata = tokens_of_one(whole, start, stop, block_size)
            part = backend.attend(whole.q[start:stop], whole.layer_cache, metadata, *whole.options)
            assert torch.equal(part, rows[start:stop])
        if cache.step is LatentStep:
            return  # they have no options


@pytest.mark.parametrize("cache", CACHES, indirect=True)
def test_the_cache_of_other_tokens_is_left_alone(cache, dtype):
    backend = cache.make(*cache.shapes[-1], dtype)
    step = cache.step(backend, random_lens(16, 3), dtype=dtype)
    before = step.cache.clone()
    step.run(backend)
    bytes_before, bytes_after = before.view(torch.uint8), step.cache.view(torch.uint8)
    changed = (bytes_before != bytes_after).unflatten(-1, (-1, before.element_size())).any(-1)  # as the cache
    assert not changed[:, 0].any(), "another layer"
    blocks = {slot // backend.block_size for slot in step.batch.metadata.slot_mapping.tolist()}
    for part in changed[:, 1]:
        assert set(part.flatten(1).any(1).nonzero()[:, 0].tolist()) == blocks
        assert part.sum() <= step.k[..., 0].numel() * before.shape[-1], "no more than is stored"


def test_large_scores_do_not_overflow(dtype):
    backend = CpuAttention(2, 1, 32, 16, dtype)
    step = Step(backend, [(40, 1), (0, 33)], dtype=dtype)
    step.q, step.k = step.q * 100, step.k * 100
    assert step.run(backend).isfinite().all()


def test_block_that_is_filled_in_this_step_can_be_shared():
    out, expected = shared_step(CpuAttention(4, 2, 32, 16))
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)


# ---- sequences that begin with the same blocks: these are read once for all


def begin_alike(step, families, block_size):
    """Let sequences first … last - 1 of each family take the first one's first blocks, counted as if of 16 tokens."""
    tables = step.batch.metadata.block_tables
    for first, last, num_blocks in families:
        shared = num_blocks * 16 // block_size
        tables[first:last, :shared] = tables[first, :shared].clone()


def run_alone(backend, step, seq, options):
    """What the tokens of one sequence get in a batch of their own."""
    whole = step.batch.metadata
    start, stop = whole.cu_seqlens_q[seq].item(), whole.cu_seqlens_q[seq + 1].item()
    metadata = dataclasses.replace(
        whole,
        block_tables=whole.block_tables[seq : seq + 1].contiguous(),
        seq_lens=whole.seq_lens[seq : seq + 1].contiguous(),
        cu_seqlens_q=torch.tensor([0, stop - start], dtype=torch.int32),
    )
    return backend.attend(step.q[start:stop], step.layer_cache, metadata, options)


# Decodes and short chunks: more rows than a tile has, many lengths, some that end with the blocks they share.
SHARING_LENS = [(70, 1), (64, 1), (65, 1), (200, 1), (90, 1), (96, 1), (66, 1), (67, 1),
                *[(68 + i, 1) for i in range(20)], (64, 2), (100, 3), (80, 5), (70, 40)]  # fmt: skip
EIGHT_SINKS = AttentionOptions(has_sinks=True, sinks=torch.linspace(-2, 4, 8))
FAMILIES = {
    "all": [(0, 32, 4)],
    "families": [(0, 3, 4), (3, 5, 6), (5, 7, 2), (7, 20, 1), (28, 31, 3)],
    "in families": [(0, 32, 1), (3, 5, 4), (8, 16, 3), (20, 22, 4)],
}


@on_each_processor("plain", "int8")
def test_sequences_that_share_blocks_have_the_bits_of_each_alone(cache, processor, dtype):
    for num_kv_heads, block_size, kinds in (
        (4, 16, [PLAIN, OPTIONS["wide window"], EIGHT_SINKS]),
        (1, 16, [OPTIONS["soft-cap"], PLAIN, OPTIONS["wide window"]]),
        (2, 32, [EIGHT_SINKS, OPTIONS["soft-cap"], PLAIN]),
    ):
        backend = cache.make(8, num_kv_heads, 64, block_size, dtype)
        step = cache.step(backend, SHARING_LENS, dtype=dtype)
        step.run(backend)  # stores what is new
        tables = step.batch.metadata.block_tables.clone()
        for families, options in zip(FAMILIES.values(), kinds, strict=True):
            step.batch.metadata.block_tables.copy_(tables)
            begin_alike(step, families, block_size)
            together = backend.attend(step.q, step.layer_cache, step.batch.metadata, options)
            assert together.isfinite().all()
            alone = [run_alone(backend, step, seq, options) for seq in range(len(SHARING_LENS))]
            assert torch.equal(together, torch.cat(alone))


# ---- whole layers


@on_each_processor("plain", "int8")
def test_a_layer_in_one_call_gives_the_bits_of_its_parts(cache, processor, dtype):
    for bias, lens in ((False, [(20, 1)]), (True, [(0, 37), (3, 5)]), (False, [(40, 1), (15, 1), (0, 300)])):
        config = NetworkConfig(64, 96, 176, 1, 4, 2, head_dim=32, qkv_bias=bias, o_bias=bias)
        backend = cache.make(4, 2, 32, 16, dtype)
        model = torch.nn.ModuleDict({"layer": filled(Qwen3DecoderLayer(config, backend), dtype)})
        replace_layers(model, dtype)
        parts = model["layer"]
        fuse_layers(model, backend)
        assert isinstance(model["layer"], CpuDecoderLayer)
        check_same_outputs(parts, model["layer"], cache.step(backend, lens, dtype=dtype), dtype)
