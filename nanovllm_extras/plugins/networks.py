"""The networks of this package as `nanovllm.LLM` takes them: the entry points `nanovllm.models` name `NETWORKS`.

The engine in `nanovllm/` serves networks whose layers all have K and V of one shape. What needs more (recurrent states,
latents, two shapes of K and V, quantised weights) raises ValueError and names `nanovllm_extras.LLM`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.models.architectures import find_architecture
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.weights.checkpoint import check_stored_weights
from nanovllm_extras.weights.load_model import load_weights

ONLY_EXTRAS = {  # field of the shape -> what a network has if it is set
    "state_shape": "layers with recurrent states",
    "latent_rank": "a cache of latents",
    "kv_groups": "layers with K and V of different shapes",
    "quantization_config": "quantised weights",
}


class Networks:
    """All networks of this package. config.json says which one is made."""

    def read_config(self, raw: dict[str, Any]) -> NetworkConfig:
        """Return the shape that config.json describes. ValueError if `nanovllm.LLM` cannot serve the network."""
        check_stored_weights(raw)
        network, shape = find_architecture(raw)
        for field, what in ONLY_EXTRAS.items():
            if getattr(shape, field):
                raise ValueError(f"{network.__name__} has {what}: nanovllm_extras.LLM serves it, nanovllm.LLM does not")
        return replace(shape, network=network)

    def __call__(self, shape: NetworkConfig, backend: TorchAttention) -> nn.Module:
        model: nn.Module = shape.network(shape, backend)
        return model

    def load_weights(self, model: nn.Module, folder: Path) -> None:
        """Copy the checkpoint's tensors to their places. ValueError unless checkpoint and model match exactly."""
        load_weights(model, folder, safe_open.get_tensor, lambda name, tensor: tensor)


NETWORKS = Networks()
