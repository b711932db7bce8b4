"""What all decoders have around their layers: embedding and final norm, and the product that scores the vocabulary.

    token ids → embedding → num_layers × layer → norm → hidden states → lm_head → logits

The forward passes are those of the core's Qwen3, except that each layer may have metadata of its own
(`layer_inputs.py`). Each architecture has its layer in a file of its own. The modules have the names that they have in
the checkpoint.
"""

from collections.abc import Callable

from torch import Tensor, nn

from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.layers.basic import Embedding, RMSNorm
from nanovllm.models.qwen3 import Qwen3ForCausalLM, Qwen3Model
from nanovllm_extras.models.layer_inputs import metadata_of
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.models.rope import Rope, ScaledRotary

LayerClass = Callable[..., nn.Module]
"""Makes a layer: `layer_class(config, backend, number of the layer)`."""


class DecoderModel(Qwen3Model):
    def __init__(self, config: NetworkConfig, backend: TorchAttention, layer_class: LayerClass) -> None:
        nn.Module.__init__(self)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        rope = config.rope or Rope(config.rope_theta)
        self.rotary = ScaledRotary(config.rotary_dim or config.head_dim, rope, config.max_position_embeddings)
        self.layers = nn.ModuleList(layer_class(config, backend, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv_cache: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden_size]
        cos, sin = self.rotary(positions, x.dtype)  # [num_tokens, 1, head_dim / 2] each
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, kv_cache[:, i], metadata_of(metadata, i))
        return self.norm(x)  # [num_tokens, hidden_size]


class CausalLM(Qwen3ForCausalLM):
    """A network. A subclass names its layer, and has a static method `read_config`."""

    read_config: Callable[..., NetworkConfig]
    layer_class: LayerClass
    model_class: type[DecoderModel] = DecoderModel
    is_length_scaled = False
    """Whether max_position_embeddings of config.json is the length after `rope_scaling`, whatever its type."""

    def __init__(self, config: NetworkConfig, backend: TorchAttention) -> None:
        nn.Module.__init__(self)
        self.model = self.model_class(config, backend, self.layer_class)
        # with tied embeddings both names are one module, and so one tensor
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Embedding(config.vocab_size, config.hidden_size)
