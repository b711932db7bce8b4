"""A loaded network's layers become quantised: `full_runner.py` calls `quantise` before layers get fast versions.

Products of projections are quantised, and embeddings if the options say so. Norms, routers, biases and DeepSeek's
up-projections of latents, which no token multiplies as they are, stay in the model's dtype.
"""

from collections.abc import Callable
from typing import TypeGuard

from torch import nn

from nanovllm.layers.basic import Embedding, FusedLinear, Linear
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.weights.quantised_linear import (
    QuantisedEmbedding,
    QuantisedFusedLinear,
    QuantisedLinear,
    quantise_weight,
)
from nanovllm_extras.weights.quantization_options import STORED, Quantization, check_stored, read_options

VECTOR = 16  # the number of inputs must be a multiple of this
Finish = Callable[[nn.Module], nn.Module]
"""Given a quantised layer, returns the layer that replaces it, such as one with the layout of a kernel."""


def quantise(
    model: nn.Module, given: object, shape: NetworkConfig | None = None, finish: Finish = lambda layer: layer
) -> None:
    """Quantise the model in place, layer by layer, so that memory holds at most one weight twice.

    `given` is a value of `Config.quantization`. `shape` knows the checkpoint's format. Raises ValueError, before
    anything changes, if a layer does not fit.
    """
    if given in STORED:
        check_stored(given, shape)
        return
    options = read_options(given)
    for path, layer in model.named_modules():
        if is_quantised(layer, options) and layer.weight.shape[1] % VECTOR:
            raise ValueError(
                f"quantization={options.method!r} needs layers whose inputs are a multiple of {VECTOR}, "
                f"but {path} has {layer.weight.shape[1]}"
            )
    made: dict[nn.Module, nn.Module] = {}  # a layer may have two places: tied embeddings
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is None or not is_quantised(child, options):
                continue
            if child not in made:
                quantised = quantised_layer(child, options)
                child._parameters.clear()  # the layer lives on in `made`, without its weight
                made[child] = finish(quantised)
            setattr(module, name, made[child])


def is_quantised(layer: nn.Module, options: Quantization) -> TypeGuard[Linear | FusedLinear | Embedding]:
    return type(layer) in (Linear, FusedLinear) or (options.embedding_bits > 0 and type(layer) is Embedding)


def quantised_layer(layer: Linear | FusedLinear | Embedding, options: Quantization) -> nn.Module:
    if isinstance(layer, Embedding):
        weight = quantise_weight(layer.weight, options.embedding_bits, options.group_size)
        return QuantisedEmbedding(weight, layer.weight.dtype)
    weight = quantise_weight(layer.weight, options.bits, options.group_size)
    if isinstance(layer, FusedLinear):
        return QuantisedFusedLinear(weight, layer.bias, layer.parts)
    return QuantisedLinear(weight, layer.bias)
