"""The core's CUDA path on a CPU that plays a CUDA device: flash-attn's two calls, and graphs of decodes.

The oracle is the core with PyTorch's attention, which is compared with transformers elsewhere.
"""

import random
import re
import sys
import types
from dataclasses import replace

import pytest
import torch

from nanovllm.config import Config
from nanovllm.layers.attention import AttentionMetadata, LoadedModel, TorchAttention
from nanovllm.layers.basic import RMSNorm, Rotary
from nanovllm.layers.flash_attention import FlashAttention
from nanovllm.sampling_params import SamplingParams
from nanovllm_testing.engine_traffic import MODEL, SMALL, drive, random_requests
from tests import cuda_stand_in
from tests.conftest import every_second


@pytest.fixture
def card(monkeypatch):
    cuda_stand_in.install(monkeypatch)


@pytest.mark.parametrize("enforce_eager", every_second([False, True]))
def test_tokens_are_those_of_pytorchs_attention(card, enforce_eager):
    rng = random.Random(5)
    requests = list(random_requests(rng, 12))
    options = {**SMALL, "enforce_eager": enforce_eager}
    engine = cuda_stand_in.StandInEngine(Config(MODEL, **options, attention_backend="flash_attn"))
    assert type(engine.runner.backend) is FlashAttention
    found = drive(engine, requests, rng)
    from nanovllm.engine import LLMEngine

    assert found == drive(LLMEngine(Config(MODEL, **options, attention_backend="torch")), requests, rng)
    if not enforce_eager:
        graphs = engine.runner.graphs
        assert graphs.sizes == [1, 2, 4, 5]
        replays = {size: replay.__self__.num_replays for size, (replay, _) in graphs.graphs.items()}
        assert sum(count > 0 for count in replays.values()) >= 3, replays


def test_a_graph_of_a_larger_size_is_padded_with_empty_sequences(card):
    engine = cuda_stand_in.StandInEngine(Config(MODEL, **SMALL, attention_backend="flash_attn"))
    for i in range(3):
        engine.add_request(str(i), [5 + i, 6, 7], stream=False)
    while engine.has_unfinished_requests():
        engine.step()
    graphs = engine.runner.graphs
    assert graphs.graphs[4][0].__self__.num_replays > 0, "three decodes replay the graph of four"
    assert graphs.slot_mapping[3] == 0 == graphs.seq_lens[3]


def test_the_memory_of_all_graphs_is_reserved(card, monkeypatch):
    """The largest graph takes 90 bytes, each other one 10: four sizes take 120."""
    engine = cuda_stand_in.StandInEngine(Config(MODEL, **SMALL, attention_backend="flash_attn"))
    graphs = engine.runner.graphs
    free = iter([1000, 910, 900])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 2000))
    assert graphs.measure_bytes() == 120


def test_the_cache_gets_what_weights_a_step_graphs_and_others_leave(card, monkeypatch):
    """Of 2,000 bytes 1,800 may be used: 300 are the peak of a step, graphs take 120, and others have 850."""
    runner = cuda_stand_in.StandInEngine(Config(MODEL, **SMALL, attention_backend="flash_attn")).runner
    free, events, run = iter([1000, 910, 900, 950]), [], runner.run
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 200)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: events.append("peak") or 300)
    monkeypatch.setattr(runner, "run", lambda batch: events.append(len(batch.input_ids)) or run(batch))
    assert runner.measure_free_bytes() == 1800 - 300 - 120 - 850
    assert events == ["empty", "reset", runner.max_num_batched_tokens, "peak", "empty", "empty"]


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "block_size", "reason"),
    [
        ("cpu", torch.bfloat16, 64, None, "CUDA device"),
        ("cuda", torch.float32, 64, None, "float16 or bfloat16"),
        ("cuda", torch.bfloat16, 60, None, "multiple of 8"),
        ("cuda", torch.bfloat16, 64, 16, "multiple of 256, got 16"),
    ],
)
def test_why_it_cannot_be_used(device, dtype, head_dim, block_size, reason):
    assert reason in FlashAttention.why_not(torch.device(device), dtype, head_dim, block_size)


@pytest.mark.parametrize(("library", "capability", "reason"), [
    (None, (9, 0), "cannot be imported"),
    (types.SimpleNamespace(), (7, 5), r"8.0 \(Ampere\) or later, this one has \(7, 5\)"),
    (types.SimpleNamespace(), (8, 0), None),
])  # fmt: skip
def test_why_a_library_or_a_gpu_cannot_be_used(monkeypatch, library, capability, reason):
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = FlashAttention.why_not(torch.device("cuda"), torch.bfloat16, 128, 256)
    assert found == reason if reason is None else re.search(reason, found)


def test_without_a_triton_that_works_pytorchs_layers_compute(caplog):
    """Here no kernel can be launched, as on a GPU without a C compiler."""
    layer, cuda = torch.nn.ModuleDict({"norm": RMSNorm(8, 1e-6)}), torch.device("cuda")
    backend = FlashAttention(2, 1, 8, 256, torch.bfloat16)
    backend.replace_layers(LoadedModel(layer, None, torch.bfloat16, cuda, 64, enforce_eager=False))
    assert type(layer["norm"]) is RMSNorm
    assert backend.store is None
    assert "Triton does not work: " in caplog.text


def test_asking_for_it_on_a_cpu_says_why_not():
    from nanovllm.llm import LLM

    with pytest.raises(ValueError, match="attention_backend='flash_attn' cannot be used.*CUDA device"):
        LLM(MODEL, attention_backend="flash_attn")


# ---- the stand-in notices what a device would not forgive


def make_engine(**options):
    return cuda_stand_in.StandInEngine(Config(MODEL, **SMALL, attention_backend="flash_attn", **options))


def answer(engine):
    engine.add_request("0", [5, 6, 7], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), stream=False)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[0].outputs[0].token_ids


def leave_positions_on_the_host(monkeypatch):
    send = cuda_stand_in.StandInRunner.send
    monkeypatch.setattr(
        cuda_stand_in.StandInRunner, "send", lambda *given: replace(send(*given), positions=given[1].positions.clone())
    )


def read_a_number(monkeypatch):
    forward = TorchAttention.store_kv
    monkeypatch.setattr(TorchAttention, "store_kv", lambda *given: (int(given[-1].max()), forward(*given))[1])


def send_wide_lengths(monkeypatch):
    own = AttentionMetadata.of_decodes
    monkeypatch.setattr(AttentionMetadata, "of_decodes", lambda *given: own(*given[:2], given[2].long(), given[3]))


def make_a_tensor_on_the_host(monkeypatch):
    forward = Rotary.forward
    monkeypatch.setattr(Rotary, "forward", lambda *given: (torch.zeros(3), forward(*given))[1])


@pytest.mark.parametrize(("plant", "message"), [
    (leave_positions_on_the_host, "gets a tensor of the host"),
    (read_a_number, "the host waits for a number"),
    (send_wide_lengths, None),
    (make_a_tensor_on_the_host, "makes a tensor on the host"),
])  # fmt: skip
def test_a_fault_that_a_device_refuses_is_noticed(card, monkeypatch, plant, message):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        answer(make_engine())


def test_a_graph_does_not_follow_a_cache_that_moves(card):
    expected, engine = answer(make_engine()), make_engine()
    engine.runner.kv_cache.allocate(engine.runner.kv_cache.num_blocks)
    assert answer(engine) != expected
