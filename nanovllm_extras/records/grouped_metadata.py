"""What attention reads of the block tables of groups of layers: slots and tables of each group.

In the tables of groups with a window, the null block replaces the blocks behind the window (`layer_groups.py` has an
example).
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import Batch, pad_tables
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.records.full_sequence import Sequence


@dataclass(frozen=True)
class GroupedMetadata(AttentionMetadata):
    """The metadata of a step. The slots and block tables of the parent are those of the group that sees all tokens."""

    window_slots: tuple[Tensor, ...]  # of each group with a window: [num_tokens] int32
    window_tables: tuple[Tensor, ...]  # of each group with a window: [num_seqs, max_num_blocks] int32
    adapters: Tensor | None = None  # as in `AdapterMetadata`

    def of_groups(self) -> list[AttentionMetadata]:
        """Return the metadata for the layers of each group."""
        shared = {field.name: getattr(self, field.name) for field in fields(AttentionMetadata)}
        own = zip(self.window_slots, self.window_tables, strict=True)
        windows = [shared | {"slot_mapping": slots, "block_tables": tables} for slots, tables in own]
        return [self, *(AttentionMetadata(**one) for one in windows)]


def with_windows(metadata: AttentionMetadata, slots: Iterable[Tensor], tables: Iterable[Tensor]) -> GroupedMetadata:
    """Return metadata with the slots and block tables of each group with a window."""
    return GroupedMetadata(**vars(metadata), window_slots=tuple(slots), window_tables=tuple(tables))


def add_groups(chunks: list[tuple[Sequence, int, int]], built: Batch, block_size: int) -> Batch:
    """Add the slots and tables of the groups with a window to the batch of a step, which is on the host."""
    metadata = built.metadata
    owners = np.repeat(np.arange(len(chunks)), metadata.cu_seqlens_q.diff().numpy())  # [num_tokens]
    places, offsets = np.divmod(built.positions.numpy(), block_size)  # [num_tokens] each
    tables, slots = [], []
    for group in zip(*[seq.window_tables for seq, _, _ in chunks], strict=True):
        padded = pad_tables(group, metadata.block_tables.shape[1])  # [num_seqs, max_num_blocks]
        tables.append(torch.from_numpy(padded))
        slots.append(torch.from_numpy(padded[owners, places] * block_size + offsets))
    return replace(built, metadata=with_windows(metadata, slots, tables))
