"""Which function draws the tokens on which device, and what is run before the first request."""

import sys

import pytest
import torch

from nanovllm_extras import Config
from nanovllm_extras.execution.cuda_startup import CudaDevice, choose_draw
from nanovllm_extras.models.network_config import NetworkConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.triton
def test_who_draws_with_triton(monkeypatch):
    """None is PyTorch, by `sample_tokens`."""
    assert choose_draw(Config("model"), CPU) is None
    assert choose_draw(Config("model", enforce_eager=True), CPU) is None
    assert choose_draw(Config("model", enforce_eager=True), CUDA) is None
    pytest.importorskip("triton")
    assert choose_draw(Config("model"), CUDA).__module__ == "nanovllm_extras.kernels.cuda.sample"
    with monkeypatch.context() as bare:
        bare.setenv("CC", "no-such-compiler")
        assert choose_draw(Config("model"), CUDA) is None
    monkeypatch.delitem(sys.modules, "nanovllm_extras.kernels.cuda.sample")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert choose_draw(Config("model"), CUDA) is None


@pytest.mark.parametrize(("max_num_batched_tokens", "max_model_len"), [(64, 512), (1, 512), (64, 3)])
def test_each_kind_of_step_is_run_at_the_start(runner, max_num_batched_tokens, max_model_len):
    """On CPU here; `test_host_waits.py` shows that requests launch no other variants of kernels."""
    shape = NetworkConfig(300, 64, 96, 2, 4, 2, 32, max_model_len, tie_word_embeddings=False)
    seen, forward, draw = [], runner.forward, runner.draw
    runner.forward = lambda batch: seen.append(batch) or forward(batch)
    cache = runner.kv_cache.tensor.clone()
    CudaDevice(Config("model"), CPU, runner.backend, shape, max_num_batched_tokens).record(runner)
    assert [batch.metadata.num_decodes for batch in seen] == [1, 1, 0, 0, 0]
    assert all(len(batch.input_ids) <= max_num_batched_tokens for batch in seen)
    assert all(batch.metadata.seq_lens <= max_model_len for batch in seen)
    assert runner.draw is draw
    assert torch.equal(runner.kv_cache.tensor[:, :, 1:], cache[:, :, 1:]), "only the null block is written"
