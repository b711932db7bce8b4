"""Experts and routing rules against loops over tokens in float64, and against transformers' routers."""

import pytest
import torch

from nanovllm_extras.models.gated_mlp import GatedMLP
from nanovllm_extras.models.group_routing import (
    SigmoidRouter,
    choose_in_groups,
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


@pytest.mark.parametrize(("num_experts", "top_k", "num_tokens"), [(1, 1, 2), (4, 2, 1), (8, 3, 37), (16, 16, 37)])
def test_experts_equal_loops_over_tokens(num_tokens, num_experts, top_k):
    experts, x = make_experts(num_experts), normal(num_tokens, HIDDEN, seed=50)
    expert_ids, weights = random_routing(num_tokens, num_experts, top_k)
    expected = mix_with_loops(experts, x, expert_ids, weights)
    torch.testing.assert_close(experts(x, expert_ids, weights).double(), expected, rtol=1e-5, atol=1e-4)


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


@pytest.mark.parametrize(
    ("num_groups", "num_chosen", "top_k", "best_per_group"), [(1, 1, 5, 1), (4, 2, 5, 1), (4, 2, 5, 2), (6, 6, 12, 2)]
)
def test_experts_of_the_best_groups(num_groups, num_chosen, top_k, best_per_group):
    choice = normal(30, 12)
    found = choose_in_groups(choice, top_k, num_groups, num_chosen, best_per_group)
    for row, ids in zip(choice.tolist(), found.tolist(), strict=True):
        assert ids == choose_with_loops(row, top_k, num_groups, num_chosen, best_per_group)
