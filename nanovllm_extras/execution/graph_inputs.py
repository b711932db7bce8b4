"""What CUDA graphs of decodes read beside one slot and one block table for each row: `MoreInputs`.

Each group of layers with a window has slots and block tables of its own, and models with states have slots of states:

    group                    0                   1                   2
    slots of a batch         slot_mapping        window_slots[0]     window_slots[1]
    its block tables         block_tables        window_tables[0]    window_tables[1]

    row                      0        1        2, padding
    state_slots              4        2        0               written: the slot of the row's sequence, or the null slot
    state_sources            4        2        0               read: the same slot, unless the row is a draft
    is_first                 False    False    True            begins a sequence: it starts from zeros, reads no slot

The adapter of each row is the column `adapters`, in which 0 is none, and the padding.

So padding writes only to the null block and the null slot, and never reads what it has written. The pool of states must
keep its address. Copies of states are not in the graphs: `Transfers` does them before a step is replayed.

A draft waits for the row before it. PyTorch's layers compute such rows in rounds, whose number the host decides, so
they compute steps with drafts eagerly (`needs_rounds`). Kernels in Triton find drafts on the device. If all layers do,
and if the options ask for drafts, graphs are recorded with these kernels, and replay steps with and without drafts.

The graphs are those of whole steps (`step_graphs.py`) and of the forward pass (`forward_graphs.py`).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.execution.state_pool import with_states
from nanovllm_extras.models.layer_inputs import StateMetadata
from nanovllm_extras.records.adapter_metadata import adapters_of, with_adapters
from nanovllm_extras.records.grouped_metadata import GroupedMetadata, with_windows
from nanovllm_extras.records.moves import Moves

OF_STATES = {
    "state_slots": np.dtype(np.int64),
    "state_sources": np.dtype(np.int64),
    "is_first": np.dtype(np.bool_),
}


class MoreInputs:
    """More columns and block tables of each row: by default none.

    num_windows: groups of layers with a window; has_states: whether layers keep states; has_drafts: whether rows of a
    graph may be drafts; has_adapters: whether rows may have LoRA adapters
    """

    def __init__(
        self, num_windows: int = 0, has_states: bool = False, has_drafts: bool = False, has_adapters: bool = False
    ) -> None:
        self.has_adapters = has_adapters
        self.num_tables, self.has_states, self.has_drafts = num_windows, has_states, has_drafts
        self._windows = [f"window_slots.{i}" for i in range(num_windows)]
        self._states = [*OF_STATES] if has_states else []
        self.dtypes: dict[str, np.dtype[Any]] = dict.fromkeys(self._windows, np.dtype(np.int32))
        """The columns. One of single bytes must be the last."""
        if has_adapters:
            self.dtypes["adapters"] = np.dtype(np.int32)
        if has_states:
            self.dtypes |= OF_STATES
        self.padding = {"is_first": 1}
        """The value of a column in rows of padding, unless it is 0."""

    def values_of(self, batch: Batch) -> dict[str, Tensor]:
        """Return the values of the columns for `batch`: [num_seqs] each"""
        metadata: Any = batch.metadata
        values = dict(zip(self._windows, metadata.window_slots if self._windows else (), strict=True))
        if self.has_adapters:
            adapters = adapters_of(metadata)
            values["adapters"] = torch.zeros_like(metadata.slot_mapping) if adapters is None else adapters
        if self.has_states and not isinstance(metadata, StateMetadata):  # on the host
            metadata = with_states(batch).metadata
        return values | {name: getattr(metadata, name) for name in self._states}

    def tables_of(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the other block tables of `batch`: [num_seqs, max_num_blocks] each"""
        if not self._windows:
            return ()
        assert isinstance(batch.metadata, GroupedMetadata)
        return batch.metadata.window_tables

    def add_to(
        self, metadata: AttentionMetadata, columns: dict[str, Tensor], tables: list[Tensor]
    ) -> AttentionMetadata:
        """Return `metadata` with these columns and block tables, as `Layout.inputs_of` takes it."""
        if self.has_adapters:
            metadata = with_adapters(metadata, columns["adapters"])
        if self._windows:
            metadata = with_windows(metadata, [columns[name] for name in self._windows], tables)
        if not self.has_states:
            return metadata
        more: dict[str, Any] = {name: columns[name] for name in self._states}
        # kernels only need to know whether there are rounds
        return StateMetadata(**vars(metadata), **more, rounds=(columns["state_slots"],) if self.has_drafts else ())

    def can_replay(self, batch: Batch) -> bool:
        """Return whether a graph can compute `batch`, which has only decodes.

        A self-check's batch has no tables of groups, and may have no slots of states.
        """
        if self._windows and not isinstance(batch.metadata, GroupedMetadata):
            return False
        if not self.has_states:
            return True
        moves = Moves.of(batch.copies)
        return bool(moves.slots) and (self.has_drafts or moves.slots == moves.sources)


def needs_rounds(model: nn.Module) -> bool:
    """Return whether a layer of the model needs the rounds of drafts on the host, as PyTorch's layers do."""
    return any(getattr(module, "needs_rounds", False) for module in model.modules())
