"""The runner of models whose layers keep states.

`assembly.py` makes it when the network's config has a `state_shape`. All other models have the runners that they had.
"""

import logging
from dataclasses import replace
from typing import Any

from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.cuda_graphs import CudaGraphs
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.all_options import Config
from nanovllm_extras.full_runner import MAX_DRAFTED_ROWS, ModelRunner
from nanovllm_extras.layer_inputs import LayerInputs
from nanovllm_extras.speculation.speculation_options import read_options
from nanovllm_extras.states.pool import StateCaches, StateKVCache, with_states

logger = logging.getLogger(__name__)


class StateRunner(ModelRunner):
    """Runs steps as `ModelRunner` does. The model gets the pool of states, and the slots of the step's sequences.

    The slots are added to the metadata of a batch before it is sent, so they are a part of the same copy.
    """

    kv_cache: StateKVCache

    def make_layer_inputs(self) -> LayerInputs:
        return Pool(self.kv_cache)

    def complete(self, batch: Batch) -> Batch:
        return with_states(batch)

    @property
    def more_inputs(self) -> Any:  # type: ignore[override]  # a constant of the parent
        from nanovllm_extras.states.state_graphs import StateInputs, needs_rounds

        return StateInputs(self.config.speculative_config is not None and not needs_rounds(self.model))

    def make_graphs(self) -> CudaGraphs:
        from nanovllm_extras.states.state_graphs import StateCudaGraphs

        return StateCudaGraphs(self.network, self.kv_cache.tensor, *self.largest_decode, self.more_inputs)

    def describe(self) -> str:
        num_bytes = self.shape.state_shape.bytes_per_slot(self.dtype)
        return f"a state of {num_bytes:,} bytes per sequence; {super().describe()}"

    def make_kv_cache(self) -> StateKVCache:
        shape: Any = self.shape
        num_layers = shape.num_hidden_layers - shape.state_shape.num_layers
        return StateKVCache(self.backend, num_layers, self.dtype, self.device, shape.state_shape)

    def start(self) -> None:
        super().start()
        self.description = f"{self.describe_slots()}; {self.description}"

    def describe_slots(self) -> str:
        """Return how many slots the pool has, and how many bytes it takes: one slot more, the null slot."""
        return f"{self.kv_cache.num_slots:,} slots of states, which take {self.kv_cache.state_bytes:,} bytes"

    def num_blocks_that_fit(self) -> int:
        num_blocks = self.divide_memory()
        logger.info(self.describe_slots())  # before they are allocated, which may fail
        return num_blocks

    def divide_memory(self) -> int:
        """Return the number of blocks, and set the number of slots: for sequences that may run, snapshots and drafts.

        Unless the number of blocks is configured, at most half of the memory is for states. If this is too little for
        `max_num_seqs` states, fewer sequences run at the same time.
        """
        config, cache = self.config, self.kv_cache
        wanted = config.max_num_seqs * (2 if config.enable_prefix_caching else 1) + num_draft_slots(config)
        cache.num_slots = wanted
        if config.num_kv_blocks is not None:
            return config.num_kv_blocks
        given, size = config.kv_cache_memory_bytes, cache.bytes_per_slot
        num_bytes = self.free_bytes() if given is None else given
        cache.num_slots = min(wanted, num_bytes // 2 // size - 1)  # one more is the null slot
        if cache.num_slots < 1:
            raise ValueError(f"{num_bytes} bytes are left for K, V and states, but states need half of it, and their "
                             f"least size, two slots, takes {2 * size}: raise {self.memory_knob}")  # fmt: skip
        max_num_seqs = min(config.max_num_seqs, cache.num_slots)
        if max_num_seqs < config.max_num_seqs:
            logger.info("max_num_seqs is %d instead of %d: a state takes %d bytes, and %d bytes are for states, half "
                        "of the memory of the KV cache", max_num_seqs, config.max_num_seqs, size,
                        num_bytes // 2)  # fmt: skip
        left = num_bytes - (cache.num_slots + 1) * size
        self.config = replace(config, max_num_seqs=max_num_seqs, kv_cache_memory_bytes=left)
        num_blocks = super().num_blocks_that_fit()
        if given is not None:  # the prefix cache may keep more than what runs
            return num_blocks
        return min(num_blocks, max_num_seqs * -(-self.max_model_len // self.backend.block_size))


def num_draft_slots(config: Config) -> int:
    """Return for how many drafts of a step there are slots in addition to those of sequences and snapshots."""
    if config.speculative_config is None:
        return 0
    most: int = read_options(config.speculative_config).num_speculative_tokens
    return min(config.max_num_seqs * most, MAX_DRAFTED_ROWS)


class Pool(LayerInputs):
    """The states beside the KV cache."""

    def __init__(self, kv_cache: StateKVCache) -> None:
        self._kv_cache = kv_cache

    def of(self, metadata: AttentionMetadata, kv_cache: Tensor) -> tuple[AttentionMetadata, StateCaches]:
        return metadata, self._kv_cache.caches
