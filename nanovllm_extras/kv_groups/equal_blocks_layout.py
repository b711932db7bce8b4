"""The layout of models whose K and V have two shapes, with block tables for each group of layers.

`assembly.py` chooses it if `why_one_table` finds no reason against it, and `ShapesLayout` otherwise. `equal_blocks.py`
says where the layers are in a block. The model and the attention backends do not depend on it: each layer gets a view
of the KV cache, and slots and block tables with the numbers of pieces in this view (`Pieces`). A CUDA graph records how
they are computed, too.

With several ranks, each number of heads is divided by itself, and ranks share heads of which there are too few. All
ranks then have blocks of the same layout, that of their share:

    Gemma 4 31B          16 heads of 256 with a window     4 heads of 512     a block: 10 layers, or 5 with a window
    each of 8 ranks       2 heads of 256                   1 head of 512      a block: 10 layers, or 10 with a window
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.kv_groups.equal_blocks import BlockLayout, lay_out
from nanovllm_extras.kv_groups.grouped_layout import GroupedLayout, OfGroups
from nanovllm_extras.kv_groups.layer_groups import LayerPlace
from nanovllm_extras.machine.one_thread import on_one_thread
from nanovllm_extras.memory.grouped_tables import GroupedMetadata
from nanovllm_extras.models.layer_inputs import LayerInputs


class EqualBlocksLayout(GroupedLayout):
    """The KV cache has rows, in which each layer has pieces for K and V."""

    def make_kv_caches(self, backends: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> list[KVCache]:
        """Return the cache, with rows of equal blocks instead of layers."""
        self.block_size: int = backends[0].block_size
        self.block_layout = lay_out(self.shape.kv_groups, self.block_size)
        self.piece_shapes = tuple([backend.kv_cache_shape(1, 1)[3:] for backend in backends])
        layout: Any = self.block_layout  # it defines the shape of a block, as backends do
        return [KVCache(layout, layout.num_rows, self.cache_dtype(backends[0], dtype), device)]

    def make_layer_inputs(self, caches: list[KVCache]) -> LayerInputs:
        full = [group.options.window for group in self.shape.kv_groups].index(None)
        shapes = (full, *[1 - full] * (self.num_tables - 1))
        return Pieces(self.layer_groups.places, self.block_layout, self.block_size, self.piece_shapes, shapes)


class Pieces(OfGroups):
    """What the layers of each group need to find their pieces.

    piece_shapes: of each shape of K and V, [block_size, num_kv_heads, head_dim]
    shapes: of each group, the number of its shape
    """

    def __init__(
        self,
        places: tuple[LayerPlace, ...],
        layout: BlockLayout,
        block_size: int,
        piece_shapes: tuple[tuple[int, ...], ...],
        shapes: tuple[int, ...],
    ) -> None:
        super().__init__(places)
        self.layout, self.block_size, self.piece_shapes, self.shapes = layout, block_size, piece_shapes, shapes

    def spread(self, metadata: GroupedMetadata) -> list[AttentionMetadata]:
        """Return the metadata for the layers of each group, with numbers of pieces instead of blocks."""
        return on_one_thread(self.number, metadata)

    def number(self, metadata: GroupedMetadata) -> list[AttentionMetadata]:
        per_row = map(self.layout.pieces_per_row, self.shapes)
        return [number_pieces(one, n, self.block_size) for one, n in zip(metadata.of_groups(), per_row, strict=True)]

    def caches_of(self, kv_cache: Tensor) -> list["LayersInBlocks"]:
        """Return what the layers of each shape read instead of the KV cache."""
        return [LayersInBlocks(kv_cache, self, shape) for shape in range(len(self.piece_shapes))]


class LayersInBlocks:
    """`layers[:, i]` is the part of the KV cache in which layer `i` of a shape has its K and V: [2, num_pieces, …]."""

    def __init__(self, kv_cache: Tensor, pieces: Pieces, shape: int) -> None:
        self.tensor = kv_cache
        self.layout = pieces.layout
        self.shape = shape
        self.piece_shape = pieces.piece_shapes[shape]

    def __getitem__(self, index: tuple[slice, int]) -> Tensor:
        layer = index[1] % self.layout.layers_per_block[self.shape]
        return self.layout.view(self.tensor, self.shape, layer, self.piece_shape)


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
