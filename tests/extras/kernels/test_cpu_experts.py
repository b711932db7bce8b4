"""The compiled mixture of experts against the definition in `models/moe.py`, and itself in other batches.

And what holds for whole models of experts and latents on CPU: a token has the same bits in every batch.
"""

from functools import partial

import pytest
import torch

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.kernels.cpu.cpu_layers import replace_layers
from nanovllm_extras.kernels.cpu.experts import CpuExperts, fuse_experts
from nanovllm_extras.models.gated_mlp import GatedMLP
from nanovllm_extras.models.gpt_oss import GptOssConfig, GptOssExpert
from nanovllm_extras.models.group_routing import SigmoidRouter
from nanovllm_extras.models.moe import Experts, Router
from tests.extras.kernels.test_cpu_kernels import (
    fast_version_of,
    filled,
    one_rounding,
    randn,
)
from tests.extras.models.architectures import Checkpoints

HIDDEN, NUM_EXPERTS = 64, 5

pytestmark = pytest.mark.usefixtures("needs_a_compiler")


def make_experts(dtype, inner=48, make_expert=GatedMLP):
    """(the definition, its fast version)"""
    pair = []
    for _ in range(2):
        experts = filled(Experts(make_expert(HIDDEN, inner) for _ in range(NUM_EXPERTS)), dtype)
        for parameter in experts.parameters():
            parameter.data *= 0.2
        pair.append(torch.nn.ModuleDict({"experts": experts}))
    replace_layers(pair[1], dtype)
    fuse_experts(pair[1], dtype)
    return pair[0]["experts"], pair[1]["experts"]


def routing(num_tokens, top_k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    expert_ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(top_k).indices
    return expert_ids, torch.rand(num_tokens, top_k, generator=generator)


def test_experts_equal_the_definition(processor, dtype):
    experts, fast = make_experts(dtype)
    assert isinstance(fast, CpuExperts)
    tolerance = one_rounding(dtype) if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-5}  # of three products
    for num_tokens, top_k in [(1, 2), (3, 5), (40, 1), (130, 3)]:
        x, chosen = randn(num_tokens, HIDDEN, dtype=dtype), routing(num_tokens, top_k)
        found = fast(x, *chosen)
        torch.testing.assert_close(found.float(), experts(x, *chosen).float(), **tolerance)
        views = [t.repeat_interleave(2, dim=1)[:, ::2] for t in (x, *chosen)]
        assert torch.equal(fast(*views), found)


def expert_of_gpt_oss(hidden_size, inner, alpha=1.702, limit=7.0):
    shape = {"vocab_size": 1, "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1,
             "num_key_value_heads": 1, "head_dim": 1}  # fmt: skip
    config = GptOssConfig(**shape, hidden_size=hidden_size, moe_intermediate_size=inner,
                          swiglu_alpha=alpha, swiglu_limit=limit)  # fmt: skip
    return GptOssExpert(config)


def test_clamped_experts_with_biases_equal_the_definition(processor, dtype):
    experts, fast = make_experts(dtype, make_expert=expert_of_gpt_oss)
    assert isinstance(fast, CpuExperts)
    x = 5 * randn(40, HIDDEN, dtype=dtype)
    gate, up = experts[0].gate_up_proj(x)
    assert all((side > 7).any() and (side < -7).any() for side in (gate, up)), "what is clamped, or not"
    expected = experts(x, *routing(40, 3)).float()
    tolerance = one_rounding(dtype) if dtype == torch.float32 else {"rtol": 2**-5, "atol": 2**-1}  # of sums up to 80
    torch.testing.assert_close(fast(x, *routing(40, 3)).float(), expected, **tolerance)


def test_a_gate_with_other_numbers_runs_in_pytorch():
    experts, fast = make_experts(torch.float32, make_expert=partial(expert_of_gpt_oss, limit=0.5))
    assert not isinstance(fast, CpuExperts)
    x = randn(9, HIDDEN, dtype=torch.float32)
    torch.testing.assert_close(fast(x, *routing(9, 3)), experts(x, *routing(9, 3)), **one_rounding(torch.float32))


def test_a_token_has_the_same_bits_in_every_batch(processor, dtype):
    _, fast = make_experts(dtype)
    x, (expert_ids, weights) = randn(40, HIDDEN, dtype=dtype), routing(40, 3)
    together = fast(x, expert_ids, weights)
    for start, stop in [(0, 1), (3, 5), (7, 19), (1, 40)]:
        assert torch.equal(fast(x[start:stop], expert_ids[start:stop], weights[start:stop]), together[start:stop])


def test_experts_of_an_odd_shape_are_called_one_by_one():
    experts, not_fused = make_experts(torch.bfloat16, inner=40)
    assert type(not_fused) is Experts
    x, chosen = randn(7, HIDDEN, dtype=torch.bfloat16), routing(7, 2)
    torch.testing.assert_close(not_fused(x, *chosen), experts(x, *chosen), rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("router_class", [Router, SigmoidRouter])
def test_scores_equal_float64_and_have_the_same_bits_in_every_batch(processor, dtype, router_class):
    for num_experts in (4, 33):
        router, x = filled(router_class(HIDDEN, num_experts), dtype), randn(21, HIDDEN, dtype=dtype)
        expected = x.double() @ router.weight.double().T / 8
        router.weight.data /= 8
        fast = fast_version_of(router, dtype)
        scores = fast(x)
        assert scores.dtype == torch.float32
        if router_class is SigmoidRouter:
            expected = expected.sigmoid()
            bias = filled(router_class(HIDDEN, num_experts), dtype).e_score_correction_bias
            assert torch.equal(fast.e_score_correction_bias, bias)
        torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)
        for start, stop in [(0, 1), (3, 5), (7, 19)]:
            assert torch.equal(fast(x[start:stop]), scores[start:stop])


# ---- whole models


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return Checkpoints(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("name", "variant"),
    [("mixtral", "plain"), pytest.param("deepseek_v3", "yarn with mscales", marks=pytest.mark.slow)],
)
def test_outputs_do_not_depend_on_what_else_is_in_the_batch(checkpoints, name, variant):
    """In bfloat16, where one other bit soon is another expert: alone, together, in chunks, and after preemption."""
    folder, _ = checkpoints.make(name, variant)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)
    prompts = checkpoints.prompts(name, variant)

    def run(calls, **options):
        llm = LLM(folder, dtype="bfloat16", attention_backend="cpu", **{"num_kv_blocks": 40, **options})
        outputs = [output.outputs[0] for call in calls for output in llm.generate(call, params, use_tqdm=False)]
        assert (llm.get_stats().num_preemptions > 0) == (options.get("num_kv_blocks") == 6)
        return [(output.token_ids, output.cumulative_logprob) for output in outputs]

    together = run([prompts])
    assert run([[prompt] for prompt in prompts], max_num_batched_tokens=5) == together
    assert run([prompts], num_kv_blocks=6) == together
    assert run([prompts, prompts])[len(prompts) :] == together  # from the prefix cache
