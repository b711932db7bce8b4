"""The runner of models whose K and V have two shapes, with block tables for each group of layers.

`assembly.py` makes it if `why_one_table` finds no reason against it, and `GroupRunner` otherwise. `equal_blocks.py`
says where the layers are in a block. The model and the attention backends do not depend on it: each layer gets a view
of the KV cache, and slots and block tables with the numbers of pieces in this view.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.extras.kernels.cpu.threads import on_one_thread
from nanovllm.extras.kv_groups.equal_blocks import lay_out
from nanovllm.extras.kv_groups.group_runner import ShapesRunner
from nanovllm.extras.kv_groups.grouped_runner import GroupedLayersRunner, pass_groups
from nanovllm.extras.kv_groups.grouped_tables import GroupedMetadata
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import AttentionMetadata


class EqualBlocksRunner(GroupedLayersRunner, ShapesRunner):
    """Runs steps as `GroupedLayersRunner` does. The KV cache has rows, in which each layer has pieces for K and V."""

    def make_kv_cache(self) -> KVCache:
        """Return the cache, with rows of equal blocks instead of layers."""
        self.layout = lay_out(self.shape.kv_groups, self.backend.block_size)
        arguments: tuple[Any, ...] = (self.layout, self.layout.num_rows, self.dtype, self.device)
        kind: Any = KVCache
        if self.config.swap_space_bytes:
            from nanovllm.extras.swap.host_blocks import SwappingKVCache as kind

            arguments = (*arguments, self.config.swap_space_bytes)
        return kind(*arguments)  # type: ignore[no-any-return]

    def prepare_layers(self) -> None:
        pass_groups(self.model, self.layer_groups.places)

    def forward(self, batch: Batch) -> Tensor:
        metadata: Any = batch.metadata
        is_grouped = isinstance(metadata, GroupedMetadata)  # not in a step over null blocks only
        of_groups = on_one_thread(self.count_pieces, metadata) if is_grouped else [metadata] * self.layout.num_groups
        caches = [LayersInBlocks(self, shape) for shape in range(len(self.backends))]
        return self.model(batch.input_ids, batch.positions, of_groups, caches)

    def count_pieces(self, metadata: GroupedMetadata) -> list[AttentionMetadata]:
        """Return the metadata for the layers of each group, with numbers of pieces instead of blocks."""
        full = [group.options.window for group in self.shape.kv_groups].index(None)
        per_row = [self.layout.pieces_per_row(shape) for shape in (full, 1 - full)]
        of_full, *of_windows = metadata.of_groups()
        block_size = self.backend.block_size
        return [
            number_pieces(of_full, per_row[0], block_size),
            *(number_pieces(one, per_row[1], block_size) for one in of_windows),
        ]


class LayersInBlocks:
    """`layers[:, i]` is the part of the KV cache in which layer `i` of a shape has its K and V: [2, num_pieces, …]."""

    def __init__(self, runner: EqualBlocksRunner, shape: int) -> None:
        self.tensor = runner.kv_cache.tensor
        self.layout = runner.layout
        self.shape = shape
        self.piece_shape = runner.backends[shape].kv_cache_shape(1, 1)[3:]

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
