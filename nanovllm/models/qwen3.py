"""Qwen3, dense (Qwen3 Technical Report 2025, https://arxiv.org/abs/2505.09388): a decoder with grouped-query attention,
RMS-normalised queries and keys, rotary positions, and a SwiGLU feed-forward network.

    token ids → embedding → num_layers × [ x + attention(norm(x)),  x + mlp(norm(x)) ] → norm → lm_head → logits

Reads from top to bottom: attention, layer, model. All tokens of a batch are end to end in one dimension, whatever
sequence they belong to. Only `Attention` distinguishes sequences, by `metadata`. The modules have the names that they
have in the checkpoint. `loader.py` fills in the weights, and `ModelRunner` calls the model.
"""

from torch import Tensor, nn

from nanovllm.layers.attention import Attention, AttentionMetadata, TorchAttention
from nanovllm.layers.linear import Embedding, FusedLinear, Linear
from nanovllm.layers.mlp import GatedMLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import ApplyRotary, Rotary
from nanovllm.models.config import ModelConfig, read_qwen3_config


class Qwen3Attention(nn.Module):
    def __init__(self, config: ModelConfig, backend: TorchAttention) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, config.attention_bias)
        self.q_norm: nn.Module = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm: nn.Module = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.rotate = ApplyRotary()
        self.attention = Attention(backend)
        self.o_proj = Linear(q_size, config.hidden_size, config.attention_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv_proj(x))  # [num_tokens, heads, head_dim]
        q, k = self.q_norm(q), self.k_norm(k)  # each head on its own
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        return self.o_proj(self.attention(q, k, v, layer_cache, metadata).flatten(1))  # [num_tokens, hidden_size]


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, backend: TorchAttention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer_cache, metadata)
        return x + self.mlp(self.post_attention_layernorm(x))  # [num_tokens, hidden_size]


class Qwen3Model(nn.Module):
    def __init__(self, config: ModelConfig, backend: TorchAttention) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, backend) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        cos, sin = self.rotary(positions, x.dtype)  # [num_tokens, 1, head_dim / 2] each
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, kv_cache[:, i], metadata)
        return self.norm(x)  # [num_tokens, hidden_size]


class Qwen3ForCausalLM(nn.Module):
    """The interface of a network: read its config, compute hidden states of all tokens, and logits of some."""

    read_config = staticmethod(read_qwen3_config)

    def __init__(self, config: ModelConfig, backend: TorchAttention) -> None:
        super().__init__()
        self.model = Qwen3Model(config, backend)
        # with tied embeddings both names are one module, and so one tensor
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        """Compute hidden states [num_tokens, hidden_size], and write the K and V of all new tokens to the cache.

        input_ids, positions: [num_tokens]; kv_cache: [2, num_layers, num_blocks, …], with the backend's layout
        """
        return self.model(input_ids, positions, metadata, kv_cache)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[num_samples, hidden_size] -> [num_samples, vocab_size]; a separate method, because few tokens need logits"""
        return self.lm_head.logits(hidden)
