"""A network of the user's own (the option `models`), as the runner of this package takes one.

The network reads its own config, a `ModelConfig` of the core, which may have fields of its own. The runner reads a
`NetworkConfig`, so both are kept.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from nanovllm.layers.attention import TorchAttention
from nanovllm.loader import load_weights
from nanovllm.models.qwen3 import ModelConfig
from nanovllm_extras.models.network_config import NetworkConfig


class OwnNetwork:
    """The class of a network, with the config that it has read. raw: the content of config.json"""

    def __init__(self, kind: Any, raw: dict[str, Any]) -> None:
        self.kind, self.own = kind, kind.read_config(raw)
        self.__name__ = kind.__name__
        is_known = isinstance(self.own, NetworkConfig)
        shared = {one.name: getattr(self.own, one.name) for one in fields(ModelConfig)}
        self.shape: NetworkConfig = self.own if is_known else NetworkConfig(**shared)

    def __call__(self, shape: NetworkConfig, backend: TorchAttention) -> nn.Module:
        """Make the network. shape: what the runner has made of `self.shape`"""
        network: nn.Module = self.kind(self.own, backend)
        return network

    def load_weights(self, model: nn.Module, folder: Path) -> None:
        """Copy the checkpoint's tensors to their places, as `nanovllm.LLM` does."""
        getattr(self.kind, "load_weights", load_weights)(model, folder)
