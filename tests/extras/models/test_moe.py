"""Experts and routing rules against loops over tokens in float64, and against transformers' routers."""

import pytest
import torch
import transformers
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3

from nanovllm_extras.models.gated_mlp import GatedMLP
from nanovllm_extras.models.group_routing import (
    SigmoidRouter,
    choose_in_groups,
    route_by_sigmoid_in_groups,
    route_by_softmax_in_groups,
)
from nanovllm_extras.models.moe import Experts, Router, route_by_softmax

HIDDEN, INNER = 12, 20


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_experts(num_experts):
    experts = Experts(GatedMLP(HIDDEN, INNER) for _ in range(num_experts)).requires_grad_(False)
    for i, parameter in enumerate(experts.parameters()):
        parameter.copy_(normal(*parameter.shape, seed=i))
    return experts


def mix_with_loops(experts, x, expert_ids, weights):
    """float64, a token and an expert at a time"""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, factors) in enumerate(zip(expert_ids.tolist(), weights.tolist(), strict=True)):
        for number, factor in zip(ids, factors, strict=True):
            expert = experts[number]
            gate, up = (expert.gate_up_proj.weight.double() @ x[token].double()).chunk(2)
            out[token] += factor * (expert.down_proj.weight.double() @ (gate / (1 + (-gate).exp()) * up))
    return out


def random_routing(num_tokens, num_experts, top_k, seed=0):
    logits = normal(num_tokens, num_experts, seed=seed)
    return logits.topk(top_k).indices, normal(num_tokens, top_k, seed=seed + 1)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 2), (8, 3), (16, 16)])
@pytest.mark.parametrize("num_tokens", [1, 2, 37])
def test_experts_equal_loops_over_tokens(num_tokens, num_experts, top_k):
    experts, x = make_experts(num_experts), normal(num_tokens, HIDDEN, seed=50)
    expert_ids, weights = random_routing(num_tokens, num_experts, top_k)
    expected = mix_with_loops(experts, x, expert_ids, weights)
    torch.testing.assert_close(experts(x, expert_ids, weights).double(), expected, rtol=1e-5, atol=1e-4)


def test_each_expert_is_called_once_with_all_of_its_tokens():
    calls = []
    experts, x = make_experts(6), normal(4, HIDDEN)
    for expert in experts:
        expert.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    expert_ids = torch.tensor([[5, 0], [0, 3], [3, 0], [0, 5]])
    experts(x, expert_ids, torch.ones(4, 2))
    assert calls == [4, 2, 2], "experts 0, 3 and 5; the others have no token"


def test_all_tokens_at_one_expert():
    experts, x = make_experts(3), normal(5, HIDDEN)
    out = experts(x, torch.full((5, 1), 2), torch.ones(5, 1))
    torch.testing.assert_close(out, experts[2](x))


def test_scores_are_not_rounded_to_the_dtype_of_the_model():
    router = Router(64, 4).to(torch.bfloat16).requires_grad_(False)
    router.weight.copy_(normal(4, 64))
    x = normal(5, 64, seed=1).bfloat16()
    scores = router(x)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), x.double() @ router.weight.double().T, rtol=1e-6, atol=1e-5)
    assert not torch.equal(scores, scores.bfloat16().float())


def test_the_bias_of_experts_stays_float32_in_a_bfloat16_model():
    router = torch.nn.Sequential(SigmoidRouter(64, 4)).to(torch.bfloat16)[0]
    assert (router.weight.dtype, router.e_score_correction_bias.dtype) == (torch.bfloat16, torch.float32)


# ---- routing rules


