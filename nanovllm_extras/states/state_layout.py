"""The layout of models whose layers keep states: slots of a pool beside the KV cache.

The slots of a step are added to the metadata of its batch before it is sent, so they are a part of the same copy.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.execution.layouts import Layout
from nanovllm_extras.execution.state_pool import StatePool, with_states
from nanovllm_extras.models.layer_inputs import LayerInputs, StateCaches, StateShape
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.speculation_options import MAX_DRAFTED_ROWS, read_options

logger = logging.getLogger(__name__)


class StateLayout(Layout):
    """K and V of the layers with attention, and states of the others."""

    def describe(self, shape: Any, dtype: torch.dtype) -> str:
        return f"a state of {self.shape.state_shape.bytes_per_slot(dtype):,} bytes per sequence; "

    @property
    def num_cached_layers(self) -> int:
        num_layers: int = self.shape.num_hidden_layers - self.shape.state_shape.num_layers
        return num_layers

    @property
    def state_shape(self) -> StateShape:
        """The size of one slot of the pool."""
        shape: StateShape = self.shape.state_shape
        return shape

    def make_kv_caches(self, backends: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> list[KVCache]:
        """Return the KV cache of the layers with attention. Make the pool, too, with the null slot only."""
        self.pool = StatePool(self.state_shape, dtype, device)
        return super().make_kv_caches(backends, dtype, device)

    def make_layer_inputs(self, caches: list[KVCache]) -> LayerInputs:
        return PoolInputs(self.pool)

    def divide_memory(self, runner: Any) -> int:
        """Return the number of blocks, and set the number of slots: for sequences that may run, snapshots and drafts.

        Unless the number of blocks is configured, at most half of the memory is for states. If this is too little for
        `max_num_seqs` states, fewer sequences run at the same time.
        """
        config, pool = runner.config, self.pool
        wanted = config.max_num_seqs * (2 if config.enable_prefix_caching else 1) + num_draft_slots(config)
        if config.num_kv_blocks is not None:
            num_blocks: int = config.num_kv_blocks
            pool.num_slots = wanted
        else:
            num_blocks = self._divide(runner, wanted)
        logger.info(pool.describe())  # before they are allocated, which may fail
        return num_blocks

    def _divide(self, runner: Any, wanted: int) -> int:
        """Divide the memory of the KV cache. wanted: the most slots"""
        config, pool = runner.config, self.pool
        given, size = config.kv_cache_memory_bytes, pool.bytes_per_slot
        num_bytes = runner.free_bytes() if given is None else given
        pool.num_slots = min(wanted, num_bytes // 2 // size - 1)  # one more is the null slot
        if pool.num_slots < 1:
            raise ValueError(f"{num_bytes} bytes are left for K, V and states, but states need half of it, and their "
                             f"least size, two slots, takes {2 * size}: raise {runner.memory_knob}")  # fmt: skip
        max_num_seqs = min(config.max_num_seqs, pool.num_slots)
        if max_num_seqs < config.max_num_seqs:
            logger.info("max_num_seqs is %d instead of %d: a state takes %d bytes, and %d bytes are for states, half "
                        "of the memory of the KV cache", max_num_seqs, config.max_num_seqs, size,
                        num_bytes // 2)  # fmt: skip
        left = num_bytes - pool.num_bytes
        runner.config = replace(config, max_num_seqs=max_num_seqs, kv_cache_memory_bytes=left)
        num_blocks: int = runner.count_blocks()
        if given is not None:  # the prefix cache may keep more than what runs
            return num_blocks
        return min(num_blocks, max_num_seqs * -(-runner.max_model_len // runner.backend.block_size))

    def more_inputs(self, model: Any) -> Any:
        from nanovllm_extras.states.state_graphs import StateInputs, needs_rounds

        return StateInputs(self.config.speculative_config is not None and not needs_rounds(model))

    def complete(self, batch: Batch) -> Batch:
        return with_states(batch)


def num_draft_slots(config: Config) -> int:
    """Return for how many drafts of a step there are slots in addition to those of sequences and snapshots."""
    if config.speculative_config is None:
        return 0
    most: int = read_options(config.speculative_config).num_speculative_tokens
    return min(config.max_num_seqs * most, MAX_DRAFTED_ROWS)


class PoolInputs(LayerInputs):
    """The states beside the KV cache."""

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool

    def of(self, metadata: AttentionMetadata, kv_cache: Tensor) -> tuple[AttentionMetadata, StateCaches]:
        return metadata, StateCaches(kv_cache, self._pool.conv, self._pool.recurrent)
