"""`Layout`: what the layers of a model keep for each sequence, and where. `ModelRunner` holds one.

Here it is K and V of one shape for all tokens, in one KV cache, at one block table. There are subclasses for recurrent
states (`states/state_layout.py`) and for groups of layers (`kv_groups/`). `assembly.choose_layout` chooses one.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.cuda_graphs import CudaGraphs
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import TorchAttention
from nanovllm.plugins import choose_backends
from nanovllm_extras.execution.block_copies import BlockCopies
from nanovllm_extras.execution.device_setup import Device
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.models.layer_inputs import LayerInputs
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config


class Layout:
    """The plain layout. shape: that of the model, or of a rank's share of it"""

    layer_groups: Any = None
    """A `LayerGroups`, if groups of layers have block tables of their own."""
    num_tables = 1
    """The block tables of a sequence."""
    forward_only: str | None = None
    """Why CUDA graphs have only the model's forward pass, and not whole steps, if that is so."""
    pool: Any = None
    """A `StatePool`, if layers keep states: `make_kv_caches` makes it."""

    def __init__(self, config: Config, shape: NetworkConfig) -> None:
        self.config, self.shape = config, shape

    @staticmethod
    def network_of(shape: Any) -> Any:
        """Return the network that is loaded, for the one that config.json describes."""
        return shape

    # ---- the start, in this order

    def make_backends(self, device: torch.device, dtype: torch.dtype) -> tuple[tuple[Any, ...], str]:
        """Return an attention backend for each shape of K and V, and why. `torch` and eager is the core's."""
        config, shape = self.config, self.shape
        if shape.kv_groups:
            from nanovllm_extras.execution.choices import choose_for_shapes

            return choose_for_shapes(config, device, dtype, shape)
        is_plain = config.kv_cache_dtype == "auto" and shape.latent_rank is None
        if config.attention_backend == "torch" and config.enforce_eager and is_plain:
            return (self.make_cores_backend(device, dtype),), "attention_backend=torch"
        from nanovllm_extras.execution.choices import choose

        backend, reasons = choose(config, device, dtype, shape)
        return (backend,), reasons

    def make_cores_backend(self, device: torch.device, dtype: torch.dtype) -> TorchAttention:
        """Return the attention backend that the core would take."""
        config, shape = self.config, self.shape
        kinds, _ = choose_backends(config.attention_backend, device, dtype, shape, config.block_size)
        sizes = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, config.block_size)
        return kinds[0](*sizes, dtype)

    def backend_of_layers(self, backends: tuple[Any, ...]) -> Any:
        """Return what the network is made with: the attention backend, or one for each shape of K and V."""
        return backends if self.shape.kv_groups else backends[0]

    def describe(self, shape: NetworkConfig, dtype: torch.dtype) -> str:
        """Return what comes first in the description of the runner. shape: of all ranks"""
        groups = ", ".join([str(group) for group in shape.kv_groups])
        return f"groups of layers with K and V: {groups}; " * bool(groups)

    @property
    def is_checked(self) -> bool:
        """Whether the self-check can run such a network: those with K and V of one shape."""
        return not self.shape.kv_groups

    def make_device(self, runner: Runner) -> Device:
        """Return the device setup."""
        config, device = self.config, runner.device
        if device.type != "cuda" and not config.enable_cuda_graphs:
            return Device()
        from nanovllm_extras.execution.cuda_startup import CudaDevice

        sizes = (runner.max_num_batched_tokens, runner.max_rows)
        setup = CudaDevice(config, device, runner.slowest_backend, self.shape, *sizes)
        if setup.replayed == "step" and self.forward_only:
            setup.replayed, setup.note = "forward", f"{setup.note} of the forward pass only ({self.forward_only})"
        return setup

    def make_kv_caches(self, backends: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> list[KVCache]:
        """Return the KV caches, which have the same block ids."""
        return [KVCache(backends[0], self.num_cached_layers, self.cache_dtype(backends[0], dtype), device)]

    @property
    def num_cached_layers(self) -> int:
        """The layers for which a block of the KV cache has room."""
        return self.shape.num_hidden_layers

    def cache_dtype(self, backend: Any, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of K and V, for a network that computes in `dtype`."""
        return getattr(backend, "kv_cache_dtype", None) or dtype

    def make_transfers(self, caches: list[KVCache], added_bytes: int) -> BlockCopies:
        """Return what does the copies of each step. added_bytes: the size of a block in a cache that is added later"""
        config = self.config
        if not config.swap_space_bytes and not config.has_kv_store and self.pool is None:
            return BlockCopies(caches)
        from nanovllm_extras.execution.transfers import Transfers

        return Transfers(caches, self.pool, config.swap_space_bytes, config.max_num_seqs, added_bytes)

    def make_layer_inputs(self, caches: list[KVCache]) -> LayerInputs:
        """Return what gives the layers what they read."""
        return LayerInputs()

    def make_followers(self, model: Any, caches: list[KVCache]) -> tuple[Any, ...]:
        """Return what else computes each step."""
        return ()

    def divide_memory(self, runner: Runner) -> int:
        """Return the number of blocks in the pool, each of which serves one group of layers at a time."""
        return runner.count_blocks() * self.num_tables

    def more_inputs(self, model: Any) -> Any:
        """Return what rows of decodes have in CUDA graphs beside one slot and one block table: a `MoreInputs`."""
        return None

    def make_graphs(self, network: Any, kv_cache: Tensor, max_rows: int, max_num_blocks: int, more: Any) -> CudaGraphs:
        """Return the core's graphs of the forward pass of decodes. more: what `more_inputs` returns"""
        if more is None:
            return CudaGraphs(network, kv_cache, max_rows, max_num_blocks)
        from nanovllm_extras.execution.forward_graphs import ForwardGraphs

        return ForwardGraphs(network, kv_cache, max_rows, max_num_blocks, more)

    # ---- a step

    def complete(self, batch: Batch) -> Batch:
        """Return a batch with all that the layers read beside blocks, which here is nothing."""
        return batch
