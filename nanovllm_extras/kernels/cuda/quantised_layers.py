"""Layers with weights of 8 or 4 bits on CUDA: fast versions of those in `weights/quantised_linear.py`.

The attention backends for CUDA call `fast_version_of` for each layer that is loaded, so that at most one weight of 4
bits takes a byte on the device, and `replace_quantised` through `replace_layers` in `cuda_decoder_layer.py`.
"""

import importlib
from typing import Any

import torch
from torch import nn

from nanovllm_extras.kernels.classes import is_one
from nanovllm_extras.kernels.cuda.cuda_quantised import multiply, pack, unpack

LAYERS = "nanovllm_extras.weights.quantised_linear."  # a path and not an import, because the file may be deleted


class TritonQuantisedLinear(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        weight = layer.quantised
        self.weight_of_groups = pack(weight.q, weight.scales, weight.zeros, weight.bits, weight.group_size)
        self.order = weight.order
        self.bias: torch.Tensor | None = getattr(layer, "bias", None)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x by the weight: [num_tokens, in_features] -> [num_tokens, out_features]"""
        x = x if self.order is None else x.index_select(1, self.order)
        return multiply(x, self.weight_of_groups, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x of any shape by the weight: [..., in_features] -> [..., out_features]"""
        return self.product(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


class TritonQuantisedFusedLinear(TritonQuantisedLinear):
    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.parts = layer.parts

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(x).split(tuple(self.parts.values()), dim=-1)


class TritonQuantisedEmbedding(TritonQuantisedLinear):
    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.dtype = layer.dtype

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up the tokens' rows and dequantise them: [num_tokens] int -> [num_tokens, hidden_size]"""
        weight = self.weight_of_groups
        q = weight.q.index_select(0, token_ids)
        if weight.bits == 4:
            q = torch.stack((q & 15, q >> 4), dim=-1).flatten(1)
        scales = weight.scales.index_select(1, token_ids).t()  # [num_tokens, num_groups or 1]
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(weight.group_size, dim=1)[:, : weight.num_inputs]
        return ((q[:, : weight.num_inputs].float() + weight.offset) * scales).to(self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits: [num_samples, hidden_size] -> [num_samples, vocab_size]"""
        return self.product(hidden)


FAST_LAYERS: dict[str, type[TritonQuantisedLinear]] = {
    LAYERS + "QuantisedLinear": TritonQuantisedLinear,
    LAYERS + "QuantisedFusedLinear": TritonQuantisedFusedLinear,
    LAYERS + "QuantisedEmbedding": TritonQuantisedEmbedding,
}


def replace_quantised(model: nn.Module) -> None:
    """Replace every quantised layer of the model that is not a fast version yet."""
    fast_layers: dict[nn.Module, nn.Module | None] = {}  # the model may contain a layer twice: tied embeddings
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # named_children() leaves out a second name
            if child is None:
                continue
            if child not in fast_layers:
                fast_layers[child] = fast_version_of(child)
            if (fast := fast_layers[child]) is not None:
                setattr(module, name, fast)


def fast_version_of(layer: nn.Module) -> nn.Module | None:
    """Return the fast version of a layer, which gives up its weight, or None if there is none."""
    fast_class = next((FAST_LAYERS[path] for path in FAST_LAYERS if is_one(layer, path)), None)
    if fast_class is None:
        return None
    fast: nn.Module = fast_class(layer)
    del layer.quantised  # free the memory of the unpacked weight
    return fast


def plain_version_of(layer: nn.Module) -> nn.Module:
    """Return PyTorch's version of a fast layer, for comparisons, and of any other layer itself."""
    path = next((path for path, fast_class in FAST_LAYERS.items() if type(layer) is fast_class), None)
    if path is None:
        return layer
    module = importlib.import_module(LAYERS.rstrip("."))
    fast: Any = layer
    packed = fast.weight_of_groups
    weight = module.QuantisedWeight(*unpack(packed), packed.bits, packed.group_size, fast.order)
    if isinstance(fast, TritonQuantisedEmbedding):
        return module.QuantisedEmbedding(weight, fast.dtype)
    plain_class = getattr(module, path.removeprefix(LAYERS))
    more = (fast.parts,) if isinstance(fast, TritonQuantisedFusedLinear) else ()
    plain: nn.Module = plain_class(weight, fast.bias, *more)
    return plain
