"""Qwen3.5 with weights of 8 and 4 bits: the tokens of `transformers` with the same rounded weights and inputs.

`tests/extras/quantization` compares one product with float64. Here the oracle's linear layers get the weights that the
definition dequantises, and their inputs are rounded as the definition rounds them.
"""

from copy import deepcopy

import pytest
import torch
from torch import nn

from nanovllm_extras import SamplingParams
from nanovllm_extras.kernels.cpu.cpu_gated_delta import CpuGatedDeltaNet
from nanovllm_extras.kernels.cpu.cpu_quantised import CpuQuantisedFusedLinear
from nanovllm_extras.weights.quantised_linear import QuantisedFusedLinear, quantise_weight, round_rows, spread
from tests.extras.kernels.processors import need_a_compiler
from tests.extras.models.hybrid_checkpoints import MAX_TOKENS, continue_greedily
from tests.extras.models.test_qwen3_5 import GREEDY, check_all_free, logprobs, make_llm

pytest.importorskip("transformers.models.qwen3_5_moe")
GROUP_SIZE = 32  # so that most layers have several groups
CASES = [("int8", "cpu", 13)]  # (method, backend, budget)
SLOW_CASES = [("int8", "torch", 64), ("int4", "cpu", 7), ("int4", "torch", 13)]


def quantised(model, bits):
    """Return a copy of a `transformers` model whose projections multiply rounded inputs by rounded weights."""
    copy = deepcopy(model)
    for name, module in copy.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = quantise_weight(module.weight, bits, GROUP_SIZE).dequantised()
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    return copy


def rounded(x):
    q, scales = round_rows(x.flatten(0, -2), GROUP_SIZE)
    return (q * spread(scales, GROUP_SIZE, q.shape[1])).view(x.shape)


def make_quantised(folder, method, **options):
    options = {"block_size": 16, "num_kv_blocks": 60, **options}
    given = {"method": method, "group_size": GROUP_SIZE, "embeddings": False}
    return make_llm(folder, quantization=given, **options)


@pytest.mark.parametrize(
    ("method", "backend", "budget"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_tokens_are_those_of_transformers_with_rounded_weights(all_hybrids, method, backend, budget):
    """One rounding that goes the other way may change a log-probability a little, so they are compared roughly."""
    if backend == "cpu":
        need_a_compiler(torch.float32)
    hybrids = all_hybrids["Qwen3_5"]
    folder, model = hybrids.make()
    llm = make_quantised(folder, method, attention_backend=backend, max_num_batched_tokens=budget)
    layer = llm.engine.runner.model.model.layers[0].linear_attn
    assert isinstance(layer, CpuGatedDeltaNet) == (backend == "cpu")
    assert isinstance(layer.in_proj, CpuQuantisedFusedLinear if backend == "cpu" else QuantisedFusedLinear)
    prompts = hybrids.prompts()[1:2] if (method, backend, budget) in CASES else hybrids.prompts()[1:4]
    oracle = quantised(model, {"int8": 8, "int4": 4}[method])
    for _ in range(2):  # then prefixes are found
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            token_ids, wanted = continue_greedily(oracle, prompt)
            assert output.outputs[0].token_ids == token_ids
            assert logprobs(output.outputs[0]) == pytest.approx(wanted, abs=0.05)
    check_all_free(llm)


@pytest.mark.slow
def test_the_kernels_give_the_same_tokens_in_every_batch(all_hybrids):
    """The kernels compute token by token, so budgets, preemption, swap and samples change no bit."""
    need_a_compiler(torch.float32)
    hybrids, found = all_hybrids["Qwen3_5"], []
    params = SamplingParams(n=2, temperature=0.9, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    swap = {"preemption_mode": "swap", "swap_space_bytes": 1 << 20}
    for options in ({"max_num_batched_tokens": 1}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 6},
                    {"max_num_batched_tokens": 64, "num_kv_blocks": 6, **swap}):  # fmt: skip
        llm = make_quantised(hybrids.make()[0], "int4", attention_backend="cpu", **options)
        outputs = llm.generate(hybrids.prompts(), params, use_tqdm=False)
        found.append([(one.token_ids, logprobs(one)) for output in outputs for one in output.outputs])
        check_all_free(llm)
    assert found[1:] == found[:1] * 3


@pytest.mark.slow
def test_experts_in_c_and_in_pytorch(all_hybrids):
    """With experts and the shared one, whose gate is a product with one output.

    Where a rounding goes the other way, a token may differ, and then those after it. Up to there, scores are close.
    """
    need_a_compiler(torch.float32)
    hybrids = all_hybrids["Qwen3_5Moe"]
    found = []
    for backend in ("torch", "cpu"):
        llm = make_quantised(hybrids.make()[0], "int8", attention_backend=backend, max_num_batched_tokens=13)
        outputs = llm.generate(hybrids.prompts(), GREEDY, use_tqdm=False)
        found.append([(output.outputs[0].token_ids, logprobs(output.outputs[0])) for output in outputs])
    differences = []
    for (ours, scores), (theirs, wanted) in zip(*found, strict=True):
        for token, other, score, expected in zip(ours, theirs, scores, wanted, strict=True):
            if token != other:
                break
            differences.append(abs(score - expected))
    assert len(differences) > 0.7 * MAX_TOKENS * len(found[0])
    assert sum(differences) / len(differences) < 0.05
