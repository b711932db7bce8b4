"""CUDA graphs for groups of layers: each group has buffers for slots and block tables.

    group                    0                   1                   2
    slots of a batch         slot_mapping        window_slots[0]     window_slots[1]
    its block tables         block_tables        window_tables[0]    window_tables[1]

A row of padding has slot 0 in each group, which is in the null block. `WindowInputs` is for the graphs of whole steps
(`cuda/graphs.py`), and `GroupedCudaGraphs` has the core's graphs of the forward pass.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.cuda_graphs import CudaGraphs
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.cuda.graphs import MoreInputs
from nanovllm_extras.kv_groups.grouped_tables import GroupedMetadata, with_windows


class WindowInputs(MoreInputs):
    """The slots and block tables of `num_windows` groups with a window."""

    def __init__(self, num_windows: int) -> None:
        self.num_tables = num_windows
        self.dtypes = {f"window_slots.{i}": np.dtype(np.int32) for i in range(num_windows)}

    def values_of(self, batch: Batch) -> dict[str, Tensor]:
        metadata: Any = batch.metadata
        return dict(zip(self.dtypes, metadata.window_slots, strict=True))

    def tables_of(self, batch: Batch) -> tuple[Tensor, ...]:
        metadata: Any = batch.metadata
        tables: tuple[Tensor, ...] = metadata.window_tables
        return tables

    def add_to(
        self, metadata: AttentionMetadata, columns: dict[str, Tensor], tables: list[Tensor]
    ) -> AttentionMetadata:
        return with_windows(metadata, columns.values(), tables)

    def can_replay(self, batch: Batch) -> bool:
        """Return whether `batch` has slots and tables of groups: a self-check's has only those of other models."""
        return isinstance(batch.metadata, GroupedMetadata)


class GroupedCudaGraphs(CudaGraphs):
    """Graphs of `model`, which takes the metadata of all groups: that of a batch, or of the buffers."""

    def __init__(
        self, model: nn.Module, kv_cache: Tensor, max_num_seqs: int, max_num_blocks: int, num_windows: int
    ) -> None:
        super().__init__(model, kv_cache, max_num_seqs, max_num_blocks)
        self.window_slots = self.slot_mapping.new_zeros(num_windows, max_num_seqs)
        self.window_tables = self.block_tables.new_zeros(num_windows, max_num_seqs, max_num_blocks)

    def forward(self, size: int) -> Tensor:
        tables, offsets = self.block_tables[:size], self.offsets[: size + 1]
        metadata = AttentionMetadata.of_decodes(self.slot_mapping[:size], tables, self.seq_lens[:size], offsets)
        of_groups = with_windows(metadata, self.window_slots[:, :size], self.window_tables[:, :size])
        return self.model(self.input_ids[:size], self.positions[:size], of_groups, self.kv_cache)  # type: ignore[no-any-return]

    def can_replay(self, batch: Batch) -> bool:
        return isinstance(batch.metadata, GroupedMetadata) and super().can_replay(batch)

    def replay(self, batch: Batch) -> Tensor:
        metadata: Any = batch.metadata
        n, width = batch.metadata.block_tables.shape
        self.window_slots[:, n:] = 0  # padding
        self.window_slots[:, :n] = torch.stack(metadata.window_slots)
        self.window_tables[:, :n, :width] = torch.stack(metadata.window_tables)
        return super().replay(batch)
