"""`CachedLayers`: in which tensor, and at which block table, each layer of a model finds its K and V.

    K and V of    block tables                KV caches
    one shape     one for all layers          one, with all layers that have K and V
    one shape     one for each group          one, with `layers_per_block` layers, which all groups use
    two shapes    one for all layers          one for each shape, with the same block ids (`models/groups.py`)
    two shapes    one for each group          one, of equal blocks (`equal_blocks.py`)

Models and attention backends do not depend on this: each layer gets a view of its K and V, and the metadata of its
group. In equal blocks, slots and block tables have the numbers of pieces in this view instead of blocks. A CUDA graph
records how they are computed, too.

With several ranks, each has its heads of all groups, in the same blocks as the others. Rank 0 decides which sequence
owns which blocks, and sends the slots and block tables of all groups with each batch (`parallel/messages.py`):

    K and V of a sequence        rank 0                rank 1
    group 0, 4 heads             heads 0, 1            heads 2, 3            at the block table of group 0
    group 1, 4 heads             heads 0, 1            heads 2, 3            at the block table of group 1

If K and V have two shapes, each number of heads is divided by itself, and ranks share heads of which there are too few.
All ranks then have blocks of the same layout, that of their share:

    Gemma 4 31B          16 heads of 256 with a window     4 heads of 512     a block: 10 layers, or 5 with a window
    each of 8 ranks       2 heads of 256                   1 head of 512      a block: 10 layers, or 10 with a window
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm_extras.execution.equal_blocks import BlockLayout, lay_out
from nanovllm_extras.execution.layer_groups import LayerPlace, group_layers, has_groups
from nanovllm_extras.machine.one_thread import on_one_thread
from nanovllm_extras.models.layer_inputs import LayerCaches
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.records.grouped_metadata import GroupedMetadata


class CachedLayers:
    """The K and V of the layers of a model, or of a rank's share of it. `num_kv_blocks` counts one for each table."""

    block_layout: BlockLayout | None = None
    """How equal blocks are divided, if K and V have two shapes and each group has block tables of its own."""

    def __init__(self, config: Config, shape: Any) -> None:
        self.shape = shape
        self.groups = group_layers(shape) if has_groups(config, shape) else None
        self.num_tables = 1 if self.groups is None else self.groups.num_groups
        self.places: tuple[LayerPlace, ...] = ()
        """Where each layer finds its K and V; empty if that is `[:, layer]` of one cache."""
        if self.groups is not None:
            self.places = self.groups.places
        elif shape.kv_groups:
            self.places = tuple([LayerPlace(0, place.layer, place.group) for place in shape.kv_places])
        self.caches: list[KVCache] = []
        self._viewed: list[Tensor] = []  # the tensors of which `_views` are
        self._views = LayerCaches({})

    def make_caches(
        self, backends: tuple[TorchAttention, ...], dtype: torch.dtype, device: torch.device
    ) -> list[KVCache]:
        """Return the KV caches. backends: one for each shape of K and V"""
        kv_groups = self.shape.kv_groups
        divided: list[tuple[Any, int]]  # by what the blocks of a cache are divided, and into how many layers, or rows
        if self.groups is not None and kv_groups:
            self.block_size = backends[0].block_size
            self.block_layout = layout = lay_out(kv_groups, self.block_size)
            shapes = {place.group: place.shape for place in self.places}
            self.pieces_per_row = [layout.pieces_per_row(shapes[group]) for group in range(self.num_tables)]
            self.piece_shapes = [backend.kv_cache_shape(1, 1)[3:] for backend in backends]
            divided = [(layout, layout.num_rows)]
        elif self.groups is not None:
            divided = [(backends[0], self.groups.layers_per_block)]
        elif kv_groups:
            divided = [(backend, group.num_layers) for backend, group in zip(backends, kv_groups, strict=True)]
        else:
            num_other_layers = 0 if self.shape.state_shape is None else self.shape.state_shape.num_layers
            divided = [(backends[0], self.shape.num_hidden_layers - num_other_layers)]
        dtypes = [getattr(backend, "kv_cache_dtype", None) or dtype for backend in backends]
        self.caches = [KVCache(*one, of_cache, device) for one, of_cache in zip(divided, dtypes, strict=False)]
        return [*self.caches]

    def inputs_of(self, metadata: AttentionMetadata) -> tuple[AttentionMetadata | list[AttentionMetadata], LayerCaches]:
        """Return what the layers read if they have `places`: the metadata of each layer, and its K and V.

        Without groups, or in a step over null blocks only, all layers have the same metadata.
        """
        caches = self.views()
        if not isinstance(metadata, GroupedMetadata):
            return metadata, caches
        groups = metadata.of_groups()
        if self.block_layout is not None:
            groups = on_one_thread(self.number_pieces, groups)
        return [groups[place.group] for place in self.places], caches

    def views(self) -> LayerCaches:
        """Return the K and V of each layer. The views are made again only after blocks have been allocated."""
        tensors = [cache.tensor for cache in self.caches]
        if list(map(id, tensors)) != list(map(id, self._viewed)):
            self._viewed = tensors
            self._views = LayerCaches({layer: self.view(place) for layer, place in enumerate(self.places)})
        return self._views

    def view(self, place: LayerPlace) -> Tensor:
        """Return the K and V of a layer in all blocks: [2, …], and for the rest as its attention backend defines it."""
        if self.block_layout is None:
            return self.caches[place.shape].tensor[:, place.layer]
        tensor, piece_shape = self.caches[0].tensor, self.piece_shapes[place.shape]
        return self.block_layout.view(tensor, place.shape, place.layer, piece_shape)

    def number_pieces(self, groups: list[AttentionMetadata]) -> list[AttentionMetadata]:
        """Return the metadata of each group with numbers of pieces instead of blocks."""
        pairs = zip(groups, self.pieces_per_row, strict=True)
        return [number_pieces(one, per_row, self.block_size) for one, per_row in pairs]


def number_pieces(metadata: AttentionMetadata, per_row: int, block_size: int) -> AttentionMetadata:
    """Return the metadata of a group if block `i` is piece `i * per_row`."""
    if per_row == 1:
        return metadata
    slots = slots_of_pieces(metadata.slot_mapping, per_row, block_size)
    return replace(metadata, slot_mapping=slots, block_tables=metadata.block_tables * per_row)


def slots_of_pieces(slots: Tensor, per_row: int, block_size: int) -> Tensor:
    """Return the slots if block `i` is piece `i * per_row`. slots: [num_tokens] int32 -> as slots

    With blocks of 4 tokens and 2 pieces, slot 30 (block 7, token 2) becomes slot 58 (piece 14, token 2).
    """
    return slots + slots // block_size * (block_size * (per_row - 1))
