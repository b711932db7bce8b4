"""`Layout`: what the layers of a model keep for each sequence, and where. `ModelRunner` holds one.

There is one class for all models. What differs is in its parts:

    layers    K and V of tokens: their tensors, and one block table or one for each group     `cached_layers.py`
    pool      states, which do not grow with a sequence; None if no layer keeps any           `state_pool.py`
    a head    its K and V are in a cache of its own, with the same block ids                  `mtp_head.py`

    model                          block tables     KV caches                             states
    Qwen3, Llama                   1                [:, layer]                            -
    gpt-oss, Gemma 3               1 + windows      one, which all groups share           -
    Gemma 4                        1 + windows      one, of equal blocks                  -
    Gemma 4 with one table         1                one for each shape                    -
    Qwen3.5, LFM2                  1                of the layers with attention          a slot for each sequence
    Qwen3.5 with its head          1                the same, and that of the head        with the newest hidden state
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.batch import Batch
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm_extras.execution.block_copies import BlockCopies
from nanovllm_extras.execution.cached_layers import CachedLayers
from nanovllm_extras.execution.graph_inputs import MoreInputs, needs_rounds
from nanovllm_extras.execution.layer_groups import LayerGroups, describe_tables
from nanovllm_extras.execution.state_pool import HasMemory, StatePool, divide_memory, with_states
from nanovllm_extras.kernels.adapter_rows import AdapterRows
from nanovllm_extras.models.layer_inputs import LayerCaches, StateCaches
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.records.adapter_metadata import adapters_of

if TYPE_CHECKING:
    from nanovllm_extras.execution.mtp_head import MtpHead

LayerMetadata = AttentionMetadata | list[AttentionMetadata]
"""For all layers, or of each layer."""
Caches = Tensor | LayerCaches | StateCaches


class Layout:
    """The parts of one model. shape: that of the model, or of a rank's share of it"""

    def __init__(self, config: Config, shape: NetworkConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.shape, self.dtype, self.device = config, shape, dtype, device
        self.layers = CachedLayers(config, shape)
        self.adapter_rows: AdapterRows | None = None  # if rows may have LoRA adapters: what their layers read
        self.pool: StatePool | None = None  # if layers keep states
        if shape.state_shape is not None:
            hidden_size = shape.hidden_size if config.has_mtp_head else 0
            self.pool = StatePool(replace(shape.state_shape, hidden_size=hidden_size), dtype, device)

    @property
    def layer_groups(self) -> LayerGroups | None:
        """The groups of layers, if each has block tables of its own."""
        return self.layers.groups

    @property
    def windows(self) -> list[int | None]:
        """How many tokens the layers of each block table see, None for all. A draft model sees all tokens."""
        if self.layer_groups is not None:
            return [None] + [self.layer_groups.window] * (self.layer_groups.num_groups - 1)
        return [None if self.config.has_draft_model else self.shape.widest_window]

    @property
    def why_no_steps(self) -> str | None:
        """Why CUDA graphs have only the model's forward pass, and not whole steps, if that is so."""
        return "without the head" if self.config.has_mtp_head else None  # which reads lengths on the host

    # ---- the start, in this order

    def describe(self, shape: NetworkConfig) -> str:
        """Return what comes first in the description of the runner. shape: of all ranks"""
        if self.shape.state_shape is not None:
            return f"a state of {self.shape.state_shape.bytes_per_slot(self.dtype):,} bytes per sequence; "
        groups = ", ".join([str(group) for group in shape.kv_groups])
        return f"groups of layers with K and V: {groups}; " * bool(groups)

    def describe_tables(self) -> str:
        """Return what comes first in the description of the engine: nothing, unless some layers have a window."""
        return describe_tables(self.config, self.shape)

    def make_kv_caches(self, backends: tuple[TorchAttention, ...]) -> list[KVCache]:
        """Return the KV caches, which have the same block ids. That of a head is the last one."""
        caches = self.layers.make_caches(backends, self.dtype, self.device)
        if self.config.has_mtp_head:
            one = backends[0]
            attention = TorchAttention(one.num_heads, one.num_kv_heads, one.head_dim, one.block_size)
            caches.append(KVCache(attention, 1, self.dtype, self.device))
        return caches

    def make_transfers(self, caches: list[KVCache], added_bytes: int) -> BlockCopies:
        """Return what does the copies of each step. added_bytes: the size of a block in a cache that is added later"""
        config = self.config
        if not config.swap_space_bytes and not config.has_kv_store and self.pool is None:
            return BlockCopies(caches)
        from nanovllm_extras.execution.transfers import Transfers

        return Transfers(caches, self.pool, config.swap_space_bytes, config.max_num_seqs, added_bytes)

    def make_followers(self, model: nn.Module, caches: list[KVCache]) -> "tuple[MtpHead, ...]":
        """Return what else computes each step: the head, if the options ask for it."""
        if not self.config.has_mtp_head:
            return ()
        from nanovllm_extras.execution.mtp_head import MtpHead

        assert self.pool is not None
        return (MtpHead(model, caches[-1], self.pool),)

    def divide_memory(self, runner: HasMemory) -> int:
        """Return the number of blocks in the pool, each of which serves one group of layers at a time."""
        num_blocks = runner.count_blocks() if self.pool is None else divide_memory(self.pool, runner)
        return num_blocks * self.layers.num_tables

    def more_inputs(self, model: nn.Module) -> MoreInputs | None:
        """Return what rows of decodes have in CUDA graphs beside one slot and one block table, or None."""
        num_windows, has_states = self.layers.num_tables - 1, self.pool is not None
        has_adapters = self.adapter_rows is not None
        if not num_windows and not has_states and not has_adapters:
            return None
        has_drafts = self.config.speculative_config is not None and not needs_rounds(model)
        return MoreInputs(num_windows, has_states, has_drafts, has_adapters)

    # ---- a step

    def complete(self, batch: Batch) -> Batch:
        """Return a batch, on the host, with all that the layers read beside blocks: slots of states.

        They are added before the batch is sent, so they are a part of the same copy.
        """
        return batch if self.pool is None else with_states(batch)

    def inputs_of(self, metadata: AttentionMetadata, kv_cache: Tensor) -> tuple[LayerMetadata, Caches]:
        """Return the last two arguments of the model: metadata, or a list with those of each layer, and caches.

        kv_cache: the tensor of the first KV cache
        """
        if self.adapter_rows is not None:
            self.adapter_rows.select(adapters_of(metadata))
        read: LayerMetadata = metadata
        caches: Tensor | LayerCaches = kv_cache
        if self.layers.places:
            read, caches = self.layers.inputs_of(metadata)
        if self.pool is not None:
            return read, StateCaches(caches, self.pool.conv, self.pool.recurrent)
        return read, caches


class Network:
    """A model as CUDA graphs see it: it takes the metadata of a step and a KV cache, whatever its layers read."""

    def __init__(self, model: Qwen3ForCausalLM, layout: Layout) -> None:
        self._model, self._layout = model, layout
        self.compute_logits = model.compute_logits

    def __call__(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        """Run the model -> [num_tokens, hidden_size]"""
        hidden: Tensor = self._model(input_ids, positions, *self._layout.inputs_of(metadata, kv_cache))
        return hidden
