"""K and V in 8 bits on CPU: the kernel against PyTorch's definition and at its limits, and the engine with them."""

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
from tests.extras.attention_options import OPTIONS, SINKS
from tests.extras.attention_steps import Int8Step
from tests.extras.kernels.processors import OF_K_AND_V, in_sweeps, pretend

pytestmark = pytest.mark.usefixtures("needs_a_compiler")


def int8_attention(*sizes):
    return CpuAttention(*sizes, kv_cache_dtype="int8")


@pytest.fixture(params=in_sweeps(OF_K_AND_V))
def processor(request, monkeypatch):
    with pretend(monkeypatch, request.param):
        yield


def test_the_definition_does_the_same(processor, dtype):
    """The exponentials differ in their last bits, and so does now and then a weight of 16 bits."""
    lens = [(100, 1), (5, 1), (33, 1), (0, 70), (90, 40), (60, 3)]
    kernel = int8_attention(8, 2, 64, 16, dtype)
    definition = with_int8_cache(AttentionBackend)(8, 2, 64, 16, dtype, kv_cache_dtype="int8")
    tolerance = 2e-5 if dtype == torch.float32 else 2**-7
    for options in (OPTIONS["soft-cap"], SINKS["all and sinks"]):
        outs = [Int8Step(backend, lens, dtype=dtype, options=options).run(backend) for backend in (kernel, definition)]
        torch.testing.assert_close(*outs, rtol=tolerance, atol=tolerance)


def test_no_sum_overflows(processor, dtype):
    """All numbers are the largest, 127 and 32,767, in every product."""
    backend = int8_attention(2, 1, 512, 16, dtype)
    step = Int8Step(backend, [(40, 1), (0, 33)], dtype=dtype)
    cache = step.layer_cache
    tables = step.batch.metadata.block_tables.unique()
    everywhere = (tables[:, None] * 16 + torch.arange(16)).flatten().int()
    ones = torch.ones(len(everywhere), 1, 512, dtype=dtype)
    backend.store_kv(ones, -2 * ones, cache, everywhere)
    out = backend.attend(torch.ones_like(step.q), cache, step.batch.metadata)
    torch.testing.assert_close(out, -2 * torch.ones_like(out), rtol=1e-4, atol=1e-4)


def test_zeros_and_what_is_no_number(processor, dtype):
    """A vector of zeros stays one; with a NaN or an infinity in V, those who see it get no number."""
    backend = int8_attention(2, 1, 32, 16, dtype)
    step = Int8Step(backend, [(20, 1), (20, 1), (20, 1)], dtype=dtype)
    step.k[0], step.v[0] = 0, 0
    step.v[1, 0, 31] = float("nan")
    step.v[2, 0, 0] = float("inf")
    out = step.run(backend)
    assert out[0].isfinite().all()
    assert not out[1:].isfinite().any()


# ---- the engine


def run(prompts, params, **options):
    llm = LLM(TINY_QWEN3, attention_backend="cpu", kv_cache_dtype="int8", **options)
    done = llm.generate(prompts, params, use_tqdm=False)
    return llm, [[one.token_ids for one in output.outputs] for output in done]


PROMPTS = ["What is paged attention? Explain it well.", "What is 17 + 25?", "Why is the sky blue?", "Name a fruit."]
PARAMS = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=12, ignore_eos=True)


def test_outputs_do_not_depend_on_what_else_is_in_the_batch():
    """Alone, together, in chunks, swapped, from the prefix cache, and when samples copy a shared block."""
    _, together = run(PROMPTS, PARAMS)
    assert [run([prompt], PARAMS)[1][0] for prompt in PROMPTS[:2]] == together[:2]
    options = {"num_kv_blocks": 11, "max_num_batched_tokens": 8, "preemption_mode": "swap", "swap_space_bytes": 1 << 22}
    llm, outputs = run(PROMPTS, PARAMS, **options)
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
