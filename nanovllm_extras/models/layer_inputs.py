"""What the layers of a network read beside ids and positions: records, which `execution/` fills in.

metadata      an `AttentionMetadata` for all layers, or a list with one for each layer: `metadata_of`
K and V       the tensor of the KV cache, or `LayerCaches`: `[:, layer]` of both is what the layer reads and writes
with states   a `StateMetadata`, and `StateCaches` in the place of the KV cache
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.layers.attention import AttentionMetadata


def metadata_of(metadata: Any, layer: int) -> AttentionMetadata:
    """Return what `layer` reads of the metadata that a model gets: its own, if each layer has some."""
    return metadata[layer] if isinstance(metadata, list) else metadata


class LayerCaches:
    """KV caches of single layers, for layers that do not all have their K and V in one tensor."""

    def __init__(self, caches: Mapping[int, Tensor]) -> None:
        self._caches = caches

    def __getitem__(self, place: tuple[slice, int]) -> Tensor | None:
        """Return the cache of a layer, or None if there is none. place: as for the tensor of a KV cache"""
        return self._caches.get(place[1])


# ---- states


@dataclass(frozen=True)
class StateShape:
    """The size of one sequence's state. The recurrent state is float32, as small changes add up over many tokens."""

    num_layers: int
    """Layers that keep a state."""
    conv: tuple[int, int]
    """[width - 1, num_channels], in the model's dtype: the newest inputs of the layer's short convolution."""
    recurrent: tuple[int, int, int] = (0, 0, 0)
    """[num_heads, key_dim, value_dim] float32. Zeros if layers have only a convolution."""
    hidden_size: int = 0
    """The size of the model's hidden state of the newest computed token, if a head needs it (`mtp_head.py`)."""

    def share_of(self, size: int) -> "StateShape":
        """Return the shape of one of `size` ranks. Channels and heads are divided by the number of ranks."""
        (width, num_channels), (num_heads, *dims) = self.conv, self.recurrent
        conv, recurrent = (width, num_channels // size), (num_heads // size, dims[0], dims[1])
        return replace(self, conv=conv, recurrent=recurrent)

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Return the size of one sequence's state in all layers. `dtype` is the model's."""
        per_layer = math.prod(self.conv) * dtype.itemsize + math.prod(self.recurrent) * torch.float32.itemsize
        return self.num_layers * per_layer + self.hidden_size * dtype.itemsize


@dataclass(frozen=True)
class StateMetadata(AttentionMetadata):
    """The metadata of a step, with the slots of each sequence's state."""

    state_slots: Tensor  # [num_seqs] int64, where the state after each chunk is written
    state_sources: Tensor  # [num_seqs] int64, where the state before it is read: another slot if the chunk is a draft
    is_first: Tensor  # [num_seqs] bool: the chunk begins its sequence, so it starts from a state of zeros
    rounds: tuple[Tensor, ...] = ()  # decodes by the round that can compute them; none if no chunk is a draft
    adapters: Tensor | None = None  # as in `AdapterMetadata` (`records/adapter_metadata.py`)


class StateCaches(NamedTuple):
    """All that the layers of a model read and write. A chunk that begins a sequence does not read its old state."""

    kv: Any  # the KV cache of the layers with attention: a tensor, or `LayerCaches`
    conv: Tensor  # [num_state_layers, num_slots + 1, width - 1, num_channels]
    recurrent: Tensor  # [num_state_layers, num_slots + 1, num_heads, key_dim, value_dim] float32
