"""LFM2 (https://huggingface.co/LiquidAI/LFM2-1.2B): most layers mix a token with the two before it by a convolution.

    token ids → embedding → num_layers × [ x + mixer(norm(x)),  x + mlp(norm(x)) ] → norm → lm_head → logits

Some layers attend: they are Qwen3's, and so are their fast versions. The others have one gate before the convolution
and one after it, and keep its newest inputs as their state:

    b, c, v = in_proj(x)        y = out_proj(c * convolution(b * v))
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanovllm.checks import check_bool, check_int, check_number
from nanovllm.layers.attention import TorchAttention
from nanovllm.layers.basic import GatedMLP, Linear, RMSNorm
from nanovllm.models.qwen3 import Qwen3DecoderLayer, refuse
from nanovllm_extras.models.decoder import CausalLM, DecoderModel, LayerClass
from nanovllm_extras.models.gated_delta import CausalConv, groups_of, read_states
from nanovllm_extras.models.layer_inputs import StateCaches, StateMetadata, StateShape
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_common, read_rope, refuse_partial_rotary
from nanovllm_extras.models.window_layers import FULL, layer_types_of
from nanovllm_extras.options.option_checks import first_given

CONV = "conv"
STORED_NAMES = {  # names of the checkpoint, and of the network's modules
    r"\.operator_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.self_attn\.([qk])_layernorm\.": r".self_attn.\1_norm.",
    r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
    r"\.feed_forward\.w1\.": ".mlp.gate_proj.",
    r"\.feed_forward\.w3\.": ".mlp.up_proj.",
    r"\.feed_forward\.w2\.": ".mlp.down_proj.",
    r"^(model\.)?embedding_norm\.": "model.norm.",
}


@dataclass(frozen=True)
class Lfm2Config(NetworkConfig):
    """By the names of config.json. `intermediate_size` is the size that the feed-forward networks have."""

    layer_types: tuple[str, ...] = ()
    conv_L_cache: int = 3
    conv_bias: bool = False


def read_lfm2_config(raw: RawConfig) -> Lfm2Config:
    """Read config.json. Missing fields get the defaults of transformers, which also knows fields by older names."""
    tied = first_given(raw.get("tie_embedding"), raw.get("tie_word_embeddings"))
    size = first_given(raw.get("block_ff_dim"), raw.get("intermediate_size"))
    raw = {**raw, "rms_norm_eps": raw.get("norm_eps"), "tie_word_embeddings": tied, "intermediate_size": size}
    common = read_common(raw, 128_000, 1e-5, num_key_value_heads=8, tie_word_embeddings=True)
    common["attention_bias"] = common["qkv_bias"] = common["o_bias"] = False  # whatever the file says
    refuse("hidden_act", common["hidden_act"], ("silu", "swish"))
    for name in ("block_use_swiglu", "use_pos_enc"):
        refuse(name, raw.get(name), (True, None))
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        refuse(name, raw.get(name), (common["hidden_size"], None))
    refuse_partial_rotary(raw)
    width, conv_bias = first_given(raw.get("conv_L_cache"), 3), raw.get("conv_bias") or False
    check_int("config.json: conv_L_cache", width, 2)
    check_bool("config.json: conv_bias", conv_bias)
    types = read_layer_types(raw, common["num_hidden_layers"])
    common["intermediate_size"] = read_intermediate_size(raw, common["intermediate_size"])
    return Lfm2Config(
        **common,
        rope=read_rope(raw, common["head_dim"], common["max_position_embeddings"], theta=1_000_000.0),
        layer_types=types,
        conv_L_cache=width,
        conv_bias=conv_bias,
        state_shape=StateShape(num_layers=types.count(CONV), conv=(width - 1, common["hidden_size"])),
    )


def read_layer_types(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """Read the type of each layer. Without `layer_types`, the layers in `full_attn_idxs` attend, or else all."""
    attending = first_given(raw.get("full_attn_idxs"), range(num_layers))
    types = layer_types_of(raw, [FULL if i in attending else CONV for i in range(num_layers)])
    for one in types:
        refuse("layer_types", one, (CONV, FULL))
    if len(set(types)) < 2:
        raise ValueError(f"layer_types must name both {CONV} and {FULL}, config.json has {types[0]} for all layers")
    return tuple(types)


def read_intermediate_size(raw: RawConfig, size: int) -> int:
    """Compute the size of the feed-forward networks. The file has one and a half times as much, not rounded yet."""
    is_adjusted = first_given(raw.get("block_auto_adjust_ff_dim"), True)
    check_bool("config.json: block_auto_adjust_ff_dim", is_adjusted)
    if not is_adjusted:
        return size
    factor, multiple = raw.get("block_ffn_dim_multiplier", 1.0), first_given(raw.get("block_multiple_of"), 256)
    check_int("config.json: block_multiple_of", multiple, 1)
    size = int(2 * size / 3)
    if factor is None:  # as in transformers, nothing is rounded then
        return size
    check_number("config.json: block_ffn_dim_multiplier", factor, 0, open_low=True)
    return -(-int(factor * size) // multiple) * multiple


class ShortConv(nn.Module):
    """The mixer of most layers."""

    needs_rounds = True  # drafts are computed in rounds, which the host finds (`execution/graph_inputs.py`)

    def __init__(self, config: Lfm2Config) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.conv_bias
        num_channels = config.state_shape.conv[1]  # of a rank's share
        self.stacked = {"in_proj": (num_channels,) * 3}
        """The tensor that stacks b, c and v: a rank has its own channels of each (`weights/cut.py`)."""
        self.in_proj = Linear(size, 3 * num_channels, bias)
        self.conv = CausalConv(num_channels, config.conv_L_cache, bias)
        self.out_proj = Linear(num_channels, size, bias)

    def forward(self, x: Tensor, states: Tensor, metadata: StateMetadata) -> Tensor:
        """Mix tokens: [num_tokens, hidden_size] -> the same shape. Reads and writes the sequences' states.

        states: [num_slots + 1, width - 1, num_channels]
        """
        b, c, v = self.in_proj(x).chunk(3, dim=-1)  # [num_tokens, num_channels] each
        inputs = b * v
        mixed = torch.empty_like(inputs)
        for seqs, rows in groups_of(metadata):
            slots, sources = metadata.state_slots[seqs], metadata.state_sources[seqs]
            tail = read_states(states, sources, metadata.is_first[seqs])  # [num_seqs, width - 1, num_channels]
            out, states[slots] = self.conv(inputs[rows].unflatten(0, (len(slots), -1)), tail)
            mixed[rows] = out.flatten(0, 1)
        return self.out_proj(c * mixed)


class Lfm2ConvLayer(nn.Module):
    """A layer with a short convolution. Its signature is that of layers with attention, which get K and V."""

    def __init__(self, config: Lfm2Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.conv = ShortConv(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, states: Tensor, metadata: StateMetadata) -> Tensor:
        x = x + self.conv(self.input_layernorm(x), states, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))  # [num_tokens, hidden_size]


def make_layer(config: Lfm2Config, backend: TorchAttention, layer: int) -> nn.Module:
    return Lfm2ConvLayer(config) if config.layer_types[layer] == CONV else Qwen3DecoderLayer(config, backend)


class Lfm2Model(DecoderModel):
    def __init__(self, config: Lfm2Config, backend: TorchAttention, layer_class: LayerClass) -> None:
        super().__init__(config, backend, layer_class)
        self.types = config.layer_types
        self.places = [config.layer_types[:i].count(kind) for i, kind in enumerate(config.layer_types)]

    def forward(  # its layers have caches of two kinds
        self, input_ids: Tensor, positions: Tensor, metadata: StateMetadata, caches: StateCaches
    ) -> Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        cos, sin = self.rotary(positions, x.dtype)  # [num_tokens, 1, head_dim / 2] each
        for layer, kind, place in zip(self.layers, self.types, self.places, strict=True):
            x = layer(x, cos, sin, caches.conv[place] if kind == CONV else caches.kv[:, place], metadata)
        return self.norm(x)  # [num_tokens, hidden_size]


class Lfm2ForCausalLM(CausalLM):
    read_config = staticmethod(read_lfm2_config)
    layer_class = staticmethod(make_layer)
    model_class = Lfm2Model

    def rename_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a tensor of a checkpoint by its name in the network."""
        for stored, ours in STORED_NAMES.items():
            name = re.sub(stored, ours, name)
        yield name, tensor
