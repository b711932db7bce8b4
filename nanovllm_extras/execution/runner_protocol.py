"""The runner as the objects see it that it is made of: its device setup, its K/V store, its self-check.

`full_runner.py` imports them, so they cannot import `ModelRunner`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.cuda_graphs import CudaGraphs
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm_extras.execution.alone import Alone, Whole
from nanovllm_extras.execution.block_copies import BlockCopies
from nanovllm_extras.execution.graph_inputs import MoreInputs
from nanovllm_extras.execution.layout import Layout, Network
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.sampling.runner_hooks import ArrivingTokens, Computed, Draw

Record = TypeVar("Record")
"""A dataclass of tensors."""


class Runner(Protocol):
    """A `ModelRunner`: what its parts read, call and set."""

    config: Config
    folder: Path
    metadata_cls: type[AttentionMetadata]
    model_class: type[Qwen3ForCausalLM]
    shape: NetworkConfig
    whole_shape: NetworkConfig
    has_overlap: bool
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_batched_tokens: int
    max_rows: int
    backend: TorchAttention
    layout: Layout
    model: Qwen3ForCausalLM
    kv_cache: KVCache
    transfers: BlockCopies
    draw: Draw
    part: Whole
    ranks: Alone
    graphs: CudaGraphs | None
    step_graphs: Any  # of `step_graphs.py`
    newest_ids: Tensor
    followers: tuple[Any, ...]

    @property
    def backends(self) -> Sequence[TorchAttention]:
        """Return the attention backend of each shape of K and V."""

    @property
    def slowest_backend(self) -> TorchAttention:
        """Return the first backend that CUDA graphs cannot record, or the first one."""

    @property
    def network(self) -> Network:
        """Return the model, for CUDA graphs."""

    @property
    def why_no_steps(self) -> str | None:
        """Return why CUDA graphs have only the forward pass, or None if they have whole steps."""

    @property
    def more_inputs(self) -> MoreInputs | None:
        """Return what rows of decodes have beside one slot and one block table, or None."""

    def run(self, batch: Batch, is_replayed: bool | None = None) -> ArrivingTokens:
        """Compute a batch, and sample tokens. is_replayed: whether a CUDA graph computes it, None for if it can"""

    def can_replay(self, batch: Batch) -> bool:
        """Return whether a CUDA graph can compute a batch."""

    def compute_hidden(self, batch: Batch, is_replayed: bool = False) -> Computed:
        """Do all of a step that changes the KV cache, and sample nothing."""

    def send(self, record: Record) -> Record:
        """Return a record of tensors on the device."""

    def step_context(self) -> AbstractContextManager[None]:
        """Return a context for what computes."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [num_rows, hidden_size] -> [num_rows, vocab_size]"""

    def count_blocks(self) -> int:
        """Return the number of blocks of each group of layers."""

    def make_graphs(self) -> CudaGraphs:
        """Return graphs of the forward pass of decodes."""

    def bytes_to_leave(self, num_graph_bytes: int) -> int:
        """Return the memory for what is loaded later. num_graph_bytes: of this runner's graphs"""
