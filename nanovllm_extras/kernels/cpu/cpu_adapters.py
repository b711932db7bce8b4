"""LoRA adapters on CPU: the matrices of the adapters in all slots as `adapters.h` reads them.

The matrices of an adapter are packed once, when it is loaded. To put it into a slot changes only addresses.
"""

from ctypes import Structure, addressof, c_long, c_void_p
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm_extras.kernels.adapter_rows import AdapterRows, LayerShape, Products
from nanovllm_extras.kernels.cpu.cpu_layers import HugePages
from nanovllm_extras.kernels.cpu.library import LANES, load_library


class AdaptedStruct(Structure):
    """The C type `struct adapted` of adapters.h."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("matrices", "columns")),
        *((name, c_long) for name in ("num_projections", "num_inputs", "max_rank")),
    ]


class RowsStruct(Structure):
    """The C type `struct adapted_rows` of adapters.h."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("order", "blocks")),
        *((name, c_long) for name in ("num_rows", "num_blocks", "most_rows")),
    ]


class PackedMatrices(NamedTuple):
    """A and B of one projection of one adapter, in panels of 16 outputs (`cpu_layers.py`)."""

    a: Tensor
    b: Tensor
    rank: int


class CpuAdapterRows(AdapterRows):
    """The rows of a step, also as C reads them: `address` is 0 if no row has an adapter."""

    address = 0

    def select(self, slots: Tensor | None) -> None:
        super().select(slots)
        if self.slots is None:
            self.address = 0
            return
        most = int(self.blocks[:, 2].max())
        sizes = (len(self.order), len(self.blocks), most)
        self.struct = RowsStruct(self.order.ctypes.data, self.blocks.ctypes.data, *sizes)
        self.address = addressof(self.struct)


class CpuProducts(Products):
    """The products of one linear layer in C."""

    def __init__(self, shape: LayerShape, rows: CpuAdapterRows, num_slots: int, dtype: torch.dtype) -> None:
        super().__init__(shape, rows, num_slots, dtype)
        self.rows: CpuAdapterRows = rows
        self.library = load_library(dtype)
        self.packed: list[list[PackedMatrices | None]] = [[None] * shape.num_projections for _ in range(num_slots + 1)]
        self.matrices = np.zeros((num_slots + 1, shape.num_projections, 3), np.int64)  # `struct adapter_matrices`
        self.columns = np.array(shape.columns, np.int64)
        sizes = (shape.num_projections, shape.num_inputs, 0)
        self.struct = AdaptedStruct(self.matrices.ctypes.data, self.columns.ctypes.data, *sizes)
        self.address = addressof(self.struct)

    def pack(self, a: Tensor, b: Tensor) -> PackedMatrices:
        missing = -len(a) % LANES
        a, b = F.pad(a, (0, 0, 0, missing)).to(self.dtype), F.pad(b, (0, missing)).to(self.dtype)
        return PackedMatrices(in_panels(a), in_panels(b), len(a))

    def put(self, slot: int, packed: list[PackedMatrices | None]) -> None:
        self.packed[slot] = packed
        for i, one in enumerate(packed):
            self.matrices[slot, i] = (0, 0, 0) if one is None else (one.a.data_ptr(), one.b.data_ptr(), one.rank)
        self.struct.max_rank = int(self.matrices[:, :, 2].max())

    def add(self, x: Tensor, y: Tensor) -> None:
        x = x.contiguous()
        self.library.add_adapters(self.address, self.rows.address, x.data_ptr(), y.data_ptr(), y.stride(0))


def in_huge_pages(packed: list[list[PackedMatrices | None]]) -> list[list[PackedMatrices | None]]:
    """Copy the matrices of an adapter to one piece of memory with large pages, from which they are read faster.

    Those of a layer are in the order in which it reads them: A of all projections, then B. So each prefetch beyond the
    end of a matrix is one of the next matrix.
    """
    sizes = [t.nbytes + HugePages.ALIGNMENT for layer in packed for one in layer if one is not None for t in one[:2]]
    memory = HugePages(sum(sizes))

    def copy(tensor: Tensor) -> Tensor:
        return memory.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    kept: list[list[PackedMatrices | None]] = []
    for layer in packed:
        own = [None if one is None else one._replace(a=copy(one.a)) for one in layer]
        kept.append([None if one is None else one._replace(b=copy(one.b)) for one in own])
    return kept


def in_panels(weight: Tensor) -> Tensor:
    """Return a weight: [out, in] as panels of 16 outputs: [ceil(out / 16), in / per_word, 16, per_word]"""
    per_word = 4 // weight.itemsize
    padded = F.pad(weight, (0, 0, 0, -len(weight) % LANES))
    return padded.view(-1, LANES, weight.shape[1] // per_word, per_word).transpose(1, 2).contiguous()


def takes(layer: Any) -> bool:
    """Return whether C can compute a layer of this `LayerShape`: words hold two numbers of bfloat16."""
    return bool(layer.num_inputs % 2 == 0)
