"""Gemma 4, text (https://ai.google.dev/gemma/docs/core): E2B, E4B, 31B, and 26B-A4B with experts.

    token ids → embedding · sqrt(hidden_size) → num_layers × layer → norm → logits, perhaps soft-capped
    layer     x + norm(attention(norm(x))),  x + norm(mlp(norm(x))),  x + norm(up(act(gate(x)) · e)),  x · scalar

As in Gemma 3, most layers see a window only, and each kind of layer has rotary positions of its own. New are:

    groups of K and V     Layers that see all tokens have larger heads, so K and V have two shapes (`groups.py`).
    shared K and V        The last layers attend to the K and V of the last earlier layer of their kind.
    K as V                In large models, the projection of the keys gives the values too, in layers that see all.
    per-layer embeddings  Each layer adds what depends on its own embedding e of the token, and on the input x.
    experts               In 26B-A4B, each layer has a mixture of experts beside its feed-forward network.

The vision and audio parts of a checkpoint are not loaded.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.layers.basic import Embedding, Linear
from nanovllm_extras.models.decoder import DecoderModel, LayerClass
from nanovllm_extras.models.gemma3 import SoftCappedLM
from nanovllm_extras.models.gemma4_config import Gemma4Config, override_ropes, read_gemma4_config
from nanovllm_extras.models.gemma4_layers import Gemma4DecoderLayer
from nanovllm_extras.models.gemma4_moe import Gemma4MoeDecoderLayer, split_experts
from nanovllm_extras.models.gpt_oss import OnceRoundedRMSNorm
from nanovllm_extras.models.layer_inputs import metadata_of
from nanovllm_extras.models.rope import ScaledRotary
from nanovllm_extras.models.window_layers import FULL, SLIDING

OTHER_PARTS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
OF_KV = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


def scaled(embedded: Tensor, size: int) -> Tensor:
    """Multiply embeddings by the square root of `size`, which is rounded to their dtype before."""
    return embedded * torch.tensor(size**0.5, dtype=embedded.dtype)


def make_layer(config: Gemma4Config, backends: tuple[TorchAttention, ...], layer: int) -> Gemma4DecoderLayer:
    return (Gemma4MoeDecoderLayer if config.num_experts else Gemma4DecoderLayer)(config, backends, layer)


class Gemma4Model(DecoderModel):
    local_rotary: ScaledRotary  # of layers with a window, if there are any

    def __init__(self, config: Gemma4Config, backend: Any, layer_class: LayerClass) -> None:
        super().__init__(config, backend, layer_class)
        self.layer_types = config.layer_types
        self.hidden_size, self.size = config.hidden_size, config.hidden_size_per_layer_input
        for name, kind, rope in (("rotary", FULL, config.rope), ("local_rotary", SLIDING, config.local_rope)):
            if kind in config.layer_types:
                head_dim = config.group_of(config.layer_types.index(kind)).head_dim
                setattr(self, name, ScaledRotary(head_dim, rope, config.max_position_embeddings))
        if self.size:
            width = config.num_hidden_layers * self.size
            self.own_vocab_size = config.vocab_size_per_layer_input  # the next table's rows
            self.embed_tokens_per_layer = Embedding(self.own_vocab_size, width)
            self.per_layer_model_projection = Linear(config.hidden_size, width)
            self.per_layer_projection_norm = OnceRoundedRMSNorm(self.size, config.rms_norm_eps)
        self.norm = OnceRoundedRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(  # its layers have angles of two kinds
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Any
    ) -> Tensor:
        x = scaled(self.embed_tokens(input_ids), self.hidden_size)  # [num_tokens, hidden_size]
        own = self.own_embeddings(input_ids, x) if self.size else [None] * len(self.layers)
        angles = {FULL: self.rotary(positions, x.dtype)}
        if SLIDING in self.layer_types:
            angles[SLIDING] = self.local_rotary(positions, x.dtype)
        for i, (layer, kind) in enumerate(zip(self.layers, self.layer_types, strict=True)):
            cos, sin = angles[kind]  # [num_tokens, 1, head_dim / 2] each
            x = layer(x, own[i], cos, sin, kv_cache[:, i], metadata_of(metadata, i))
        return self.norm(x)  # [num_tokens, hidden_size]

    def own_embeddings(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Return the embeddings that each layer adds: [num_layers, num_tokens, hidden_size_per_layer_input]"""
        table = scaled(self.embed_tokens_per_layer(input_ids), self.size)  # [num_tokens, num_layers * size]
        projected = self.per_layer_model_projection(x) * self.hidden_size**-0.5
        table, projected = (t.unflatten(-1, (-1, self.size)) for t in (table, projected))
        both = (self.per_layer_projection_norm(projected) + table) * 2.0**-0.5  # [num_tokens, num_layers, size]
        return both.transpose(0, 1).contiguous()


class Gemma4ForCausalLM(SoftCappedLM):
    read_config = staticmethod(read_gemma4_config)
    override_positions = staticmethod(override_ropes)
    layer_class = staticmethod(make_layer)
    model_class = Gemma4Model

    def __init__(self, config: Gemma4Config, backend: Any) -> None:
        super().__init__(config, backend)
        self.kv_places = config.kv_places

    def rename_stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the network, by their names, that one tensor of a checkpoint holds."""
        return split_experts(name, tensor)

    def is_unused(self, name: str) -> bool:
        """Return whether a tensor belongs to vision or audio, or to the K and V of a layer that shares others."""
        of_kv = OF_KV.match(name)
        return name.startswith(OTHER_PARTS) or (of_kv is not None and not self.kv_places[int(of_kv[1])].is_owner)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The same network, from a checkpoint that has vision and audio parts too."""
