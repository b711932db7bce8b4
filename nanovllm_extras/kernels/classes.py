"""The class of a layer, asked by name: an architecture's file may be deleted, so no kernel imports one.

A fast version replaces exactly the classes that it names: a class derived from one of them may compute otherwise.
"""

from torch import nn


def is_one(layer: nn.Module, *names: str) -> bool:
    """Return whether the class of `layer` is one of `names`, paths such as "nanovllm_extras.models.moe.Router"."""
    return f"{type(layer).__module__}.{type(layer).__qualname__}" in names
