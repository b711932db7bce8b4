"""Llama 2, 3, 3.1 and 3.2 (Touvron et al. 2023, https://arxiv.org/abs/2302.13971; Llama 3: https://arxiv.org/abs/2407.21783),
and Mistral (Jiang et al. 2023, https://arxiv.org/abs/2310.06825), whose layers all have a sliding window.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + mlp(norm(x)) ] → norm → logits

The decoder that most others vary: what Qwen3 does to queries and keys before they are rotated is not done here.
"""

from torch import nn

from nanovllm.checks import check_bool
from nanovllm.layers.attention import TorchAttention
from nanovllm.layers.basic import FusedLinear, Linear
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer
from nanovllm_extras.models.decoder import CausalLM
from nanovllm_extras.models.gated_mlp import GatedMLP
from nanovllm_extras.models.masking import make_attention
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_common, read_rope, read_rotary_dim, refuse_partial_rotary
from nanovllm_extras.models.rope import ApplyPartialRotary
from nanovllm_extras.models.window_layers import SLIDING, read_windows


def read_llama_config(raw: RawConfig) -> NetworkConfig:
    """Read a Llama config.json. A `partial_rotary_factor` has its effect as in vLLM; transformers 5 ignores it."""
    common = read_common(raw, max_position_embeddings=2048)
    rotary_dim = read_rotary_dim(raw, common["head_dim"])
    rope = read_rope(raw, rotary_dim, common["max_position_embeddings"])
    mlp_bias = raw.get("mlp_bias") or False
    check_bool("config.json: mlp_bias", mlp_bias)
    return NetworkConfig(**common, rope=rope, rotary_dim=rotary_dim, mlp_bias=mlp_bias)


def read_mistral_config(raw: RawConfig) -> NetworkConfig:
    common = read_common(raw, max_position_embeddings=131072, num_key_value_heads=8)
    common["qkv_bias"] = common["o_bias"] = False  # Mistral has none, whatever the file says
    refuse_partial_rotary(raw)
    window = raw.get("sliding_window", 4096)
    windows = {} if window is None else read_windows([SLIDING] * common["num_hidden_layers"], window)
    rope = read_rope(raw, common["head_dim"], common["max_position_embeddings"])
    return NetworkConfig(**common, rope=rope, **windows)


class LlamaAttention(Qwen3Attention):
    """Attention as in Qwen3, without norms of queries and keys, with biases and options of its own."""

    def __init__(self, config: NetworkConfig, backend: TorchAttention, layer: int) -> None:
        super().__init__(config, backend)
        self.rotary_dim = config.rotary_dim or config.head_dim
        self.q_norm = self.k_norm = nn.Identity()
        if self.rotary_dim < config.head_dim:
            self.rotate = ApplyPartialRotary()
        self.qkv_proj = FusedLinear(config.hidden_size, self.qkv_proj.parts, bias=config.qkv_bias)
        self.attention = make_attention(backend, config.options(layer))
        self.o_proj = Linear(self.o_proj.weight.shape[1], config.hidden_size, bias=config.o_bias)


class LlamaDecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config: NetworkConfig, backend: TorchAttention, layer: int = 0) -> None:
        super().__init__(config, backend)
        self.self_attn = LlamaAttention(config, backend, layer)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)


class LlamaForCausalLM(CausalLM):
    read_config = staticmethod(read_llama_config)
    layer_class = LlamaDecoderLayer


class MistralForCausalLM(LlamaForCausalLM):
    """The same network; its config gives each layer a window."""

    read_config = staticmethod(read_mistral_config)