@pytest.mark.parametrize("is_normalised", [False, True])
def test_softmax_weights(is_normalised):
    logits = normal(9, 7) * 3
    expert_ids, weights = route_by_softmax(logits, 3, is_normalised)
    for row, ids, found in zip(logits.double(), expert_ids, weights.double(), strict=True):
        best = sorted(range(7), key=lambda e: -row[e])[:3]
        assert ids.tolist() == best
        expected = row.exp()[best] / (row.exp()[best] if is_normalised else row.exp()).sum()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def choose_with_loops(row, top_k, num_groups, num_chosen, best_per_group):
    size = len(row) // num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(num_groups)]
    groups.sort(key=lambda group: -sum(sorted((row[e] for e in group), reverse=True)[:best_per_group]))
    return sorted((e for group in groups[:num_chosen] for e in group), key=lambda e: -row[e])[:top_k]


@pytest.mark.parametrize("best_per_group", [1, 2])
@pytest.mark.parametrize(("num_groups", "num_chosen", "top_k"), [(1, 1, 5), (4, 2, 5), (6, 1, 2), (6, 6, 12)])
def test_experts_of_the_best_groups(num_groups, num_chosen, top_k, best_per_group):
    choice = normal(30, 12)
    found = choose_in_groups(choice, top_k, num_groups, num_chosen, best_per_group)
    for row, ids in zip(choice.tolist(), found.tolist(), strict=True):
        assert ids == choose_with_loops(row, top_k, num_groups, num_chosen, best_per_group)


def by_expert(expert_ids, weights, num_experts):
    """[num_tokens, num_experts]: the weight of each, 0 where it is not chosen; in whichever order they come"""
    return torch.zeros(len(weights), num_experts).scatter_(1, expert_ids, weights.float())


def their_weights(router, x):
    *_, weights, expert_ids = router(x[None]) if isinstance(router, deepseek_v2.DeepseekV2TopkRouter) else router(x)
    return by_expert(expert_ids, weights, len(router.weight))


needs_routers = pytest.mark.skipif(
    not hasattr(deepseek_v2, "DeepseekV2TopkRouter"), reason="this transformers has routers of another form"
)


@needs_routers
@pytest.mark.parametrize("groups", [None, (4, 2), (2, 1)])
def test_v2_equals_transformers(groups):
    method = "greedy" if groups is None else "group_limited_greedy"
    n_group, topk_group = groups or (None, None)
    config = transformers.DeepseekV2Config(
        hidden_size=64, n_routed_experts=16, num_experts_per_tok=3, topk_method=method, n_group=n_group,
        topk_group=topk_group, routed_scaling_factor=1.7,
    )  # fmt: skip
    router = deepseek_v2.DeepseekV2TopkRouter(config).requires_grad_(False)
    router.weight.copy_(normal(16, 64) / 4)
    x = normal(200, 64, seed=3)
    expert_ids, weights = route_by_softmax_in_groups(x @ router.weight.T, 3, *(groups or (1, 1)))
    torch.testing.assert_close(by_expert(expert_ids, weights * 1.7, 16), their_weights(router, x))


@needs_routers
@pytest.mark.parametrize("is_normalised", [False, True])
def test_v3_equals_transformers(is_normalised):
    config = transformers.DeepseekV3Config(
        hidden_size=64, n_routed_experts=16, num_experts_per_tok=3, n_group=4, topk_group=2,
        norm_topk_prob=is_normalised, routed_scaling_factor=1.7,
    )  # fmt: skip
    router = deepseek_v3.DeepseekV3TopkRouter(config).requires_grad_(False)
    router.weight.copy_(normal(16, 64) / 8)
    router.e_score_correction_bias.copy_(normal(16, seed=1))
    x = normal(200, 64, seed=3)
    ours = SigmoidRouter(64, 16).requires_grad_(False)
    ours.weight.copy_(router.weight)
    expert_ids, weights = route_by_sigmoid_in_groups(ours(x), router.e_score_correction_bias, 3, 4, 2, is_normalised)
    theirs = their_weights(router, x)
    torch.testing.assert_close(by_expert(expert_ids, weights * 1.7, 16), theirs)
    unbiased, _ = route_by_sigmoid_in_groups(ours(x), torch.zeros(16), 3, 4, 2, is_normalised)
    assert (unbiased.sort().values != expert_ids.sort().values).any(), "the bias changes the choice"
