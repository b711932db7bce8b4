"""CUDA graphs of the forward pass of decodes whose rows have more than one slot and one block table each.

They are the core's graphs, with more buffers: a column or block tables for each input that a `MoreInputs` names.

    inputs of states     state_slots, state_sources, is_first                            columns
    inputs of groups     window_slots.0, window_slots.1, … | tables of each group        columns, and block tables
"""

import torch
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.cuda_graphs import CudaGraphs
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.execution.graph_inputs import MoreInputs


class ForwardGraphs(CudaGraphs):
    """Graphs of `model`, which takes the metadata that `more` makes of a batch, or of the buffers."""

    def __init__(
        self, model: nn.Module, kv_cache: Tensor, max_num_seqs: int, max_num_blocks: int, more: MoreInputs
    ) -> None:
        super().__init__(model, kv_cache, max_num_seqs, max_num_blocks)
        self.more = more
        self.columns = {  # [max_num_seqs] each
            name: torch.zeros(max_num_seqs, dtype=getattr(torch, dtype.name), device=kv_cache.device)
            for name, dtype in more.dtypes.items()
        }
        self.more_tables = self.block_tables.new_zeros(more.num_tables, max_num_seqs, max_num_blocks)

    def forward(self, size: int) -> Tensor:
        tables, offsets = self.block_tables[:size], self.offsets[: size + 1]
        metadata = AttentionMetadata.of_decodes(self.slot_mapping[:size], tables, self.seq_lens[:size], offsets)
        columns = {name: column[:size] for name, column in self.columns.items()}
        with_more = self.more.add_to(metadata, columns, list(self.more_tables[:, :size]))
        hidden: Tensor = self.model(self.input_ids[:size], self.positions[:size], with_more, self.kv_cache)
        return hidden

    def can_replay(self, batch: Batch) -> bool:
        return super().can_replay(batch) and self.more.can_replay(batch)

    def replay(self, batch: Batch) -> Tensor:
        """Replay a batch that is on the device, whose metadata is what `more` makes."""
        n, width = batch.metadata.block_tables.shape
        for name, values in self.more.values_of(batch).items():
            self.columns[name][:n] = values
            self.columns[name][n:] = self.more.padding.get(name, 0)
        for tables, values in zip(self.more_tables, self.more.tables_of(batch), strict=True):
            tables[:n, :width] = values
        return super().replay(batch)
