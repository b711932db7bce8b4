"""The runner of models whose K and V have several shapes.

`assembly.py` makes `GroupRunner` for such a model if it has one block table, and otherwise the other subclass of
`ShapesRunner` (`equal_blocks_runner.py`). All other models have the runners that they had.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm_extras.device_setup import Device, Unchecked
from nanovllm_extras.full_runner import ModelRunner
from nanovllm_extras.kernels.choices import choose
from nanovllm_extras.kv_groups.groups import GroupedKVCache
from nanovllm_extras.layer_inputs import LayerInputs


class ShapesRunner(ModelRunner):
    """Runs steps as `ModelRunner` does, with an attention backend for each shape."""

    def describe(self) -> str:
        whole = getattr(self, "whole_shape", self.shape)  # of all ranks
        groups = ", ".join([str(group) for group in whole.kv_groups])
        return f"groups of layers with K and V: {groups}; {super().describe()}"

    def begin_self_check(self, kind: Device) -> Unchecked:
        """Return a check of nothing: the self-check runs networks with one shape of K and V."""
        return Unchecked()

    def make_backend(self) -> TorchAttention:
        """Choose the attention backend of each shape, with the same block size, and return that of the first."""
        config, shape, chosen = self.config, self.shape, []
        for group in shape.kv_groups:
            sizes = {"head_dim": group.head_dim, "num_key_value_heads": group.num_kv_heads}
            of_group = replace(shape, **sizes, attention_options=(group.options,))
            chosen.append(choose(config, self.device, self.dtype, of_group))
            config = replace(config, block_size=chosen[0][0].block_size)
        self.backends: Any = tuple(backend for backend, _ in chosen)
        self.reasons = " and ".join(dict.fromkeys(reason for _, reason in chosen))
        return chosen[0][0]

    @property
    def slowest_backend(self) -> Any:
        """The first backend that CUDA graphs cannot record, such as PyTorch's for heads that no kernel takes."""
        return next((one for one in self.backends if not getattr(one, "supports_graphs", False)), self.backend)

    @property
    def backend_of_layers(self) -> Any:
        return self.backends


class GroupRunner(ShapesRunner):
    """Runs models with one block table, and a KV cache for each shape."""

    kv_cache: GroupedKVCache

    def make_layer_inputs(self) -> LayerInputs:
        return AllShapes(self.kv_cache)

    def make_kv_cache(self) -> GroupedKVCache:
        """Return the caches of all shapes, each with its part of every block."""
        pairs = zip(self.backends, self.shape.kv_groups, strict=True)
        caches = [KVCache(backend, group.num_layers, self.dtype, self.device) for backend, group in pairs]
        return GroupedKVCache(tuple(caches))


class AllShapes(LayerInputs):
    """The KV caches of all shapes."""

    def __init__(self, kv_cache: GroupedKVCache) -> None:
        self._kv_cache = kv_cache

    def of(self, metadata: AttentionMetadata, kv_cache: Tensor) -> tuple[AttentionMetadata, tuple[Tensor, ...]]:
        return metadata, self._kv_cache.tensors
