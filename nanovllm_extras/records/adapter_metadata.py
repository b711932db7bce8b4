"""The metadata of a step in which rows may have LoRA adapters.

`adapters` has a number for each token: the slot of its sequence's adapter, and 0 for none, which is also the padding of
CUDA graphs. Metadata with windows or states have the same field.
"""

from dataclasses import dataclass

from torch import Tensor

from nanovllm.layers.attention import AttentionMetadata


@dataclass(frozen=True)
class AdapterMetadata(AttentionMetadata):
    adapters: Tensor | None  # [num_tokens] int32; None if no row has an adapter


def adapters_of(metadata: AttentionMetadata) -> Tensor | None:
    """Return the slots of the rows' adapters: [num_tokens] int32, or None if no row has one."""
    found: Tensor | None = getattr(metadata, "adapters", None)
    return found


def with_adapters(metadata: AttentionMetadata, adapters: Tensor | None) -> AttentionMetadata:
    """Return plain metadata with the slots of the rows' adapters."""
    return metadata if adapters is None else AdapterMetadata(**vars(metadata), adapters=adapters)
