"""The block tables of all groups, and what attention reads of them: slots and tables of each group.

A sequence has the same row in the tables of all groups. In those of groups with a window, the null block replaces the
blocks behind the window (`layer_groups.py` has an example).
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.block_tables import BlockTable, BlockTables
from nanovllm.layers.attention import AttentionMetadata
from nanovllm.scheduler import Step


@dataclass(frozen=True)
class GroupedMetadata(AttentionMetadata):
    """The metadata of a step. The slots and block tables of the parent are those of the group that sees all tokens."""

    window_slots: tuple[Tensor, ...]  # of each group with a window: [num_tokens] int32
    window_tables: tuple[Tensor, ...]  # of each group with a window: [num_seqs, max_num_blocks] int32

    def of_groups(self) -> list[AttentionMetadata]:
        """Return the metadata for the layers of each group."""
        shared = {field.name: getattr(self, field.name) for field in fields(AttentionMetadata)}
        own = zip(self.window_slots, self.window_tables, strict=True)
        windows = [shared | {"slot_mapping": slots, "block_tables": tables} for slots, tables in own]
        return [self, *(AttentionMetadata(**one) for one in windows)]


def with_windows(metadata: AttentionMetadata, slots: Iterable[Tensor], tables: Iterable[Tensor]) -> GroupedMetadata:
    """Return metadata with the slots and block tables of each group with a window."""
    return GroupedMetadata(**vars(metadata), window_slots=tuple(slots), window_tables=tuple(tables))


class GroupedBlockTables(BlockTables):
    """`rows` are the tables of the group that sees all tokens, `window_rows` those of the groups with a window.

    `window_rows` is [num_window_groups, num_rows, width] int32.
    """

    def __init__(self, block_size: int, num_window_groups: int) -> None:
        super().__init__(block_size)
        self.window_rows = np.zeros((num_window_groups, *self.rows.shape), dtype=np.int32)

    def windows_of(self, table: BlockTable) -> np.ndarray:
        """Return the blocks beside those of `table`: [num_window_groups, table.length], a view of `window_rows`."""
        return self.window_rows[:, table.row if table.length else 0, : table.length]

    def clear(self, table: BlockTable) -> None:
        self.window_rows[:, table.row] = 0
        super().clear(table)

    def _replace(self, rows: np.ndarray) -> None:
        super()._replace(rows)
        old = self.window_rows
        self.window_rows = np.zeros((len(old), *rows.shape), dtype=np.int32)
        self.window_rows[:, : old.shape[1], : old.shape[2]] = old

    def add_groups(self, step: Step, built: Batch) -> Batch:
        """Add the slots and tables of the groups with a window to the batch of a step, which is on the host."""
        metadata, size = built.metadata, self.block_size
        rows = [seq.block_table.row for seq, _, _ in step.chunks]
        tables = self.window_rows[:, rows, : metadata.block_tables.shape[1]]  # [num_window_groups, num_seqs, …], a copy
        owners = np.repeat(np.arange(len(rows)), metadata.cu_seqlens_q.diff().numpy())  # [num_tokens]
        positions = built.positions.numpy()
        slots = tables[:, owners, positions // size] * size + positions % size  # [num_window_groups, num_tokens]
        # numpy orders the elements of what it has gathered as it likes, and kernels read rows
        own = [map(torch.from_numpy, np.ascontiguousarray(one)) for one in (slots, tables)]
        return replace(built, metadata=with_windows(metadata, *own))
