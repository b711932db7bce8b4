"""The layer of Gemma 4 26B-A4B: a mixture of experts beside the dense feed-forward network, and the sum of both.

x → norm → mlp → norm ────────────┐
x → norm → experts → norm ────────┴─ sum        experts and their weights: router(x)
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.models.gated_mlp import GatedMLP
from nanovllm_extras.models.gemma4_config import Gemma4Config
from nanovllm_extras.models.gemma4_layers import Gemma4DecoderLayer, normalised
from nanovllm_extras.models.gpt_oss import OnceRoundedRMSNorm
from nanovllm_extras.models.moe import Experts, Router, route_by_softmax

STORED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")


class Gemma4Router(nn.Module):
    """Normalises its input, and gives each expert's weight a factor of its own."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        self.eps, self.top_k = config.rms_norm_eps, config.num_experts_per_tok
        self.proj = Router(config.hidden_size, config.num_experts)
        self.scale = nn.Parameter(torch.empty(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.empty(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route x: [num_tokens, hidden_size] -> (expert_ids, weights), [num_tokens, top_k] each"""
        scaled = normalised(x, self.eps) * self.scale * x.shape[-1] ** -0.5
        expert_ids, weights = route_by_softmax(self.proj(scaled), self.top_k, is_normalised=True)
        return expert_ids, weights * self.per_expert_scale[expert_ids]


class Gemma4MoeDecoderLayer(Gemma4DecoderLayer):
    def __init__(self, config: Gemma4Config, backends: tuple[TorchAttention, ...], layer: int) -> None:
        super().__init__(config, backends, layer)
        sizes = config.hidden_size, config.moe_intermediate_size, config.hidden_act
        self.router = Gemma4Router(config)
        self.experts = Experts(GatedMLP(*sizes) for _ in range(config.num_experts))
        self.post_feedforward_layernorm_1 = OnceRoundedRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm_2 = OnceRoundedRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm_2 = OnceRoundedRMSNorm(config.hidden_size, config.rms_norm_eps)

    def feed_forward(self, x: Tensor) -> Tensor:
        dense = self.post_feedforward_layernorm_1(super().feed_forward(x))
        mixed = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x))
        return dense + self.post_feedforward_layernorm_2(mixed)  # [num_tokens, hidden_size]


def split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each expert's tensors, by their names in the network, of a tensor that holds those of all experts.

    `gate_up_proj` is [num_experts, 2 * moe_intermediate_size, hidden_size], the rows of the gate first. `down_proj` is
    [num_experts, hidden_size, moe_intermediate_size]. Any other tensor is yielded as it is.
    """
    match = STORED_EXPERTS.fullmatch(name)
    if match is None:
        yield name, tensor
        return
    path, projection = match.groups()
    for i, rows in enumerate(tensor):
        parts = {"down": rows} if projection == "down" else dict(zip(("gate", "up"), rows.chunk(2), strict=True))
        for part, weight in parts.items():
            yield f"{path}.{i}.{part}_proj.weight", weight
