"""The class of a layer, asked by name: an architecture's file may be deleted, so no kernel imports one.

A fast version replaces exactly the classes that it names: a class derived from one of them may compute otherwise.
"""

from typing import Any

from torch import nn

LORA_LINEAR = "nanovllm_extras.lora.lora_linear.LoraLinear"


def is_one(layer: nn.Module, *names: str) -> bool:
    """Return whether the class of `layer` is one of `names`, paths such as "nanovllm_extras.models.moe.Router"."""
    return f"{type(layer).__module__}.{type(layer).__qualname__}" in names


def base_of(product: Any) -> Any:
    """Return a linear layer without the LoRA adapters that it may have."""
    return product.base if is_one(product, LORA_LINEAR) else product
