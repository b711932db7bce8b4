"""Groups of layers on CUDA, as far as they go without a GPU: each layer gets the slots and block tables of its group.

Eager steps, graphs of whole steps and the core's graphs of the forward pass, over replacements of CUDA's recording
(`recorded_operations.py`), of the library flash-attn, and of a device that the host does not wait for. The oracle are
the tokens of `transformers`.

In Gemma 4, K and V have two shapes, so there are two attention backends, and numbers of pieces instead of blocks.

Broken by hand, and seen here: slots or tables of another group, and padding that keeps the slots of an older batch.
"""

import random
from array import array

import pytest
import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm.scheduler import make_step
from nanovllm_extras import Config, LLMEngine, SamplingParams
from nanovllm_extras.execution.chooser import Chooser
from nanovllm_extras.execution.forward_graphs import ForwardGraphs
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.execution.graph_inputs import MoreInputs
from nanovllm_extras.execution.input_buffer import InputBuffer
from nanovllm_extras.execution.layout import Layout
from nanovllm_extras.execution.step_graphs import CudaGraphs, DecodeInputs, choose_graphs
from nanovllm_extras.kernels.cuda.flash_backend import FlashAttention
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.grouped_metadata import GroupedMetadata
from nanovllm_extras.sampling.processed_batch import build_batch
from nanovllm_extras.self_check.runner_check import SelfCheck
from nanovllm_extras.self_check.stored_results import StoredResult
from tests.extras.cuda import test_core_graphs, test_graphs
from tests.extras.cuda.test_core_graphs import make_backends, recorded  # noqa: F401 (the latter is a fixture)
from tests.extras.cuda.test_host_waits import (  # kernels is a fixture
    META,
    DeviceCheck,
    DeviceRecorder,
    OneCopy,
    compute_eagerly,
    kernels,  # noqa: F401
)
from tests.extras.kernels.test_flash_backend import flash_attn_3  # noqa: F401 (a fixture)
from tests.extras.kv_groups.test_grouped_layers import MAX_TOKENS, SWAP
from tests.extras.models.hybrid_checkpoints import continue_all
from tests.extras.test_full_engine import greedy, run, tokens_of

CPU = torch.device("cpu")
POOL = {"block_size": 4, "num_kv_blocks": 120}
CHUNKS = {**POOL, "enable_overlap": True, "max_num_batched_tokens": 9}


def replace_backends(monkeypatch, kind, block_size):
    monkeypatch.setattr(Chooser, "make_backends", make_backends(kind, block_size))


def check_tokens(engine, prompts, expected, max_tokens=MAX_TOKENS):
    """Requests come three by three, so prompts share steps with decodes."""
    assert engine.scheduler.block_manager.num_groups > 1
    engine.runner.kv_cache.tensor[:, :, 1:] = 50.0  # garbage that would show
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(max_tokens))
        if i % 3 == 2:
            engine.step()
    found = tokens_of(run(engine))
    assert [found[str(i)] for i in range(len(prompts))] == expected
    assert engine.get_stats().num_window_blocks > 0


def requests_of(grouped, name, max_tokens=MAX_TOKENS):
    """A folder, a few prompts, and what follows each of them."""
    folder, model = grouped.of(name)
    prompts = [grouped.prompts()[i][:20] for i in (1, 2, 4)]
    return folder, prompts, [tokens for tokens, _ in continue_all(model, prompts, max_tokens)]


# ---- what is sent


