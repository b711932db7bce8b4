"""The layer of Gemma 4: attention with K and V of its own or of an earlier layer, and an embedding of its own.

`gemma4.py` says what is special about it, and `gemma4_moe.py` adds experts.
"""

import torch
from torch import Tensor, nn

from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.layers.basic import ApplyRotary, FusedLinear, Linear
from nanovllm_extras.models.gated_mlp import GATES, GatedMLP
from nanovllm_extras.models.gemma4_config import Gemma4Config
from nanovllm_extras.models.gpt_oss import OnceRoundedRMSNorm
from nanovllm_extras.models.masking import MaskedAttention
from nanovllm_extras.models.window_layers import SLIDING


def normalised(x: Tensor, eps: float) -> Tensor:
    """Divide x: [..., size] by its root mean square over the last dimension, computed in float32."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Gemma4Attention(nn.Module):
    def __init__(self, config: Gemma4Config, backends: tuple[TorchAttention, ...], layer: int) -> None:
        super().__init__()
        place, group, eps = config.kv_places[layer], config.group_of(layer), config.rms_norm_eps
        self.head_dim, self.eps = group.head_dim, eps
        q_size, kv_size = config.num_attention_heads * group.head_dim, group.num_kv_heads * group.head_dim
        parts = {"q_proj": q_size}
        if place.is_owner:
            has_v = not config.attention_k_eq_v or config.layer_types[layer] == SLIDING
            parts |= {"k_proj": kv_size, "v_proj": kv_size} if has_v else {"k_proj": kv_size}
            self.k_norm = OnceRoundedRMSNorm(group.head_dim, eps)
        self.qkv_proj = FusedLinear(config.hidden_size, parts, config.qkv_bias)
        self.q_norm = OnceRoundedRMSNorm(group.head_dim, eps)
        self.rotate = ApplyRotary()
        self.attention = MaskedAttention(backends[place.group], group.options)
        self.o_proj = Linear(q_size, config.hidden_size, config.o_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        q, *kv = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv_proj(x))  # [num_tokens, heads, head_dim]
        q = self.rotate(q, cos, sin, self.q_norm)
        if kv:
            k = self.rotate(kv[0], cos, sin, self.k_norm)
            v = normalised(kv[-1], self.eps)  # of the projection of the keys, if there is no other
            attended = self.attention(q, k, v, layer_cache, metadata)
        else:  # an earlier layer has stored the K and V of this step
            attended = self.attention.backend.attend(q, layer_cache, metadata, *self.attention.options)
        return self.o_proj(attended.flatten(1))  # [num_tokens, hidden_size]


class Gemma4DecoderLayer(nn.Module):
    def __init__(self, config: Gemma4Config, backends: tuple[TorchAttention, ...], layer: int) -> None:
        super().__init__()
        hidden_size, eps, size = config.hidden_size, config.rms_norm_eps, config.hidden_size_per_layer_input
        is_wide = config.use_double_wide_mlp and not config.kv_places[layer].is_owner
        self.input_layernorm = OnceRoundedRMSNorm(hidden_size, eps)
        self.self_attn = Gemma4Attention(config, backends, layer)
        self.post_attention_layernorm = OnceRoundedRMSNorm(hidden_size, eps)
        self.pre_feedforward_layernorm = OnceRoundedRMSNorm(hidden_size, eps)
        self.mlp = GatedMLP(hidden_size, config.intermediate_size * (2 if is_wide else 1), config.hidden_act)
        self.post_feedforward_layernorm = OnceRoundedRMSNorm(hidden_size, eps)
        if size:
            self.per_layer_input_gate = Linear(hidden_size, size)
            self.activation = GATES[config.hidden_act]()
            self.per_layer_projection = Linear(size, hidden_size)
            self.post_per_layer_input_norm = OnceRoundedRMSNorm(hidden_size, eps)
        self.layer_scalar = nn.Parameter(torch.empty(1))

    def forward(
        self,
        x: Tensor,
        own_embedding: Tensor | None,  # [num_tokens, hidden_size_per_layer_input], this layer's
        cos: Tensor,
        sin: Tensor,
        layer_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Compute the layer: [num_tokens, hidden_size] -> the same shape"""
        attended = self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.feed_forward(x))
        if own_embedding is not None:
            gated = self.activation(self.per_layer_input_gate(x), own_embedding)
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.pre_feedforward_layernorm(x))  # [num_tokens, hidden_size]
