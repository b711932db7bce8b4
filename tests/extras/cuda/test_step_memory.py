"""A step that finds no memory says which option to lower, and the engine goes on."""

import pytest
import torch

from nanovllm_extras.execution.cuda_startup import CudaDevice
from tests.conftest import hf_greedy
from tests.extras.test_full_engine import FAILING_PROMPTS, Failing, greedy, make_engine, run, tokens_of


def test_a_step_without_memory_says_what_to_lower_and_can_be_tried_again(tiny_checkpoint):
    engine = make_engine(tiny_checkpoint[0])
    Failing(engine, lambda i: i == 1, "before", torch.OutOfMemoryError)
    runner = engine.runner
    device = CudaDevice(engine.config, runner.device, runner.backend, runner.shape, runner.max_num_batched_tokens)
    device.prepare(runner)
    runner.device_setup = device
    engine.add_request("a", FAILING_PROMPTS["a"], greedy(10))
    engine.step()
    with pytest.raises(torch.OutOfMemoryError, match="lower gpu_memory_utilization.*max_num_seqs; the model failed"):
        engine.step()
    assert tokens_of(run(engine)) == {"a": hf_greedy(tiny_checkpoint[1], FAILING_PROMPTS["a"], 10)}