def grouped_batch(num_seqs, num_windows, seed):
    """Decodes of sequences with up to 36 tokens, and random blocks in all groups."""
    rng = random.Random(seed)
    chunks = []
    for i in range(num_seqs):
        num_tokens = rng.randint(1, 36)
        seq = Sequence(str(i), [7] * num_tokens, SamplingParams(temperature=0))
        num_blocks = -(-num_tokens // 4)
        seq.block_table, *seq.window_tables = [
            array("i", [rng.randint(max(1, first), first + 99) for _ in range(num_blocks)])
            for first in range(0, 100 * (1 + num_windows), 100)
        ]
        chunks.append((seq, num_tokens - 1, 1))
    return build_batch(make_step(chunks, num_seqs), 4)


@pytest.mark.parametrize("num_windows", [1, 3])
def test_slots_and_tables_of_all_groups_arrive_in_their_places(num_windows):
    inputs = DecodeInputs(13, 9, CPU, MoreInputs(num_windows))
    static = {size: inputs.batch(size).metadata for size in (1, 5, 13)}  # as a graph keeps them
    for seed, (num_seqs, size) in enumerate([(13, 13), (3, 5), (1, 1), (5, 5), (2, 13), (12, 13)]):
        batch = grouped_batch(num_seqs, num_windows, seed)
        inputs.fill(batch, size)
        assert isinstance(static[size], GroupedMetadata)
        pairs = list(zip(static[size].of_groups(), batch.metadata.of_groups(), strict=True))
        assert len(pairs) == 1 + num_windows
        for found, sent in pairs:
            width = sent.block_tables.shape[1]
            assert found.slot_mapping.dtype == found.block_tables.dtype == torch.int32
            assert torch.equal(found.slot_mapping[:num_seqs], sent.slot_mapping)
            assert not found.slot_mapping[num_seqs:].any(), "padding writes to the null block of every group"
            assert torch.equal(found.block_tables[:num_seqs, :width], sent.block_tables)
            assert torch.equal(found.seq_lens[:num_seqs], sent.seq_lens)
            assert not found.seq_lens[num_seqs:].any()
    for group in range(1, 1 + num_windows):
        assert (static[13].of_groups()[group].slot_mapping[:12] >= 400 * group).all(), "blocks of this group"


def test_one_copy_sends_the_slots_and_tables_of_all_groups():
    buffer, batch = InputBuffer(CPU, 1 << 12), grouped_batch(5, 3, 0)
    sent = buffer.send_record(batch)
    assert type(sent.metadata) is GroupedMetadata
    for found, wanted in zip(sent.metadata.of_groups(), batch.metadata.of_groups(), strict=True):
        for name in ("slot_mapping", "block_tables"):
            tensor = getattr(found, name)
            assert torch.equal(tensor, getattr(wanted, name))
            assert tensor.untyped_storage().data_ptr() == buffer.device_bytes.untyped_storage().data_ptr()
            assert tensor.data_ptr() % 16 == buffer.device_bytes.data_ptr() % 16
            assert tensor.is_contiguous()


# ---- eager steps


@pytest.mark.parametrize("name", ["smollm3", "gemma4_e2b"])
def test_flash_attn_gets_the_tables_of_each_group(grouped, monkeypatch, flash_attn_3, name):  # noqa: F811
    """Version 3 takes blocks of any size. Its stand-in checks the documented interface."""

    replace_backends(monkeypatch, FlashAttention, 4)
    monkeypatch.setattr(ModelRunner, "make_device", lambda runner: OneCopy(InputBuffer(CPU, 1 << 10)))
    monkeypatch.setattr(FlashAttention, "make_fast", lambda *_: None)
    folder, prompts, expected = requests_of(grouped, name, 12)
    options = {"num_kv_blocks": 120, "max_num_batched_tokens": 13, "self_check": "off"}
    engine = LLMEngine(Config(folder, device="cpu", dtype="float32", **options))
    assert type(engine.runner.backend) is FlashAttention
    check_tokens(engine, prompts, expected, 12)
    assert flash_attn_3.calls


def run_on_host(folder):
    """Return an engine, and the batches that it has computed."""
    engine = LLMEngine(Config(folder, device="cpu", dtype="float32", attention_backend="torch", **POOL))
    compute, batches = engine.runner.run, []
    engine.runner.run = lambda batch: (batches.append(batch), compute(batch))[1]
    for i in range(3):
        engine.add_request(str(i), [i] * 9, greedy(5))
        engine.step()
    run(engine)
    assert len(batches) > 5
    return engine, batches


@pytest.mark.triton
@torch.inference_mode()
def test_steps_over_equal_blocks_do_not_wait(grouped, kernels):  # noqa: F811
    """Gemma 4 on the `meta` device, with stand-ins of Triton's kernels: eager steps, and recorded ones."""
    from nanovllm_extras.kernels.cuda.sample import sample_tokens
    from nanovllm_extras.kernels.cuda.triton_attention import TritonAttention

    engine, batches = run_on_host(grouped.of("gemma4_e2b")[0])
    runner, buffer = ModelRunner.__new__(ModelRunner), InputBuffer(META, 1 << 16)
    runner.config, runner.shape, runner.dtype = engine.runner.config, engine.runner.shape, torch.bfloat16
    runner.device, runner.graphs = META, None
    runner.layout = Layout(runner.config, runner.shape, torch.bfloat16, META)
    runner.backends, _ = make_backends(TritonAttention, 16)(None, runner.config, runner.shape, META, torch.bfloat16)
    runner.backend = runner.backends[0]
    with META:
        runner.model = engine.runner.model_class(runner.shape, runner.backends).to(torch.bfloat16)
    for rotary in (runner.model.model.rotary, runner.model.model.local_rotary):
        rotary(torch.zeros(1, dtype=torch.int32, device=META), torch.bfloat16)  # the first call moves its table
    (runner.kv_cache,) = runner.layout.make_kv_caches(runner.backends)
    runner.kv_cache.allocate(30)
    runner.device_setup, runner.draw = OneCopy(buffer), sample_tokens
    for batch in batches:
        with DeviceCheck(buffer) as check:
            compute_eagerly(runner, batch)
        assert check.num_copies == 1
    arguments = (runner.network, runner.kv_cache.tensor, runner.draw, [1, 2, 16], 8, DeviceRecorder())
    CudaGraphs(*arguments, more=runner.more_inputs).record_all()
    num_decodes = 3 + sum(batch.metadata.num_decodes > 0 for batch in batches)
    assert kernels["decode_kernel"].num_launches == 7 * num_decodes
    assert kernels["store_kv_kernel"].num_launches == 5 * (3 + len(batches)), "two layers of seven share K and V"


# ---- graphs


def gather(monkeypatch, block_size):
    """Let layers with K and V of two shapes attend as the others do in these tests."""
    replace_backends(monkeypatch, test_core_graphs.GatherAttention, block_size)


@pytest.mark.parametrize("name", [pytest.param("smollm3", marks=pytest.mark.slow), "gemma4_e2b"])
def test_replayed_steps_give_the_tokens_of_transformers(grouped, monkeypatch, name):
    folder, prompts, expected = requests_of(grouped, name)
    gather(monkeypatch, 4)
    _, replaying = test_graphs.make_engines(monkeypatch, folder, max_num_seqs=5, **CHUNKS)
    check_tokens(replaying, prompts, expected)
    assert replaying.recorder.num_recorded == 4  # 1, 2, 4, 5
    assert replaying.recorder.num_replays > 5


@pytest.mark.slow
def test_replayed_steps_of_sequences_that_are_swapped(grouped, monkeypatch):
    """The tables of groups change, and have an odd length."""
    options = {**POOL, **SWAP, "enable_overlap": True, "num_kv_blocks": 8, "max_num_batched_tokens": 13}
    gather(monkeypatch, 4)
    _, replaying = test_graphs.make_engines(
        monkeypatch, grouped.of("gemma3")[0], max_num_seqs=5, max_model_len=101, **options
    )
    check_tokens(replaying, grouped.prompts()[:3] * 2, [token_ids for token_ids, _ in grouped.greedy("gemma3")[:3]] * 2)
    assert replaying.recorder.num_replays > 5
    assert replaying.get_stats().num_swaps > 0


def test_graphs_of_the_forward_pass_give_the_tokens_of_transformers(grouped, monkeypatch, recorded):  # noqa: F811
    folder, prompts, expected = requests_of(grouped, "gemma4_31b")
    options = {"attention_backend": "torch", **POOL, "enable_overlap": False}
    gather(monkeypatch, 4)
    replaying = test_core_graphs.make_engine(monkeypatch, folder, True, max_num_seqs=5, **options)
    check_tokens(replaying, prompts, expected)
    assert type(replaying.runner.graphs) is ForwardGraphs
    assert [size for size, _ in recorded] == [5, 4, 2, 1]
    assert sum(graph.num_replays for _, graph in recorded) > 5


def test_steps_without_tables_of_groups_are_not_replayed(grouped, monkeypatch):
    """As those of the self-check, which compares graphs with eager decodes, and those that are only measured."""
    _, replaying = test_graphs.make_engines(monkeypatch, grouped.of("smollm3")[0], late=False, **POOL)
    SelfCheck(replaying.runner, StoredResult(replaying.runner), None).compare_graphs()
    assert replaying.recorder.num_replays == 0


@pytest.mark.slow
def test_graphs_of_one_table_read_the_caches_of_both_shapes(grouped, monkeypatch):
    folder, prompts, expected = requests_of(grouped, "gemma4_e2b")
    gather(monkeypatch, 4)
    _, replaying = test_graphs.make_engines(
        monkeypatch, folder, max_num_seqs=5, disable_hybrid_kv_cache_manager=True, **CHUNKS
    )
    assert len(replaying.runner.kv_caches) == 2
    for i, prompt in enumerate(prompts):
        replaying.add_request(str(i), prompt, greedy(MAX_TOKENS))
    found = tokens_of(run(replaying))
    assert [found[str(i)] for i in range(len(prompts))] == expected
    assert replaying.recorder.num_replays > 5


def test_one_backend_that_waits_is_enough_against_graphs():
    """As for heads of 512, which only PyTorch's attention takes."""
    runner = ModelRunner.__new__(ModelRunner)
    fast, slow = test_core_graphs.GatherAttention(4, 2, 32), TorchAttention(4, 2, 64)
    runner.backend, runner.backends = fast, (fast, slow)
    assert runner.slowest_backend is slow
    note = choose_graphs(Config("any", device="cpu"), runner.slowest_backend, True, torch.device("cuda"))[1]
    assert note == ", no CUDA graphs (this attention backend reads lengths back to the host)"
    runner.backends = (fast, fast)
    assert runner.slowest_backend is fast
