"""What the layers of a model read beside ids and positions, and a model as CUDA graphs see it.

Whoever calls a model has the metadata of a step and the tensor of the KV cache. For most models these are what the
layers read. Models with states (`states/`), or with groups of layers (`kv_groups/`), need more, and each has a subclass
of `LayerInputs`, which the runner holds.
"""

from typing import Any

from torch import Tensor

from nanovllm.layers.attention import AttentionMetadata


class LayerInputs:
    """The same metadata and the same KV cache for all layers."""

    def of(self, metadata: AttentionMetadata, kv_cache: Tensor) -> tuple[Any, Any]:
        """Return the last two arguments of the model: metadata, or a list with those of each layer, and KV caches."""
        return metadata, kv_cache


class Network:
    """A model that takes the metadata of a step and the tensor of the KV cache, whatever its layers read."""

    def __init__(self, model: Any, inputs: LayerInputs) -> None:
        self._model, self._inputs = model, inputs
        self.compute_logits = model.compute_logits

    def __call__(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        """Run the model -> [num_tokens, hidden_size]"""
        hidden: Tensor = self._model(input_ids, positions, *self._inputs.of(metadata, kv_cache))
        return hidden


def metadata_of(metadata: Any, layer: int) -> AttentionMetadata:
    """Return what `layer` reads of the metadata that a model gets: its own, if each layer has some."""
    return metadata[layer] if isinstance(metadata, list) else metadata
