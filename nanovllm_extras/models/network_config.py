"""The shape of a network, with what others than the core's Qwen3 have. `read_config.py` reads it from config.json."""

from dataclasses import dataclass
from typing import Any

from nanovllm.models.config import ModelConfig


@dataclass(frozen=True)
class NetworkConfig(ModelConfig):
    """The fields have the names of config.json, except for `rope`, the biases, and how layers attend."""

    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    dtype: str = "float32"
    rope: Any = None
    """A `Rope` (`rope.py`); None is the plain one of `rope_theta`."""
    rotary_dim: int | None = None
    """Of each head, how many dimensions are rotated; None is all of them."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    attention_options: tuple[Any, ...] = ()
    """How each layer attends (`masking.py`). Without entries, a token attends to all tokens up to its own position."""
    widest_window: int | None = None
    """Tokens that the layers see at most; None if one of them sees all."""
    latent_rank: int | None = None
    """Channels of a token's latent that are values, if the cache holds latents; None if it holds K and V."""
    state_shape: Any = None  # the `StateShape` (`states/pool.py`) of models whose layers keep recurrent states
    kv_groups: tuple[Any, ...] = ()
    """The `KVGroup`s (`kv_groups/groups.py`) of models whose layers have K and V of different shapes."""
    num_experts: int = 0  # in each layer's mixture of experts; 0 is one feed-forward network
    has_head: bool = True  # False if the checkpoint has no output layer: the network only computes embeddings
    initializer_range: float = 0.02
    quantization_config: Any = None  # how the checkpoint's weights are quantised; None if they are not

    def options(self, layer: int) -> tuple[Any, ...]:
        """Return the options of attention in this layer: one, or none."""
        return self.attention_options[layer : layer + 1]
