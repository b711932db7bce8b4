"""Which layer belongs to which group, if some layers see a window and others see all tokens? And is it worth it?

A block has room for `layers_per_block` layers, as many as see all tokens: they are group 0. The layers with a window
form groups of the same size, so every block can serve every group. A model of six layers, as gpt-oss has:

    layer        0          1          2          3          4          5
    sees         window     all        window     all        window     all
    group        1          0          1          0          1          0
    its cache    kv[:, 0]   kv[:, 0]   kv[:, 1]   kv[:, 1]   kv[:, 2]   kv[:, 2]

Each group has a block table of its own, and a block belongs to one group at a time. So the layers 0 and 1 have the same
tensor, but never the same blocks. With block_size 4, a window of 5, and position 10 next (`memory/block_manager.py`):

    position          0 1 2 3    4 5 6 7    8 9 10
    group 0           [  7          2          5   ]
    group 1           [  0          3          6   ]    the block behind the window was given back

If the last group has fewer layers, the rest of its blocks is never used: `num_unused_layers`.

In Gemma 4, K and V of the layers with a window have another size. Blocks of all groups are equally large all the same:
`equal_blocks.py` says how many layers with a window fit into one. Several layers may have the same place, if they share
the K and V of the first of them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from nanovllm_extras.execution.equal_blocks import lay_out
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config


class LayerPlace(NamedTuple):
    """Where a layer finds its K and V: `kv_cache[:, layer]`, at the blocks of its group."""

    group: int
    layer: int
    shape: int = 0  # of its K and V, if there are several: a number in `kv_groups`


@dataclass(frozen=True)
class LayerGroups:
    """The groups of a model's layers. Group 0 sees all tokens, the others see `window` tokens."""

    places: tuple[LayerPlace, ...]  # of each layer
    layers_per_block: int  # as many as see all tokens
    window: int
    layers_per_window_block: int | None = None  # of the groups with a window; None is `layers_per_block`

    @property
    def num_groups(self) -> int:
        return 1 + max([place.group for place in self.places])

    @property
    def num_layers(self) -> list[int]:
        """The number of layers of each group."""
        return [sum([place.group == group for place in self.places]) for group in range(self.num_groups)]

    @property
    def num_unused_layers(self) -> int:
        """The layers for which blocks have room, and which the model does not have."""
        num_places = (self.num_groups - 1) * (self.layers_per_window_block or self.layers_per_block)
        return num_places - len({place for place in self.places if place.group})

    def __str__(self) -> str:
        size, num_windows = self.layers_per_block, self.num_groups - 1
        return f"block tables: one for {size} layers that see all tokens, {num_windows} for windows of {self.window}"


def windows_of(shape: NetworkConfig) -> list[int | None]:
    """Return the window of each layer, None for one that sees all tokens."""
    return [options.window for options in shape.attention_options]


def share_of_windows(shape: NetworkConfig) -> float:
    """Return the share of a token's K and V that belongs to layers with a window."""
    owners = [
        (group.options.window, group.num_layers * group.num_kv_heads * group.head_dim) for group in shape.kv_groups
    ]
    sizes = owners or [(window, 1) for window in windows_of(shape)]
    return sum([size for window, size in sizes if window is not None]) / sum([size for _, size in sizes])


def mixes_windows(shape: NetworkConfig) -> bool:
    """Return whether some layers see a window and others see all tokens."""
    windows = set(windows_of(shape))
    return len(windows) == 2 and None in windows and shape.state_shape is None


def has_groups(config: Config, shape: NetworkConfig) -> bool:
    """Return whether each group of the layers has block tables of its own. shape: of one rank

    If K and V have two shapes, the layers of one rank may form other groups than those of all ranks. In Gemma 4 31B,
    layers with a window have 16 K and V heads, and the other layers 4. With 16 ranks, both have one.
    """
    return mixes_windows(shape) and why_one_table(config, shape) is None


def describe_tables(config: Config, shape: NetworkConfig) -> str:
    """Return the first part of the description of an engine: nothing, unless the model `mixes_windows`."""
    if not mixes_windows(shape):
        return ""
    reason = why_one_table(config, shape)
    return f"{group_layers(shape)}; " if reason is None else f"one block table for all layers ({reason}); "


def group_layers(shape: NetworkConfig) -> LayerGroups:
    """Return the groups of a model that `mixes_windows`, of whose layers at least half have a window."""
    if shape.kv_groups:
        return group_shapes(shape)
    windows = windows_of(shape)
    layers_per_block = windows.count(None)
    num_seen = {True: 0, False: 0}  # layers so far, with and without a window
    places = []
    for window in windows:
        group, layer = divmod(num_seen[window is not None], layers_per_block)
        places.append(LayerPlace(group if window is None else group + 1, layer))
        num_seen[window is not None] += 1
    return LayerGroups(tuple(places), layers_per_block, max([window for window in windows if window is not None]))


def group_shapes(shape: Any) -> LayerGroups:
    """Return the groups of a model with `kv_groups`: blocks have room for fewer or more layers with a window."""
    per_block = lay_out(shape.kv_groups).layers_per_block
    windows = [group.options.window for group in shape.kv_groups]
    full = windows.index(None)
    places = []
    for kind, number, _ in shape.kv_places:
        group, layer = divmod(number, per_block[kind])
        places.append(LayerPlace(group if kind == full else group + 1, layer, kind))
    return LayerGroups(tuple(places), per_block[full], windows[1 - full], per_block[1 - full])


def why_one_table(config: Config, shape: NetworkConfig) -> str | None:
    """Return why all layers of a model that `mixes_windows` have one block table, or None if each group has its own."""
    if config.disable_hybrid_kv_cache_manager:
        return "disable_hybrid_kv_cache_manager is set"
    if config.has_draft_model:
        return "a draft model reads one"
    if config.kv_cache_dtype == "int8" and shape.kv_groups:  # (head_dim + 4 bytes) of two sizes have no small multiple
        return "the scales of int8 leave no blocks of equal size"
    if share_of_windows(shape) < 0.5:
        return "most K and V are of layers that see all tokens" if shape.kv_groups else "most layers see all tokens"
    windows = [window for window in windows_of(shape) if window is not None]
    if (config.max_model_len or shape.max_position_embeddings) <= max(windows):
        return "no sequence is longer than the window"
    return None
