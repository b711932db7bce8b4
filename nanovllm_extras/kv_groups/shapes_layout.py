"""The layout of models whose K and V have several shapes, with one block table for all layers.

If each group of layers has a block table of its own, the layout is that of `equal_blocks_layout.py`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.all_options import Config
from nanovllm_extras.kernels.choices import choose
from nanovllm_extras.kv_groups.groups import GroupedKVCache
from nanovllm_extras.layer_inputs import LayerInputs
from nanovllm_extras.layouts import Layout


class ShapesLayout(Layout):
    """An attention backend and a KV cache for each shape. The self-check only runs networks with one shape."""

    is_checked = False

    def make_backends(self, device: torch.device, dtype: torch.dtype) -> tuple[tuple[Any, ...], str]:
        return choose_for_shapes(self.config, self.shape, device, dtype)

    def backend_of_layers(self, backends: tuple[Any, ...]) -> Any:
        return backends

    def describe(self, shape: Any, dtype: torch.dtype) -> str:
        return describe_shapes(shape)

    def make_kv_cache(self, backends: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> GroupedKVCache:
        """Return the caches of all shapes, each with its part of every block."""
        pairs = zip(backends, self.shape.kv_groups, strict=True)
        return GroupedKVCache(tuple([KVCache(one, group.num_layers, dtype, device) for one, group in pairs]))

    def make_layer_inputs(self, kv_cache: GroupedKVCache) -> LayerInputs:
        return AllShapes(kv_cache)


def choose_for_shapes(
    config: Config, shape: Any, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Any, ...], str]:
    """Return the attention backend of each shape, with the same block size, and why they were chosen."""
    chosen: list[tuple[Any, str]] = []
    for group in shape.kv_groups:
        sizes = {"head_dim": group.head_dim, "num_key_value_heads": group.num_kv_heads}
        of_group = replace(shape, **sizes, attention_options=(group.options,))
        chosen.append(choose(config, device, dtype, of_group))
        config = replace(config, block_size=chosen[0][0].block_size)
    reasons = " and ".join(dict.fromkeys(reason for _, reason in chosen))
    return tuple([backend for backend, _ in chosen]), reasons


def describe_shapes(shape: Any) -> str:
    return f"groups of layers with K and V: {', '.join([str(group) for group in shape.kv_groups])}; "


class AllShapes(LayerInputs):
    """The KV caches of all shapes."""

    def __init__(self, kv_cache: GroupedKVCache) -> None:
        self._kv_cache = kv_cache

    def of(self, metadata: AttentionMetadata, kv_cache: Tensor) -> tuple[AttentionMetadata, tuple[Tensor, ...]]:
        return metadata, self._kv_cache.tensors
