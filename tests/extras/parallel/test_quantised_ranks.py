"""Weights that are quantised by each rank: the tokens are those of one rank if no group of inputs is cut.

The oracle is the engine with one rank.
"""

import pytest

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.self_check.steps import draw_vectors
from nanovllm_extras.weights.quantised_linear import multiply, quantise_weight

PROMPTS = ["What is a block table?", "How does the scheduler work?"]
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)


def answers(size, quantization):
    llm = LLM(
        TINY_QWEN3, device="cpu", dtype="float32", num_kv_blocks=40, attention_backend="torch",
        quantization=quantization, tensor_parallel_size=size,
    )  # fmt: skip
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    logprobs = [[one.logprob for step in output.logprobs for one in step.values()] for output in outputs]
    return [output.token_ids for output in outputs], logprobs


@pytest.mark.parametrize(("bits", "group_size", "is_same"), [(4, 64, True), (4, 128, False), (8, 640, False)])
def test_a_cut_product_rounds_as_the_whole_one_if_no_group_is_cut(bits, group_size, is_same):
    """Of `down_proj` in the bundled model, each of two ranks has 320 of 640 inputs."""
    x, weight = draw_vectors(0, 5, 640), draw_vectors(1, 16, 640)
    whole = multiply(x, quantise_weight(weight, bits, group_size))
    halves = [
        multiply(x[:, part], quantise_weight(weight[:, part].contiguous(), bits, min(group_size, 320)))
        for part in (slice(320), slice(320, 640))
    ]
    error = float((sum(halves) - whole).norm() / whole.norm())
    assert (error < 1e-6) == is_same
    exact = weight.double() @ x.double().T
    assert (sum(halves).T - exact).norm() < 1.5 * (whole.T - exact).norm(), "neither is more exact"


@pytest.mark.parametrize(("quantization", "is_same"), [({"method": "int4", "group_size": 32}, True), ("int8", False)])
def test_tokens_of_two_ranks(quick_ranks, quantization, is_same):
    (one, expected), (two, found) = (answers(size, quantization) for size in (1, 2))
    assert two == one or not is_same
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-4 if is_same else 0.3)
