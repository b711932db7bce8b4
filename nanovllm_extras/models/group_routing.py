"""DeepSeek's routing rules: experts come in groups, and a token chooses only among those of its best groups.

Groups lie on different machines when the model is trained, so few groups mean little traffic (DeepSeek-V2,
https://arxiv.org/abs/2405.04434, and DeepSeek-V3, https://arxiv.org/abs/2412.19437). The two rules differ:

              score of an expert    what is compared         score of a group         weights of the chosen
    V2        softmax(logits)       the score                its best expert's        their scores
    V3        sigmoid(logits)       the score plus a bias    its two best experts'    their scores; divided by their sum
                                    of the expert                                     if the config says so
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nanovllm_extras.models.moe import Router


class SigmoidRouter(Router):
    """x: [num_tokens, hidden_size] -> scores between 0 and 1: [num_tokens, num_experts] float32

    The bias of each expert evens out how often experts are chosen: training raises it where an expert has little to do.
    """

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__(hidden_size, num_experts)
        self.e_score_correction_bias = nn.Parameter(torch.empty(num_experts))  # [num_experts] float32

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Keep the bias in float32 in `model.to(dtype)`: biases differ in digits that bfloat16 does not have."""
        super()._apply(fn, recurse)
        self.e_score_correction_bias.data = self.e_score_correction_bias.data.float()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sigmoid()


def choose_in_groups(
    choice: torch.Tensor, top_k: int, num_groups: int, num_chosen_groups: int, best_per_group: int
) -> torch.Tensor:
    """Choose experts. choice: [num_tokens, num_experts] -> the best of the best groups: [num_tokens, top_k] int64

    A group's score is the sum of its `best_per_group` best experts' scores.
    """
    groups = choice.unflatten(-1, (num_groups, -1))  # [num_tokens, num_groups, experts per group]
    group_scores = groups.topk(best_per_group).values.sum(-1)  # [num_tokens, num_groups]
    chosen = group_scores.topk(num_chosen_groups).indices  # [num_tokens, num_chosen_groups]
    is_left_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, chosen, False)
    return groups.masked_fill(is_left_out[..., None], -torch.inf).flatten(-2).topk(top_k).indices


def route_by_softmax_in_groups(
    logits: torch.Tensor, top_k: int, num_groups: int, num_chosen_groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route as V2's `group_limited_greedy`. logits: [num_tokens, num_experts] -> as `route_by_softmax`"""
    scores = logits.softmax(-1)
    expert_ids = choose_in_groups(scores, top_k, num_groups, num_chosen_groups, best_per_group=1)
    return expert_ids, scores.gather(-1, expert_ids)


def route_by_sigmoid_in_groups(
    scores: torch.Tensor, bias: torch.Tensor, top_k: int, num_groups: int, num_chosen_groups: int, is_normalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route as V3. scores: [num_tokens, num_experts]; bias: [num_experts] -> as `route_by_softmax`"""
    expert_ids = choose_in_groups(scores + bias, top_k, num_groups, num_chosen_groups, best_per_group=2)
    weights = scores.gather(-1, expert_ids)  # [num_tokens, top_k]
    if is_normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return expert_ids, weights
