"""Phi-3 and Phi-4-mini (Abdin et al. 2024, https://arxiv.org/abs/2404.14219).

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + mlp(norm(x)) ] → norm → logits

Three things differ from `llama.py`: q, k and v are one tensor in the checkpoint, and so are gate and up; only the
first part of each head may be rotated (partial rotary); long contexts have LongRoPE's factors.
"""

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.models.decoder import CausalLM
from nanovllm_extras.models.llama import LlamaAttention, LlamaDecoderLayer
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.raw_config import RawConfig
from nanovllm_extras.models.read_config import read_common, read_rope, read_rotary_dim
from nanovllm_extras.models.rope import rope_type_of
from nanovllm_extras.models.window_layers import SLIDING, read_windows


def read_phi3_config(raw: RawConfig) -> NetworkConfig:
    common = read_common(raw, max_position_embeddings=4096, rms_norm_eps=1e-5)
    common["qkv_bias"] = common["o_bias"] = False  # Phi-3 has none, whatever the file says
    window = raw.get("sliding_window")
    windows = {} if window is None else read_windows([SLIDING] * common["num_hidden_layers"], window)
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rotary_dim = read_rotary_dim(raw, common["head_dim"])
    if rope_type_of(parameters) == "yarn":  # what some early files call LongRoPE
        raw = {**raw, "rope_scaling": {**parameters, "rope_type": "longrope"}}
    raw = {"original_max_position_embeddings": 4096, **raw}
    rope = read_rope(raw, rotary_dim, common["max_position_embeddings"])
    return NetworkConfig(**common, rope=rope, rotary_dim=rotary_dim, **windows)


class Phi3Attention(LlamaAttention):
    def __init__(self, config: NetworkConfig, backend: TorchAttention, layer: int) -> None:
        super().__init__(config, backend, layer)
        self.qkv_proj.is_stored_fused = True  # type: ignore[assignment]


class Phi3DecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: NetworkConfig, backend: TorchAttention, layer: int = 0) -> None:
        super().__init__(config, backend, layer)
        self.self_attn = Phi3Attention(config, backend, layer)
        self.mlp.gate_up_proj.is_stored_fused = True  # type: ignore[assignment]


class Phi3ForCausalLM(CausalLM):
    read_config = staticmethod(read_phi3_config)
    layer_class = Phi3DecoderLayer
