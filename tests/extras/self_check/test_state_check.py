"""The self-check of models with recurrent states: planted faults are found, and tokens are right without the kernel."""

import logging

import pytest

from nanovllm_extras import SamplingParams
from nanovllm_extras.kernels.cpu.cpu_gated_delta import CpuGatedDeltaNet
from tests.extras.models.hybrid_checkpoints import HybridCheckpoints
from tests.extras.self_check.test_self_check import (  # noqa: F401 (fixtures)
    compiled_before,
    fresh_cache,
    make_llm,
    plant,
    way_of,
)

pytest.importorskip("transformers.models.qwen3_5")
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def hybrids(all_hybrids):
    return all_hybrids["Qwen3_5"]


def kernels_of(llm):
    return [one for one in llm.engine.runner.model.modules() if isinstance(one, CpuGatedDeltaNet)]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_no_false_alarm(fresh_cache, hybrids, dtype):  # noqa: F811
    llm = make_llm(hybrids.make()[0], dtype=dtype, self_check="strict")
    assert way_of(llm) == "C kernels"
    assert len(kernels_of(llm)) == 3
    assert len(list(fresh_cache.glob("checked-*.json"))) == 1


def test_a_model_without_recurrent_states_passes(fresh_cache, tmp_path):  # noqa: F811
    """Its states are the inputs of convolutions, which no kernel computes."""
    llm = make_llm(HybridCheckpoints(tmp_path, "Lfm2").make()[0], dtype="bfloat16", self_check="strict")
    assert way_of(llm) == "C kernels"
    assert len(list(fresh_cache.glob("checked-*.json"))) == 1


def forget_more(kernel):
    kernel.weights[1].mul_(1.5)


def keep_no_tail(kernel):
    forward = kernel.forward
    kernel.forward = lambda x, conv, recurrent, metadata: forward(x, conv.clone(), recurrent, metadata)


def begin_again(kernel):
    forward = kernel.forward

    def forgetful(x, conv, recurrent, metadata):
        metadata.is_first.fill_(True)
        return forward(x, conv, recurrent, metadata)

    kernel.forward = forgetful


FAULTS = [forget_more, *(pytest.param(fault, marks=pytest.mark.slow) for fault in (keep_no_tail, begin_again))]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_layer_is_found_and_left_out(fresh_cache, hybrids, monkeypatch, caplog, fault):  # noqa: F811
    def change(model):
        fault(next(one for one in model.modules() if isinstance(one, CpuGatedDeltaNet)))

    plant(monkeypatch, change)
    with caplog.at_level(logging.WARNING):
        llm = make_llm(hybrids.make()[0], dtype="float32")
    assert "wrong result: a layer with recurrent states" in caplog.text
    assert way_of(llm) == "attention only"
    prompt, (token_ids, _) = hybrids.prompts()[3], hybrids.greedy()[3]
    assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == token_ids[:5]
