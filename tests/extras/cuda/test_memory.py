"""The GPU's memory is divided up, and CUDA is asked in the right words; `fake_cuda` counts the bytes."""

import pytest
import torch

from nanovllm_extras import Config, LLMEngine
from nanovllm_extras.execution.cuda_memory import advice_on_start_memory, measure_free_bytes, widest_batch
from nanovllm_extras.execution.device_setup import Device
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.execution.step_graphs import StepSizes, graph_sizes
from tests.extras.cuda.conftest import GIB


@pytest.mark.parametrize("replayed", [pytest.param(None, marks=pytest.mark.slow), "step", "forward"])
def test_free_bytes_are_what_weights_a_step_graphs_and_others_leave(fake_cuda, runner, replayed):
    runner.kv_cache.allocate(0)
    config = Config("model", gpu_memory_utilization=0.5)
    sizes = StepSizes(max_num_batched_tokens=40, max_num_seqs=20, max_model_len=512)
    runner.max_rows, runner.max_num_batched_tokens, runner.max_model_len = 20, 40, 512
    free = measure_free_bytes(runner, config, sizes, replayed)
    graphs = {None: 0, "step": 107 + (len(graph_sizes(20)) - 1) * 7, "forward": 107 + 5 * 7}[
        replayed
    ]  # 1, 2, 4, 8, 16, 20
    used_by_others = 80 * GIB - fake_cuda.free - 3 * GIB
    assert free == 40 * GIB - 2 * GIB - (graphs << 20) - used_by_others
    # what an engine that is gone has left is not counted as this one's
    assert fake_cuda.events[:2] == ["empty cache", "reset peak"]


@pytest.mark.parametrize(("tokens", "seqs", "length"), [(40, 20, 512), (7, 20, 512), (100, 3, 16), (1, 1, 2)])
def test_the_widest_batch_uses_up_every_limit(tokens, seqs, length):
    sizes = StepSizes(tokens, seqs, length)
    batch = widest_batch(sizes, 16)
    assert len(batch.input_ids) == batch.metadata.seq_lens.sum() == tokens
    assert len(batch.logits_indices) >= min(seqs, tokens) == sizes.max_decodes
    assert batch.metadata.seq_lens.max() <= length
    assert not batch.metadata.slot_mapping.any()
    assert not batch.metadata.block_tables.any()


def test_what_to_do_when_memory_is_short():
    with (
        pytest.raises(
            ValueError, match="lower gpu_memory_utilization .*max_num_batched_tokens or max_num_seqs.*tried to"
        ),
        advice_on_start_memory(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate")
    with pytest.raises(KeyError), advice_on_start_memory():
        raise KeyError("x")


def test_what_to_do_when_the_weights_are_too_large(monkeypatch, tiny_checkpoint):
    def fail(runner):
        raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate")

    class AdvisedDevice(Device):
        def advice(self):
            return advice_on_start_memory()

    monkeypatch.setattr(ModelRunner, "make_device", lambda runner: AdvisedDevice())
    monkeypatch.setattr(ModelRunner, "load_network", fail)
    with pytest.raises(ValueError, match=r"does not suffice to start: .* set quantization or tensor_parallel_size"):
        LLMEngine(Config(tiny_checkpoint[0], device="cpu"))


def test_the_draft_models_weights_and_graphs_are_left_free_on_a_gpu(fake_cuda, runner, with_tokenizer):
    """`fake_cuda` has 40 GiB for an engine, of which weights and a step take 2, and others 1."""
    drafting = {"model": str(with_tokenizer), "num_speculative_tokens": 2, "disable_by_batch_size": 256}
    options = {"device": "cpu", "kv_cache_memory_bytes": 1 << 20, "gpu_memory_utilization": 0.5}
    options |= {"attention_backend": "torch", "enforce_eager": True}
    drafted = LLMEngine(Config(with_tokenizer, speculative_config=drafting, **options)).runner
    sizes = StepSizes(max_num_batched_tokens=40, max_num_seqs=2, max_model_len=512)
    runner.bytes_to_leave = drafted.bytes_to_leave
    runner.kv_cache.allocate(0)
    free = [measure_free_bytes(runner, drafted.config, sizes, replayed) for replayed in (None, "step")]
    weights = sum(weight.nbytes for weight in drafted.model.parameters())
    assert free[0] == 37 * GIB - weights
    measured = 76 * GIB - fake_cuda.free  # `fake_cuda` gives nothing back, so this counts as used by others
    assert measured == 114 << 20, "two graphs"
    assert free[0] - free[1] == 2 * measured + measured, "those of both models"
