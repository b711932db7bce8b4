"""Mixture of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538): many feed-forward networks side by side,
of which each token passes through a few.

    x → router → logits of all experts → a routing rule → expert_ids, weights: [num_tokens, top_k] → experts → sum

A layer so has many more parameters than it reads for a token. `Router` and `Experts` are the same in all models; the
rules differ: `route_by_softmax` below, DeepSeek's in `group_routing.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checks import check_int
from nanovllm.layers.basic import Linear
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_rope, refuse_partial_rotary
from nanovllm_extras.models.window_layers import SLIDING, read_windows


@dataclass(frozen=True)
class MoeConfig(NetworkConfig):
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 768
    """Of each expert; layers without experts have `intermediate_size`."""
    norm_topk_prob: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that have one feed-forward network instead of experts."""


class Router(Linear):
    """x: [num_tokens, hidden_size] -> logits: [num_tokens, num_experts] float32

    Never rounded to the model's dtype: of two experts with nearly the same logit, rounding would choose one.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def route_by_softmax(logits: torch.Tensor, top_k: int, is_normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Route by logits: [num_tokens, num_experts] -> the `top_k` likeliest experts, and probabilities as weights

    Returns (expert_ids int64, weights float32), [num_tokens, top_k] each. With `is_normalised` a token's weights are
    divided by their sum (Mixtral, https://arxiv.org/abs/2401.04088).
    """
    weights, expert_ids = logits.softmax(-1).topk(top_k)  # [num_tokens, top_k] each
    if is_normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return expert_ids, weights


class Experts(nn.ModuleList):
    """Feed-forward networks, each from [n, hidden_size] to the same shape; checkpoints know them by their numbers.

    Tokens are grouped by expert, so that each expert computes all of its tokens at once, and none that has no token:

        expert_ids  [[2, 0], [0, 1]]    tokens 0 and 1, top_k 2
        pairs       [0, 2, 1, 0]        expert_ids.flatten() is [2, 0, 0, 1]; sorted by expert: positions 1, 2, 3, 0
        counts      [2, 1, 1]           expert 0 computes tokens 0 and 1, expert 1 token 1, expert 2 token 0
    """

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        super().__init__(experts)

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum weight * expert(x). x: [num_tokens, hidden_size]; expert_ids, weights: [num_tokens, top_k] -> as x

        A token's sum runs in float32 in the order of the experts' numbers, whatever other tokens there are.
        """
        top_k = expert_ids.shape[1]
        pairs = expert_ids.flatten().argsort(stable=True)  # [num_tokens * top_k]
        counts = expert_ids.flatten().bincount(minlength=len(self)).tolist()  # [num_experts]
        out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for expert, chosen in zip(self, pairs.split(counts), strict=True):
            if len(chosen):
                tokens = chosen // top_k  # [n], no token twice
                out.index_add_(0, tokens, expert(x[tokens]) * weights.flatten()[chosen, None])
        return out.to(x.dtype)


# ---- reading config.json


def read_experts(raw: RawConfig, fields: tuple[str, ...], default: int, top_k: int) -> dict[str, Any]:
    """Read the number of experts, from the first of `fields` that is given, and how many a token goes through.

    `top_k` is the default of the latter.
    """
    name = next((name for name in fields if raw.get(name) is not None), fields[0])
    num_experts = read_int(raw, name, default)
    found = read_int(raw, "num_experts_per_tok", top_k)
    if found > num_experts:
        raise ValueError(f"num_experts_per_tok must be at most the {num_experts} experts, config.json has {found}")
    return {"num_experts": num_experts, "num_experts_per_tok": found}


def read_int(raw: Mapping[str, Any], name: str, default: int | None = None, minimum: int = 1) -> int:
    """Read an integer, which may only be missing if there is a `default`. Raises ValueError otherwise."""
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise ValueError(f"config.json lacks {name}")
    check_int(f"config.json: {name}", value, minimum)
    return value


def make_config(
    raw: RawConfig, common: dict[str, Any], experts: dict[str, Any], window: int | None, theta: float
) -> MoeConfig:
    """Make the config. All layers have the same `window`, if there is one."""
    refuse_partial_rotary(raw)
    windows = {} if window is None else read_windows([SLIDING] * common["num_hidden_layers"], window)
    rope = read_rope(raw, common["head_dim"], common["max_position_embeddings"], theta)
    return MoeConfig(**common, **experts, rope=rope, **windows)
