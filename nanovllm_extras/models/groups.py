"""One KV cache for each shape of K and V, with the same block ids in all of them.

In Gemma 4, layers with a window and layers that see all tokens have heads of different sizes. If all layers have one
block table (`why_one_table`), the layers of each shape have a tensor of their own. A block id names one block in each
tensor, so the scheduler and the block manager do not depend on shapes. Otherwise the blocks are those of
`equal_blocks.py`.

    layer                0          1          2          3          4               5
    sees                 window     all        window     window     window          all
    K and V              own        own        own        own        of layer 3      of layer 1
    its cache            g0[:, 0]   g1[:, 0]   g0[:, 1]   g0[:, 2]   g0[:, 2]        g1[:, 0]

    block 7 of a sequence is g0[:, :, 7] and g1[:, :, 7]

A layer that attends to the K and V of an earlier layer owns no memory. `CachedLayers` makes the caches (`execution/`).
"""

from dataclasses import dataclass
from typing import NamedTuple

from nanovllm_extras.models.masking import PLAIN, AttentionOptions


@dataclass(frozen=True)
class KVGroup:
    """The shape of the K and V of some layers, and how these layers attend. A block table may be for a part of them."""

    num_layers: int
    """Layers that own K and V. Layers that share them are not counted."""
    num_kv_heads: int
    head_dim: int
    options: AttentionOptions = PLAIN

    def __str__(self) -> str:
        sees = "all tokens" if self.options.window is None else f"{self.options.window} tokens"
        return f"{self.num_layers} that see {sees}, with {self.num_kv_heads} heads of {self.head_dim}"


class KVPlace(NamedTuple):
    """Where a layer finds its K and V: `tensors[group][:, layer]`."""

    group: int
    layer: int
    """Its number among the layers of the group that own K and V."""
    is_owner: bool = True
    """Whether the layer writes K and V. Otherwise it reads those of an earlier layer."""
