"""K and V in 8 bits on CPU, against float64 arithmetic over rounded K and V, PyTorch's definition, and themselves."""

import json
import sys

import pytest
import torch

from benchmarks import int8_kv
from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.execution.choices import select_backend
from nanovllm_extras.kernels.backend import AttentionBackend
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.kernels.int8_kv import with_int8_cache
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.records.full_sequence import Sequence
from tests.extras.attention_options import OPTIONS, SINKS
from tests.extras.attention_steps import HEADS, Int8Step, random_lens
from tests.extras.kernels.test_cpu_kernels import LAYER_LENS, check_layer_in_one_call
from tests.extras.kernels.test_cpu_sharing import LENS, check_sharing, sharing_blocks
from tests.steps import batch_of

pytestmark = pytest.mark.usefixtures("needs_a_compiler")
KINDS = {**OPTIONS, "all and sinks": SINKS["all and sinks"]}


def int8_attention(*sizes):
    return CpuAttention(*sizes, kv_cache_dtype="int8")


def check_close(out, expected):
    """Queries and weights are rounded to 16 bits besides."""
    tolerance = 3e-4 if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


# ---- attention


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block_size", [16, 32, 80])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [*HEADS, (32, 2), (40, 2)])
@pytest.mark.sparse
def test_mixed_batch_equals_the_reference(dtype, num_heads, num_kv_heads, block_size, seed):
    backend = int8_attention(num_heads, num_kv_heads, [32, 64, 96][seed], block_size, dtype)
    step = Int8Step(backend, random_lens(block_size, seed), seed, dtype)
    check_close(step.run(backend), step.expected)


@pytest.mark.parametrize(
    "lens",
    [
        [(0, 1)],
        [(15, 1), (16, 1), (17, 1), (31, 1), (32, 1)],
        [(0, 15), (0, 16), (0, 17), (0, 2)],
        [(5, 4), (16, 16), (32, 2), (1, 60)],
        [(300, 1), (1000, 1), (127, 1), (0, 257), (129, 20)],
        [(3000, 1), (2500, 6)],
    ],
    ids=["one token", "decodes", "whole prompts", "later chunks", "long", "not in the L2 cache"],
)
@pytest.mark.sparse
@pytest.mark.thinned
def test_each_kind_of_batch_equals_the_reference_on_each_processor(processor_of_k_and_v, dtype, lens):
    backend = int8_attention(4, 2, 64, 16, dtype)
    step = Int8Step(backend, lens, dtype=dtype)
    check_close(step.run(backend), step.expected)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("block_size", [16, 32, 80])
@pytest.mark.sparse
def test_windows_and_soft_caps_equal_the_reference(processor_of_k_and_v, dtype, options, block_size):
    """Blocks that no token's window reaches hold NaN in the null block's place: they are not read."""
    backend = int8_attention(8, 2, 64, block_size, dtype)
    step = Int8Step(backend, [(100, 1), (5, 1), (33, 1), (0, 70), (90, 40), (60, 3)], dtype=dtype, options=options)
    check_close(step.run(backend), step.expected)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.sparse
