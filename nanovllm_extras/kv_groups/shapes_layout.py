"""The layout of models whose K and V have several shapes, with one block table for all layers.

If each group of layers has a block table of its own, the layout is that of `equal_blocks_layout.py`.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.execution.layouts import Layout
from nanovllm_extras.models.layer_inputs import LayerInputs


class ShapesLayout(Layout):
    """A KV cache for each shape."""

    def make_kv_caches(self, backends: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> list[KVCache]:
        """Return the caches of all shapes, each with its part of every block."""
        pairs = zip(backends, self.shape.kv_groups, strict=True)
        return [KVCache(one, group.num_layers, self.cache_dtype(one, dtype), device) for one, group in pairs]

    def make_layer_inputs(self, caches: list[KVCache]) -> LayerInputs:
        return AllShapes(caches)


class AllShapes(LayerInputs):
    """The KV caches of all shapes."""

    def __init__(self, caches: list[KVCache]) -> None:
        self._caches = caches

    def of(self, metadata: AttentionMetadata, kv_cache: Tensor) -> tuple[AttentionMetadata, tuple[Tensor, ...]]:
        return metadata, tuple([cache.tensor for cache in self._caches])
