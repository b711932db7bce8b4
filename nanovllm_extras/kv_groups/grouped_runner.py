"""The runner of models in which some layers see a window and others see all tokens: a block table for each group.

`assembly.py` makes it if `why_one_table` finds no reason against it. The model gets a list with the metadata of each
layer, and passes each layer its own (`layer_inputs.py`). `group_ranks.py` has several ranks.
"""

from typing import Any

from torch import Tensor

from nanovllm.cuda_graphs import CudaGraphs
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.full_runner import ModelRunner
from nanovllm_extras.kv_groups.grouped_tables import GroupedMetadata
from nanovllm_extras.kv_groups.layer_groups import LayerPlace, group_layers
from nanovllm_extras.layer_inputs import LayerInputs


class GroupedLayersRunner(ModelRunner):
    """Runs steps as `ModelRunner` does. The KV cache has `layers_per_block` layers, which all groups use."""

    def start(self) -> None:
        self.layer_groups = group_layers(self.shape)  # of the share of one rank, if there are several
        super().start()

    @property
    def num_cached_layers(self) -> int:
        return self.layer_groups.layers_per_block

    @property
    def bytes_per_block(self) -> int:
        """The size of one block in each group, so that `num_kv_blocks` means the memory that it means elsewhere."""
        return super().bytes_per_block * self.layer_groups.num_groups

    def num_blocks_that_fit(self) -> int:
        """Return the number of blocks in the pool, each of which serves one group at a time."""
        return super().num_blocks_that_fit() * self.layer_groups.num_groups

    @property
    def more_inputs(self) -> Any:  # type: ignore[override]  # a constant of the parent
        from nanovllm_extras.kv_groups.grouped_graphs import WindowInputs

        return WindowInputs(self.layer_groups.num_groups - 1)

    def make_graphs(self) -> CudaGraphs:
        from nanovllm_extras.kv_groups.grouped_graphs import GroupedCudaGraphs

        num_windows = self.layer_groups.num_groups - 1
        return GroupedCudaGraphs(self.network, self.kv_cache.tensor, *self.largest_decode, num_windows)

    def make_layer_inputs(self) -> LayerInputs:
        return OfGroups(self.layer_groups.places)


class OfGroups(LayerInputs):
    """The metadata of each layer's group, and its part of the blocks."""

    def __init__(self, places: tuple[LayerPlace, ...]) -> None:
        self.places = places

    def of(self, metadata: AttentionMetadata, kv_cache: Tensor) -> tuple[Any, Any]:
        caches = self.caches_of(kv_cache)
        if not isinstance(metadata, GroupedMetadata):  # a step over null blocks only
            return metadata, caches
        groups = self.spread(metadata)
        return [groups[place.group] for place in self.places], caches

    def spread(self, metadata: GroupedMetadata) -> list[AttentionMetadata]:
        """Return the metadata for the layers of each group."""
        return metadata.of_groups()

    def caches_of(self, kv_cache: Tensor) -> Any:
        """Return what the layers read instead of the KV cache."""
        return LayersOfBlocks(kv_cache, self.places)


class LayersOfBlocks:
    """`cache[:, i]` is the part of the KV cache in which layer `i` of the model has its K and V."""

    def __init__(self, tensor: Tensor, places: tuple[LayerPlace, ...]) -> None:
        self.tensor = tensor
        self.places = places

    def __getitem__(self, index: tuple[slice, int]) -> Tensor:
        return self.tensor[:, self.places[index[1]].layer]
