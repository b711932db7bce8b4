"""CUDA graphs of decodes with states: the buffers also say which slots of the pool the rows read and write.

    row              0        1        2, padding
    state_slots      4        2        0               written: the slot of the row's sequence, or the null slot
    state_sources    4        2        0               read: the same slot, unless the row is a draft
    is_first         False    False    True            begins a sequence: it starts from zeros, and reads no slot

So padding writes only to the null slot, and never reads what it has written. The pool must keep its address. Copies of
states are not in the graphs: `Transfers` does them before a step is replayed.

A draft waits for the row before it. PyTorch's layers compute such rows in rounds, whose number the host decides, so
they compute steps with drafts eagerly (`needs_rounds`). Kernels in Triton find drafts on the device. If all layers do,
and if the options ask for drafts, graphs are recorded with these kernels, and replay steps with and without drafts.

`StateInputs` is for the graphs of whole steps (`execution/step_graphs.py`) and those of the forward pass
(`execution/forward_graphs.py`).
"""

from typing import Any

import numpy as np
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.execution.state_pool import with_states
from nanovllm_extras.execution.step_graphs import MoreInputs
from nanovllm_extras.models.layer_inputs import StateMetadata
from nanovllm_extras.records.moves import Moves


class StateInputs(MoreInputs):
    """The columns of `StateMetadata`. has_drafts: whether rows of a graph may be drafts"""

    dtypes = {
        "state_slots": np.dtype(np.int64),
        "state_sources": np.dtype(np.int64),
        "is_first": np.dtype(np.bool_),
    }
    padding = {"is_first": 1}

    def __init__(self, has_drafts: bool) -> None:
        self.has_drafts = has_drafts

    def values_of(self, batch: Batch) -> dict[str, Tensor]:
        metadata = batch.metadata
        if not isinstance(metadata, StateMetadata):  # on the host
            metadata = with_states(batch).metadata
        return {name: getattr(metadata, name) for name in self.dtypes}

    def add_to(self, metadata: AttentionMetadata, columns: dict[str, Tensor], tables: list[Tensor]) -> StateMetadata:
        # kernels only need to know whether there are rounds
        more: dict[str, Any] = {**columns, "rounds": (columns["state_slots"],) if self.has_drafts else ()}
        return StateMetadata(**vars(metadata), **more)

    def can_replay(self, batch: Batch) -> bool:
        """Return whether `batch` has slots, and no drafts unless graphs have them."""
        moves = Moves.of(batch.copies)
        return bool(moves.slots) and (self.has_drafts or moves.slots == moves.sources)


def needs_rounds(model: Any) -> bool:
    """Return whether a layer of the model needs the rounds of drafts on the host, as PyTorch's layers do."""
    return any(getattr(module, "needs_rounds", False) for module in model.modules())
