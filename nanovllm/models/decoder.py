"""What all decoders have around their layers: embedding and final norm, and the product that scores the vocabulary.

    token ids → embedding → num_layers × layer → norm → hidden states → lm_head → logits

Each architecture has its layer in a file of its own. The modules have the names that they have in the checkpoint. The
loader fills in the weights; `ModelRunner` calls the model.
"""

from torch import Tensor, nn

from nanovllm.layers.attention import AttentionMetadata
from nanovllm.layers.backends import AttentionBackend
from nanovllm.layers.linear import Embedding
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import Rotary
from nanovllm.models.config import ModelConfig


class DecoderModel(nn.Module):
    """`layer_class` is called as `layer_class(config, backend, number of the layer)`."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, layer_class: type[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.rotary_dim or config.head_dim, config.rope, config.max_position_embeddings)
        self.layers = nn.ModuleList(layer_class(config, backend, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        cos, sin = self.rotary(positions, x.dtype)  # [num_tokens, 1, rotary_dim / 2] each
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, kv_cache[:, i], metadata)
        return self.norm(x)  # [num_tokens, hidden_size]


class CausalLM(nn.Module):
    """What the engine asks of a network: hidden states of all tokens, and logits of some.

    A subclass names its layer, and has a static method `read_config` from the dict of config.json to a `ModelConfig`.
    """

    layer_class: type[nn.Module]
    model_class: type[DecoderModel] = DecoderModel

    def __init__(self, config: ModelConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.model = self.model_class(config, backend, self.layer_class)
        # with tied embeddings both names stand for one module, and so for one tensor
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        """input_ids, positions: [num_tokens]; kv_cache: [2, num_layers, num_blocks, …], as the backend shapes it

        Returns hidden states [num_tokens, hidden_size], and writes the K and V of all new tokens to the cache.
        """
        return self.model(input_ids, positions, metadata, kv_cache)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size]; a method of its own, because few tokens need logits"""
        return self.lm_head.logits(hidden)
