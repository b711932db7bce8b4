"""The layout of models in which some layers see a window and others see all tokens: a block table for each group.

`assembly.py` chooses it if `why_one_table` finds no reason against it. The model gets a list with the metadata of each
layer, and passes each layer its own (`layer_inputs.py`).

With several ranks, each has its heads of all groups, in the same blocks as the others. Rank 0 decides which sequence
owns which blocks, and sends the slots and block tables of all groups with each batch (`parallel/messages.py`):

    K and V of a sequence        rank 0                rank 1
    group 0, 4 heads             heads 0, 1            heads 2, 3            at the block table of group 0
    group 1, 4 heads             heads 0, 1            heads 2, 3            at the block table of group 1
"""

from typing import Any

from torch import Tensor

from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.execution.layouts import Layout
from nanovllm_extras.kv_groups.layer_groups import LayerPlace, group_layers
from nanovllm_extras.memory.grouped_tables import GroupedMetadata
from nanovllm_extras.models.layer_inputs import LayerInputs
from nanovllm_extras.options.all_options import Config


class GroupedLayout(Layout):
    """The KV cache has `layers_per_block` layers, which all groups use. `num_kv_blocks` counts one for each group."""

    def __init__(self, config: Config, shape: Any) -> None:
        super().__init__(config, shape)
        self.layer_groups = group_layers(shape)
        self.num_tables = self.layer_groups.num_groups

    @property
    def num_cached_layers(self) -> int:
        num_layers: int = self.layer_groups.layers_per_block
        return num_layers

    def make_layer_inputs(self, caches: list[KVCache]) -> LayerInputs:
        return OfGroups(self.layer_groups.places)

    def more_inputs(self, model: Any) -> Any:
        from nanovllm_extras.kv_groups.grouped_graphs import WindowInputs

        return WindowInputs(self.num_tables - 1)


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
