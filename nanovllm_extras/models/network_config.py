"""The shape of a network, with what others than the core's Qwen3 have. `read_config.py` reads it from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm.models.qwen3 import ModelConfig
from nanovllm_extras.models.groups import KVGroup
from nanovllm_extras.models.masking import AttentionOptions
from nanovllm_extras.models.rope import Rope


@dataclass(frozen=True)
class NetworkConfig(ModelConfig):
    """The fields have the names of config.json, except for `rope`, the biases, and how layers attend."""

    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    dtype: str = "float32"
    rope: Rope | None = None
    """None is the plain one of `rope_theta`."""
    rotary_dim: int | None = None
    """Of each head, how many dimensions are rotated; None is all of them."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    attention_options: tuple[AttentionOptions, ...] = ()
    """How each layer attends (`masking.py`). Without entries, a token attends to all tokens up to its own position."""
    widest_window: int | None = None
    """Tokens that the layers see at most; None if one of them sees all."""
    latent_rank: int | None = None
    """Channels of a token's latent that are values, if the cache holds latents; None if it holds K and V."""
    state_shape: Any = None  # the `StateShape` (`layer_inputs.py`) of models whose layers keep recurrent states
    kv_groups: tuple[KVGroup, ...] = ()
    """Of models whose layers have K and V of different shapes."""
    num_experts: int = 0  # in each layer's mixture of experts; 0 is one feed-forward network
    has_head: bool = True  # False if the checkpoint has no output layer: the network only computes embeddings
    initializer_range: float = 0.02
    quantization_config: Mapping[str, Any] | None = None
    """How the checkpoint's weights are quantised; None if they are not."""
    network: Any = field(default=None, compare=False, repr=False)
    """The class of the network, if `nanovllm.LLM` makes it (`plugins/networks.py`)."""

    def options(self, layer: int) -> tuple[AttentionOptions, ...]:
        """Return the options of attention in this layer: one, or none."""
        return self.attention_options[layer : layer + 1]

    def why_not(self, backend: type[TorchAttention], device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why a backend cannot compute the layers' windows, soft caps and sinks, or None. For `nanovllm.LLM`."""
        options = tuple(dict.fromkeys(self.attention_options))
        if not options:
            return None
        if len(signature(backend.attend).parameters) < len(("self", "q", "layer_cache", "metadata", "options")):
            return "it attends in one way only, and layers of this network have windows, soft caps or sinks"
        why_not_any = getattr(backend, "why_not_any", None)  # PyTorch's attention has none: it calls the options
        reason: str | None = None if why_not_any is None else why_not_any(options, device, dtype, self.head_dim)
        return reason

    @property
    def supports_graphs(self) -> bool:
        """Whether the core's CUDA graphs can record decodes: the choice of experts is read on the host."""
        return not self.num_experts
