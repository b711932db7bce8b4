"""SmolLM3 (https://huggingface.co/blog/smollm3): Llama's decoder, in which every fourth layer does not rotate.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + mlp(norm(x)) ] → norm → logits

A layer without rotary positions (NoPE, https://arxiv.org/abs/2501.18795) attends in the same way to near and to distant
tokens. It is Llama's layer with a cosine of one and a sine of zero, so Llama's fast versions compute it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanovllm.checks import check_bool, check_int
from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.layers.basic import Rotary
from nanovllm.models.qwen3 import refuse
from nanovllm_extras.models.decoder import CausalLM, DecoderModel
from nanovllm_extras.models.layer_inputs import metadata_of
from nanovllm_extras.models.llama import LlamaDecoderLayer
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_common, read_rope, refuse_partial_rotary
from nanovllm_extras.models.window_layers import FULL, SLIDING, layer_types_of, read_windows


@dataclass(frozen=True)
class SmolLM3Config(NetworkConfig):
    """`rotated_layers` says of each layer whether it rotates queries and keys."""

    rotated_layers: tuple[bool, ...] = ()


def read_smollm3_config(raw: RawConfig) -> SmolLM3Config:
    common = read_common(raw, 32768, num_key_value_heads=4, tie_word_embeddings=True)
    refuse_partial_rotary(raw)
    rotated_layers = read_rotated_layers(raw)
    has_windows = bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None
    default_types = [FULL if is_rotated or not has_windows else SLIDING for is_rotated in rotated_layers]
    types = layer_types_of(raw, default_types)
    windows = {} if set(types) == {FULL} else read_windows(types, raw.get("sliding_window"))
    rope = read_rope(raw, common["head_dim"], common["max_position_embeddings"], theta=2_000_000.0)
    mlp_bias = raw.get("mlp_bias") or False
    check_bool("config.json: mlp_bias", mlp_bias)
    return SmolLM3Config(**common, **windows, rope=rope, mlp_bias=mlp_bias, rotated_layers=rotated_layers)


def read_rotated_layers(raw: RawConfig) -> tuple[bool, ...]:
    """Read which layers rotate: where `no_rope_layers` has a 1, or else all but every `no_rope_layer_interval`-th."""
    num_layers, given = raw["num_hidden_layers"], raw.get("no_rope_layers")
    if given is None:
        interval = raw.get("no_rope_layer_interval", 4)
        check_int("config.json: no_rope_layer_interval", interval, 1)
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    if len(given) < num_layers:
        raise ValueError(
            f"no_rope_layers must have one entry for each of the {num_layers} layers, config.json has {len(given)}"
        )
    for one in given:
        refuse("no_rope_layers", one, (0, 1))
    return tuple(bool(one) for one in given[:num_layers])


class ZeroRotary(Rotary):
    """The angles of a layer that does not rotate: zero for all positions."""

    def __init__(self, rotary_dim: int) -> None:
        nn.Module.__init__(self)
        self.num_angles = rotary_dim // 2

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ones and zeros: [num_tokens] int -> two of [num_tokens, 1, rotary_dim / 2]"""
        shape = (len(positions), 1, self.num_angles)
        return positions.new_ones(shape, dtype=dtype), positions.new_zeros(shape, dtype=dtype)


class SmolLM3Model(DecoderModel):
    def __init__(self, config: SmolLM3Config, backend: TorchAttention, layer_class: type[nn.Module]) -> None:
        super().__init__(config, backend, layer_class)
        self.no_rotary = ZeroRotary(config.head_dim)
        self.rotated_layers = config.rotated_layers

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        angles, no_angles = self.rotary(positions, x.dtype), self.no_rotary(positions, x.dtype)
        for i, (layer, is_rotated) in enumerate(zip(self.layers, self.rotated_layers, strict=True)):
            cos, sin = angles if is_rotated else no_angles  # [num_tokens, 1, head_dim / 2] each
            x = layer(x, cos, sin, kv_cache[:, i], metadata_of(metadata, i))
        return self.norm(x)  # [num_tokens, hidden_size]


class SmolLM3ForCausalLM(CausalLM):
    read_config = staticmethod(read_smollm3_config)
    layer_class = LlamaDecoderLayer
    model_class = SmolLM3Model
