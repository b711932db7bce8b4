"""Qwen3.5 and 3.6 with experts, text: Qwen3.5-35B-A3B, 397B-A17B.

    token ids → embedding → num_layers × [ x + mixer(norm(x)),  x + experts(norm(x)) ] → norm → lm_head → logits

The mixers are those of `qwen3_5.py`, and the experts are those of `qwen3_moe.py`. Each token also goes through one more
expert, the shared one, whose output is multiplied by a gate between 0 and 1.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from nanovllm.layers.basic import Linear
from nanovllm_extras.models.gated_mlp import GatedMLP
from nanovllm_extras.models.moe import MoeConfig, read_experts, read_int
from nanovllm_extras.models.qwen3_5 import Qwen3_5Config, Qwen3_5DecoderLayer, Qwen3_5ForCausalLM, read_fields
from nanovllm_extras.models.qwen3_moe import Qwen3MoeBlock
from nanovllm_extras.models.raw_config import RawConfig

STORED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


@dataclass(frozen=True)
class Qwen3_5MoeConfig(Qwen3_5Config, MoeConfig):
    """`intermediate_size` is the shared expert's."""


def read_qwen3_5_moe_config(raw: RawConfig) -> Qwen3_5MoeConfig:
    experts = read_experts(raw, ("num_experts", "num_local_experts"), 256, 8)
    experts["moe_intermediate_size"] = read_int(raw, "moe_intermediate_size", 512)
    shared_size = read_int(raw, "shared_expert_intermediate_size", 512)
    fields = read_fields({**raw, "intermediate_size": shared_size}, num_key_value_heads=2)
    return Qwen3_5MoeConfig(**fields, **experts, norm_topk_prob=True)


class Qwen3_5MoeBlock(Qwen3MoeBlock):
    def __init__(self, config: Qwen3_5MoeConfig) -> None:
        super().__init__(config)
        self.shared_expert = GatedMLP(config.hidden_size, config.intermediate_size)
        self.shared_expert_gate = Linear(config.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)  # [num_tokens, hidden_size]
        return super().forward(x) + shared


class Qwen3_5MoeDecoderLayer(Qwen3_5DecoderLayer):
    def make_mlp(self, config: Qwen3_5MoeConfig) -> nn.Module:
        return Qwen3_5MoeBlock(config)


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    read_config = staticmethod(read_qwen3_5_moe_config)
    layer_class = Qwen3_5MoeDecoderLayer

    def rename_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the network, by their names, that one tensor of a checkpoint holds.

        The weights of all experts of a layer may be one tensor: [num_experts, out, in]
        """
        match = STORED_EXPERTS.fullmatch(name)
        if match is None:
            yield name, tensor
            return
        path, projection = match.groups()
        for i, expert in enumerate(tensor):
            gate_and_up = zip(("gate", "up"), expert.chunk(2), strict=True)
            for part, rows in [("down", expert)] if projection == "down" else gate_and_up:
                yield f"{path}.{i}.{part}_proj.weight", rows


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """The same network, from a checkpoint that has a vision part too."""
