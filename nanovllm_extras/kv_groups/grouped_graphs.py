"""CUDA graphs for groups of layers: each group has buffers for slots and block tables.

    group                    0                   1                   2
    slots of a batch         slot_mapping        window_slots[0]     window_slots[1]
    its block tables         block_tables        window_tables[0]    window_tables[1]

A row of padding has slot 0 in each group, which is in the null block. `WindowInputs` is for the graphs of whole steps
(`execution/step_graphs.py`) and of the forward pass (`execution/forward_graphs.py`).
"""

from typing import Any

import numpy as np
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.execution.step_graphs import MoreInputs
from nanovllm_extras.memory.grouped_tables import GroupedMetadata, with_windows


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
