"""The runner of models in which some layers see a window and others see all tokens: a block table for each group.

`assembly.py` makes it if `why_one_table` finds no reason against it. The model does not depend on groups: a hook gives
it the metadata of all groups, and before each layer runs, a hook passes it those of its group. So whatever calls the
model, for example a CUDA graph while it is recorded, calls it as any other model. `group_ranks.py` has several ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from nanovllm.cuda_graphs import CudaGraphs
from nanovllm_extras.full_runner import ModelRunner
from nanovllm_extras.kv_groups.grouped_tables import GroupedMetadata
from nanovllm_extras.kv_groups.layer_groups import LayerPlace, group_layers


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
        return GroupedCudaGraphs(self.model, self.kv_cache.tensor, *self.largest_decode, num_windows)

    def prepare_layers(self) -> None:
        groups = self.layer_groups
        caches = partial(LayersOfBlocks, places=groups.places)
        self.model.register_forward_pre_hook(spread_over(groups.num_groups, GroupedMetadata.of_groups, caches))
        pass_groups(self.model, self.layer_groups.places)


def spread_over(
    num_groups: int, of_groups: Callable[[GroupedMetadata], Any], caches_of: Callable[[Tensor], Any]
) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Return a hook that replaces the last arguments of a model: metadata by that of all groups, and the KV cache.

    of_groups: returns the metadata of each group; caches_of: returns what the layers read instead of the KV cache
    """

    def spread(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        input_ids, positions, metadata, kv_cache = arguments
        is_grouped = isinstance(metadata, GroupedMetadata)  # not in a step over null blocks only
        spread_metadata = of_groups(metadata) if is_grouped else [metadata] * num_groups
        return input_ids, positions, spread_metadata, caches_of(kv_cache)

    return spread


def pass_groups(model: Any, places: tuple[LayerPlace, ...]) -> None:
    """Let each layer of the model take the metadata of its group from that of all groups."""
    for layer, place in zip(model.model.layers, places, strict=True):
        layer.register_forward_pre_hook(take_group(place.group))


def take_group(group: int) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Return a hook that replaces the last argument of a layer, the metadata of all groups, by that of `group`."""
    return lambda _, arguments: (*arguments[:-1], arguments[-1][group])


class LayersOfBlocks:
    """`cache[:, i]` is the part of the KV cache in which layer `i` of the model has its K and V."""

    def __init__(self, tensor: Tensor, places: tuple[LayerPlace, ...]) -> None:
        self.tensor = tensor
        self.places = places

    def __getitem__(self, index: tuple[slice, int]) -> Tensor:
        return self.tensor[:, self.places[index[1]].layer]