def test_the_definition_does_the_same(processor_of_k_and_v, dtype, options):
    """The exponentials differ in their last bits, and so does now and then a weight of 16 bits."""
    lens = [(100, 1), (5, 1), (33, 1), (0, 70), (90, 40), (60, 3)]
    kernel = int8_attention(8, 2, 64, 16, dtype)
    definition = with_int8_cache(AttentionBackend)(8, 2, 64, 16, dtype, kv_cache_dtype="int8")
    outs = [Int8Step(backend, lens, dtype=dtype, options=options).run(backend) for backend in (kernel, definition)]
    tolerance = 2e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(*outs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_dim", [256, 512])
@pytest.mark.sparse
def test_no_sum_overflows(processor_of_k_and_v, dtype, head_dim):
    """All numbers are the largest, 127 and 32,767, in every product."""
    backend = int8_attention(2, 1, head_dim, 16, dtype)
    step = Int8Step(backend, [(40, 1), (0, 33)], dtype=dtype)
    cache = step.layer_cache
    tables = step.batch.metadata.block_tables.unique()
    everywhere = (tables[:, None] * 16 + torch.arange(16)).flatten().int()
    ones = torch.ones(len(everywhere), 1, head_dim, dtype=dtype)
    backend.store_kv(ones, -2 * ones, cache, everywhere)
    out = backend.attend(torch.ones_like(step.q), cache, step.batch.metadata)
    torch.testing.assert_close(out, -2 * torch.ones_like(out), rtol=1e-4, atol=1e-4)


def test_zeros_and_what_is_no_number(processor_of_k_and_v, dtype):
    """A vector of zeros stays one; with a NaN or an infinity in V, those who see it get no number."""
    backend = int8_attention(2, 1, 32, 16, dtype)
    step = Int8Step(backend, [(20, 1), (20, 1), (20, 1)], dtype=dtype)
    step.k[0], step.v[0] = 0, 0
    step.v[1, 0, 31] = float("nan")
    step.v[2, 0, 0] = float("inf")
    out = step.run(backend)
    assert out[0].isfinite().all()
    assert not out[1:].isfinite().any()


def test_attention_leaves_the_cache_of_other_tokens_alone(dtype):
    backend = int8_attention(4, 2, 32, 16, dtype)
    step = Int8Step(backend, random_lens(16, 3), dtype=dtype)
    before = step.cache.clone()
    step.run(backend)
    changed = before != step.cache
    assert not changed[:, 0].any(), "another layer"
    assert (changed[:, 1].flatten(1).sum(1) <= step.k[..., 0].numel() * (32 + 4)).all()
    blocks = {slot // 16 for slot in step.batch.metadata.slot_mapping.tolist()}
    assert set(changed[:, 1].any(-1).any(-1).nonzero()[:, 1].tolist()) == blocks
    out = step.run(backend)
    torch.testing.assert_close(out, step.run(backend), rtol=0, atol=0)
    check_close(out, step.expected)


# ---- the same bits in every batch


@pytest.mark.parametrize("options", [None, *KINDS.values()], ids=["plain", *KINDS])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.sparse
def test_a_token_has_the_same_bits_as_decode_and_as_part_of_a_prompt(processor_of_k_and_v, dtype, options, block_size):
    backend = int8_attention(8, 2, 32, block_size, dtype)
    whole = Int8Step(backend, [(0, 277)], dtype=dtype, options=options)
    rows = whole.run(backend)
    for start, stop in ((276, 277), (50, 277), (33, 40)):
        seq = Sequence("seq", [0] * stop, SamplingParams())
        for block_id in whole.batch.metadata.block_tables[0].tolist():
            seq.block_table.append(block_id)
        metadata = batch_of([(seq, start, stop - start)], block_size).metadata
        part = backend.attend(whole.q[start:stop], whole.layer_cache, metadata, *whole.options)
        assert torch.equal(part, rows[start:stop])


@sharing_blocks
def test_sequences_that_share_blocks_have_the_bits_of_each_alone(
    processor_of_k_and_v, families, dtype, block_size, num_kv_heads, options
):
    backend = int8_attention(8, num_kv_heads, 64, block_size, dtype)
    check_sharing(backend, Int8Step(backend, LENS, dtype=dtype), families, block_size, options)


@pytest.mark.parametrize("lens", LAYER_LENS)
def test_a_layer_in_one_call_gives_the_bits_of_its_parts(dtype, lens):
    backend = int8_attention(4, 2, 32, 16, dtype)
    config = NetworkConfig(64, 96, 176, 1, 4, 2, head_dim=32)
    check_layer_in_one_call(config, backend, Int8Step(backend, lens, dtype=dtype), dtype)


# ---- the engine


def run(prompts, params, **options):
    llm = LLM(TINY_QWEN3, attention_backend="cpu", kv_cache_dtype="int8", **options)
    done = llm.generate(prompts, params, use_tqdm=False)
    return llm, [[one.token_ids for one in output.outputs] for output in done]


PROMPTS = ["What is paged attention? Explain it well.", "What is 17 + 25?", "Why is the sky blue?", "Name a fruit."]
PARAMS = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=24, ignore_eos=True)


def test_outputs_do_not_depend_on_what_else_is_in_the_batch():
    """Alone, together, in chunks, preempted, swapped, from the prefix cache, and when samples copy a shared block."""
    _, together = run(PROMPTS, PARAMS)
    assert [tokens for prompt in PROMPTS for tokens in run([prompt], PARAMS)[1]] == together
    assert run(PROMPTS, PARAMS, max_num_batched_tokens=8)[1] == together
    llm, outputs = run(PROMPTS, PARAMS, num_kv_blocks=11)
    assert outputs == together
    assert llm.get_stats().num_preemptions > 0
    llm, outputs = run(PROMPTS, PARAMS, num_kv_blocks=11, preemption_mode="swap", swap_space_bytes=1 << 22)
    assert outputs == together
    assert llm.get_stats().num_swaps > 0
    again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [[one.token_ids for one in output.outputs] for output in again] == together


def test_the_same_memory_has_nearly_twice_the_tokens():
    """A token and head of 64 numbers has 68 bytes, and 128 in bfloat16."""
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 22, "max_num_seqs": 1024}
    sizes = [LLM(TINY_QWEN3, kv_cache_dtype=dtype, **options).get_stats().num_kv_blocks for dtype in ("auto", "int8")]
    assert sizes[1] / sizes[0] == pytest.approx(128 / 68, rel=0.01)


def test_what_cannot_be_kept_in_8_bits_is_refused(tiny_checkpoint):
    with pytest.raises(ValueError, match="head_dim must be at most 512, it is 544"):
        select_backend("cpu", torch.device("cpu"), torch.float32, 544, 16, "int8")
    with pytest.raises(ValueError, match="'cpu' with kv_cache_dtype='fp8' cannot be used .* it has no fp8 KV cache"):
        LLM(tiny_checkpoint[0], device="cpu", attention_backend="cpu", kv_cache_dtype="fp8")


def test_the_benchmark_measures(monkeypatch, tmp_path, capsys):
    report = tmp_path / "out.json"
    options = ["--contexts", "40", "--batch", "2", "--repeats", "1", "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["int8_kv", *options])
    int8_kv.main()
    (row,) = json.loads(report.read_text())["rows"]
    # 28 layers, 8 heads of 128: K and V, of 2 sequences in 3 blocks of 16 each
    assert row["bytes"] == {"bfloat16": 28 * 2 * 8 * 128 * 2 * 96, "int8": 28 * 2 * 8 * 132 * 96}
    assert "int8" in capsys.readouterr().out
