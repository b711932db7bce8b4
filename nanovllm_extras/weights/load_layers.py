"""Load the quantised layers of a network, whatever the format of the checkpoint.

    find the kind of each projection → leave their layers out → allocate the rest → read, cut and finish layer by layer

A `Source` reads a format: those of `stored.py`, `gguf.py` and `dummies.py`. Projections of the same input are one
product if they have the same kind. Otherwise each kind is a product of its own, as when a checkpoint quantises the
large projections of Gated DeltaNet and leaves its small ones in floats.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nanovllm.layers.basic import FusedLinear, Linear
from nanovllm.loader import allocate
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm_extras.weights.load_model import places_of_stored
from nanovllm_extras.weights.quantise import VECTOR, Finish
from nanovllm_extras.weights.quantised_linear import (
    QuantisedFusedLinear,
    QuantisedLinear,
    QuantisedWeight,
    SplitFusedLinear,
)
from nanovllm_extras.weights.shares import Share


class Kind(NamedTuple):
    """How the weight of a projection is quantised."""

    bits: int
    group_size: int | None
    """The number of inputs that share a scale; None if each output has one scale."""
    order: bytes | None = None
    """The order of the inputs, if they are not in their normal order."""


class Source(Protocol):
    """A checkpoint, by the names that the network has for its tensors."""

    def kind(self, part: str, shape: tuple[int, ...]) -> Kind | None:
        """Return how a projection is quantised, or None if it is not. shape: [out, in], in the checkpoint"""

    def weight(self, part: str, shape: tuple[int, ...]) -> QuantisedWeight:
        """Return the weight of a quantised projection. ValueError if it does not have this shape."""

    def floats(self, name: str) -> Tensor:
        """Return a tensor that is not quantised. ValueError if it is missing."""

    def bias(self, part: str, num_outputs: int) -> Tensor:
        """Return the bias of a quantised projection, empty if `num_outputs` is 0. ValueError if it does not fit."""


class Product(NamedTuple):
    """Projections of one layer that have the same kind."""

    kind: Kind | None
    parts: dict[str, tuple[str, int]]
    """Name in the checkpoint -> name in the layer, and number of outputs."""


def load_layers(
    source: Source, model: Qwen3ForCausalLM, share: Share, finish: Finish, dtype: torch.dtype, device: torch.device
) -> tuple[Qwen3ForCausalLM, dict[str, Tensor]]:
    """Return the network on `device` with its quantised layers, and the places of all other weights.

    model: on the meta device. Each quantised layer becomes what `finish` makes of it before the next one is loaded.
    """
    found = find_layers(source, model, share)
    for path in found:
        set_layer(model, path, nn.Identity())  # the memory of plain weights is never taken
    model = allocate(model, dtype, device)
    places = places_of_stored(model)
    for path, (layer, products) in found.items():
        made = [make_product(source, layer, product, share, finish, dtype, device) for product in products]
        set_layer(model, path, made[0] if len(made) == 1 else SplitFusedLinear(made, layer.parts))
    return model, places


def find_layers(source: Source, model: nn.Module, share: Share) -> dict[str, tuple[Any, list[Product]]]:
    """Return the quantised layers by path, with their products. Raises ValueError for a layer that cannot be."""
    found: dict[str, tuple[Any, list[Product]]] = {}
    for path, layer in model.named_modules():
        if type(layer) not in (Linear, FusedLinear):
            continue
        products: dict[Kind | None, dict[str, tuple[str, int]]] = {}
        for part, (name, rows) in parts_of(path, layer).items():
            shape = share.whole_shape(f"{part}.weight", (rows, layer.weight.shape[1]))
            kind = source.kind(part, shape)
            products.setdefault(kind, {})[part] = name, rows
            if kind is not None:
                share.check_groups(f"{part}.weight", kind.group_size, kind.order is not None)
        if set(products) == {None}:
            continue
        if layer.weight.shape[1] % VECTOR:
            raise ValueError(f"{path} has {layer.weight.shape[1]} inputs, quantised layers need a multiple of {VECTOR}")
        found[path] = layer, [Product(*pair) for pair in products.items()]
    return found


def parts_of(path: str, layer: Linear | FusedLinear) -> dict[str, tuple[str, int]]:
    """Return the projections of a layer: name in the checkpoint -> name in the layer, and number of outputs."""
    if not isinstance(layer, FusedLinear) or getattr(layer, "is_stored_fused", False):
        return {path: (path.rpartition(".")[2], len(layer.weight))}
    parent = path.rpartition(".")[0]
    return {f"{parent}.{name}": (name, rows) for name, rows in layer.parts.items()}


def make_product(
    source: Source,
    layer: Any,
    product: Product,
    share: Share,
    finish: Finish,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """Return a product with its weights. layer: the whole layer that has it, on the meta device"""
    num_inputs, has_bias = layer.weight.shape[1], layer.bias is not None
    if product.kind is None:
        return make_plain(source, layer, dict(product.parts), share, dtype, device)
    weights, biases = [], []
    for part, (_, rows) in product.parts.items():
        share.check()
        shape = share.whole_shape(f"{part}.weight", (rows, num_inputs))
        weights.append(share.of_weight(f"{part}.weight", source.weight(part, shape)))
        biases.append(share.of(f"{part}.bias", source.bias(part, shape[0] if has_bias else 0)))
    weight = joined(weights, device)
    bias = torch.cat(biases).to(device, dtype) if has_bias else None
    if type(layer) is Linear:
        return finish(QuantisedLinear(weight, bias))
    is_whole = len(product.parts) == 1 and getattr(layer, "is_stored_fused", False)
    return finish(QuantisedFusedLinear(weight, bias, layer.parts if is_whole else dict(product.parts.values())))


def make_plain(
    source: Source,
    layer: Linear | FusedLinear,
    parts: dict[str, tuple[str, int]],
    share: Share,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """Return a product of the projections of a layer that are not quantised, though others are."""
    with torch.device("meta"):
        plain = FusedLinear(layer.weight.shape[1], dict(parts.values()), layer.bias is not None)
    plain = allocate(plain, dtype, device)
    for kind, tensor in plain.named_parameters():
        rows = tensor.split(tuple(plain.parts.values()))
        for part, place in zip(parts, rows, strict=True):
            share.check()
            found = share.of(f"{part}.{kind}", source.floats(f"{part}.{kind}"))
            if found.shape != place.shape:
                raise ValueError(f"tensor {part}.{kind} is {list(found.shape)}, the model needs {list(place.shape)}")
            place.copy_(found)
    return plain


def joined(weights: list[QuantisedWeight], device: torch.device) -> QuantisedWeight:
    """Concatenate weights of one kind along their outputs."""
    first = weights[0]
    zeros = [weight.zeros for weight in weights]
    if any(one is not None for one in zeros):
        half = 2 ** (first.bits - 1)
        zeros = [
            torch.full_like(weight.scales, half, dtype=torch.uint8) if weight.zeros is None else weight.zeros
            for weight in weights
        ]
    return QuantisedWeight(
        torch.cat([weight.q for weight in weights]).to(device),
        torch.cat([weight.scales for weight in weights]).to(device),
        None if zeros[0] is None else torch.cat([one for one in zeros if one is not None]).to(device),
        first.bits,
        first.group_size,
        None if first.order is None else first.order.to(device),
    )


def set_layer(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layer)
