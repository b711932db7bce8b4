"""A linear layer of the network with the adapters in its slots.

It replaces the layer before a backend makes layers faster, and the backend then replaces the layer inside it. Rows
without an adapter have the same bits as without this layer.
"""

import copy
from typing import Any

from torch import Tensor, nn

from nanovllm_extras.kernels.adapter_rows import AdapterRows, LayerShape, Products


class LoraLinear(nn.Module):
    """`base` and the changes of the adapters. base: any linear layer, also a quantised one, or one of a rank"""

    def __init__(self, base: nn.Module, shape: LayerShape, rows: AdapterRows, products: Products) -> None:
        super().__init__()
        self.base = base
        self.shape, self.rows, self.products = shape, rows, products

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the layer without adapters: the self-check compares copies of layers (`self_check/`)."""
        copied: nn.Module = copy.deepcopy(self.base, memo)
        return copied

    def forward(self, x: Tensor) -> Any:
        """x: [num_tokens, in_features] -> what `base` returns: [num_tokens, out_features], or such a tensor in parts"""
        y: Any = self.base(x)
        if self.rows.slots is not None:
            self.products.add(x, y if isinstance(y, Tensor) else whole_of(y, self.shape.columns[-1]))
        return y


def whole_of(parts: tuple[Tensor, ...], num_columns: int) -> Tensor:
    """Return the tensor whose columns the parts are: [num_tokens, num_columns]"""
    first = parts[0]
    return first.as_strided((len(first), num_columns), (first.stride(0), 1))
