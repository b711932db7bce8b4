"""Layers with weights of 8 or 4 bits on CPU: fast versions of those in `weights/quantised_linear.py`.

`CpuAttention.make_fast` calls `replace_quantised` before it replaces other layers. `quantised.c` does the
arithmetic.
"""

import math
from ctypes import Structure, addressof, c_long, c_void_p, cast
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm_extras.kernels.classes import is_one
from nanovllm_extras.kernels.cpu.cpu_layers import (
    CpuEmbedding,
    CpuFusedLinear,
    CpuLinear,
    HugePages,
    put_fast_layers,
)
from nanovllm_extras.kernels.cpu.library import LANES, QUANTISED, load_library

if TYPE_CHECKING:
    from nanovllm_extras.weights.quantised_linear import QuantisedWeight

STRIP = 4  # panels in a strip
LAYERS = "nanovllm_extras.weights.quantised_linear."  # a path and not an import, because the file may be deleted
LINEAR, FUSED, EMBEDDING = (LAYERS + name for name in ("QuantisedLinear", "QuantisedFusedLinear", "QuantisedEmbedding"))


class QuantisedStruct(Structure):
    """The C type `struct quantised` of quantised.c."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("linear", "gated_linear")),  # functions
        *((name, c_void_p) for name in ("panels", "scales", "zeros")),
        *((name, c_long) for name in ("bits", "group_size", "has_groups")),
    ]


def bytes_of(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack q: [out, in] uint8 -> [out, in * bits / 8] uint8

    With 4 bits, byte 4 i + j holds input 8 i + j in its lower half and input 8 i + 4 + j in its upper half (j < 4).
    """
    if bits == 8:
        return q
    low, high = q.view(len(q), -1, 2, 4).unbind(2)  # [out, in / 8, 4] each
    return (low | high << 4).flatten(1)


def strips_shape(num_outputs: int, num_bytes: int) -> tuple[int, ...]:
    """Return the shape [strips of 64 outputs, words, 4 panels, 16 outputs, bytes of a word]."""
    return (-(-num_outputs // (STRIP * LANES)), num_bytes // 4, STRIP, LANES, 4)


def strips_bytes(weight: "QuantisedWeight") -> int:
    """Return the number of bytes that a quantised weight takes in strips, alignment included."""
    num_outputs, num_inputs = weight.q.shape
    return math.prod(strips_shape(num_outputs, num_inputs * weight.bits // 8)) + HugePages.ALIGNMENT


def in_strips(of_outputs: torch.Tensor, memory: HugePages) -> torch.Tensor:
    """Copy a packed weight to strips: [out, bytes] uint8 -> `strips_shape`, with zeros to fill the last strip"""
    num_strips, num_words, *_ = shape = strips_shape(*of_outputs.shape)
    padded = F.pad(of_outputs, (0, 0, 0, num_strips * STRIP * LANES - len(of_outputs)))
    return memory.empty(shape, torch.uint8).copy_(padded.view(num_strips, STRIP, LANES, num_words, 4).movedim(3, 1))


def scales_in_strips(of_groups: torch.Tensor) -> torch.Tensor:
    """Reorder scales or zeros: [out, groups] -> [strips, groups, 4, 16], with zeros to fill the last strip"""
    padded = F.pad(of_groups, (0, 0, 0, -len(of_groups) % (STRIP * LANES)))
    return padded.view(-1, STRIP, LANES, of_groups.shape[1]).movedim(3, 1).contiguous()


class QuantisedProduct(CpuLinear):
    """A `CpuLinear` with the quantised weight of `layer`, a layer of `quantised_linear.py`."""

    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __init__(self, layer: Any, dtype: torch.dtype, memory: HugePages) -> None:
        nn.Module.__init__(self)
        self.library, self.dtype = load_library(dtype, QUANTISED), dtype
        weight = layer.quantised
        self.out_features, self.in_features = weight.q.shape
        self.register_buffer("packed", in_strips(bytes_of(weight.q, weight.bits), memory))
        self.register_buffer("scales", scales_in_strips(weight.scales))  # [strips, groups or 1, 4, 16]
        self.register_buffer("zeros", None if weight.zeros is None else scales_in_strips(weight.zeros))
        self.order = weight.order
        bias = getattr(layer, "bias", None)
        self.register_buffer("bias", None if bias is None else F.pad(bias, (0, -len(bias) % LANES)))
        zeros = None if self.zeros is None else self.zeros.data_ptr()
        sizes = (weight.bits, weight.group_size, weight.scales.shape[1] > 1)
        functions = (self.library.quantised_linear, self.library.quantised_gated_linear)
        arrays = (self.packed.data_ptr(), self.scales.data_ptr(), zeros)
        self.struct = QuantisedStruct(*(cast(function, c_void_p) for function in functions), *arrays, *sizes)
        self.other = addressof(self.struct)

    def product(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            x = x[:, self.order]
        x, bias = x.contiguous(), None if self.bias is None else self.bias.data_ptr()
        self.library.quantised_linear(
            *(x.data_ptr(), self.other, bias, y.data_ptr()),
            *(len(x), self.out_features, self.in_features, y.dtype == torch.float32),
        )
        return y


class CpuQuantisedLinear(QuantisedProduct):
    pass


class CpuQuantisedFusedLinear(QuantisedProduct, CpuFusedLinear):
    def __init__(self, layer: Any, dtype: torch.dtype, memory: HugePages) -> None:
        super().__init__(layer, dtype, memory)
        self.rows = tuple(layer.parts.values())


class CpuQuantisedEmbedding(QuantisedProduct, CpuEmbedding):
    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up the tokens' rows and dequantise them: [num_tokens] int -> [num_tokens, hidden_size]"""
        ids, y = token_ids.long(), torch.empty(len(token_ids), self.in_features, dtype=self.dtype)
        self.library.quantised_rows(ids.data_ptr(), self.other, y.data_ptr(), len(y), self.in_features)
        return y


FAST_LAYERS = {LINEAR: CpuQuantisedLinear, FUSED: CpuQuantisedFusedLinear, EMBEDDING: CpuQuantisedEmbedding}


def replace_quantised(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace every quantised layer of the model by its fast version."""
    layers: list[Any] = [layer for layer in model.modules() if is_one(layer, *FAST_LAYERS)]
    if not layers:
        return
    memory = HugePages(sum(strips_bytes(layer.quantised) for layer in layers))

    def make(layer: Any) -> nn.Module | None:
        fast_class = next((FAST_LAYERS[name] for name in FAST_LAYERS if is_one(layer, name)), None)
        if fast_class is None:
            return None
        made = fast_class(layer, dtype, memory)
        del layer.quantised  # free the memory of the unpacked weight
        return made

    put_fast_layers(model, make)
