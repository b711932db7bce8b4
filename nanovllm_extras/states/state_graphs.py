"""CUDA graphs of decodes with states: the buffers also say which slots of the pool the rows read and write.

    row              0        1        2, padding
    state_slots      4        2        0               written: the slot of the row's sequence, or the null slot
    state_sources    4        2        0               read: the same slot, unless the row is a draft
    is_first         False    False    True            begins a sequence: it starts from zeros, and reads no slot

So padding writes only to the null slot, and never reads what it has written. The pool must keep its address. Copies of
states are not in the graphs: the KV cache does them before a step is replayed.

A draft waits for the row before it. PyTorch's layers compute such rows in rounds, whose number the host decides, so
they compute steps with drafts eagerly (`needs_rounds`). Kernels in Triton find drafts on the device. If all layers do,
and if the options ask for drafts, graphs are recorded with these kernels, and replay steps with and without drafts.

`StateInputs` is for the graphs of whole steps (`cuda/graphs.py`), and `StateCudaGraphs` has the core's graphs of the
forward pass.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.cuda_graphs import CudaGraphs
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.cuda.graphs import MoreInputs
from nanovllm_extras.records import Moves
from nanovllm_extras.states.pool import StateMetadata, with_states


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


class StateCudaGraphs(CudaGraphs):
    """Graphs of the forward pass of `model`, which takes a `StateMetadata`."""

    def __init__(
        self, model: nn.Module, kv_cache: Tensor, max_num_seqs: int, max_num_blocks: int, inputs: StateInputs
    ) -> None:
        super().__init__(model, kv_cache, max_num_seqs, max_num_blocks)
        self.inputs = inputs
        self.columns = {  # [max_num_seqs] each
            name: torch.zeros(max_num_seqs, dtype=getattr(torch, dtype.name), device=kv_cache.device)
            for name, dtype in inputs.dtypes.items()
        }

    def forward(self, size: int) -> Tensor:
        tables, offsets = self.block_tables[:size], self.offsets[: size + 1]
        metadata = AttentionMetadata.of_decodes(self.slot_mapping[:size], tables, self.seq_lens[:size], offsets)
        with_slots = self.inputs.add_to(metadata, {name: column[:size] for name, column in self.columns.items()}, [])
        return self.model(self.input_ids[:size], self.positions[:size], with_slots, self.kv_cache)  # type: ignore[no-any-return]

    def can_replay(self, batch: Batch) -> bool:
        return super().can_replay(batch) and self.inputs.can_replay(batch)

    def replay(self, batch: Batch) -> Tensor:
        """Replay a batch whose metadata is a `StateMetadata`, on the device."""
        n, metadata = len(batch.input_ids), batch.metadata
        for name, column in self.columns.items():
            column[:n] = getattr(metadata, name)
            column[n:] = self.inputs.padding.get(name, 0)
        return super().replay(batch)


def needs_rounds(model: Any) -> bool:
    """Return whether a layer of the model needs the rounds of drafts on the host, as PyTorch's layers do."""
    return any(getattr(module, "needs_rounds", False) for module in model.modules())
