"""Which rows of a step have which LoRA adapter, and the products that add the changes of these adapters to a layer.

An adapter that runs is in a *slot*: 1 is the first, and 0 represents none. `AdapterRows` is set once for each step, and
all layers of the network read it. `Products` are the matrices of all slots for one linear layer. This file has those in
PyTorch; `cpu/cpu_adapters.py` and `cuda/adapter_kernels.py` have faster ones.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 64
"""The most rows that kernels compute as one piece."""


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a linear layer that adapters can change."""

    num_inputs: int
    columns: tuple[int, ...]
    """Where its projections begin in its outputs, and where the last one ends."""

    @property
    def num_projections(self) -> int:
        return len(self.columns) - 1

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Return the first output of each projection, and the end of its outputs."""
        return list(zip(self.columns, self.columns[1:], strict=False))


class AdapterRows:
    """The rows of the step that is computed, which layers read."""

    def __init__(self) -> None:
        self.slots: Tensor | None = None
        """[num_tokens] int32, the slot of each row; None if no row of the step has an adapter."""
        self.order = np.empty(0, np.int32)
        """The rows that have adapters, those of each adapter together. On CUDA, only the device has the slots."""
        self.blocks = np.empty((0, 3), np.int32)
        """[num_blocks, 3]: slot, first place in `order`, number of rows: at most `BLOCK_ROWS`."""

    def select(self, slots: Tensor | None) -> None:
        """Set the rows of the next forward pass. slots: [num_tokens] int32, 0 for none; None if no row has any"""
        self.slots = slots
        if slots is None or slots.is_cuda:
            return
        values = slots.numpy()
        self.order = np.argsort(values, kind="stable").astype(np.int32)[np.count_nonzero(values == 0) :]
        if not len(self.order):
            self.slots = None
            return
        found, firsts, counts = np.unique(values[self.order], return_index=True, return_counts=True)
        blocks = [
            (slot, first + start, min(BLOCK_ROWS, count - start))
            for slot, first, count in zip(found.tolist(), firsts.tolist(), counts.tolist(), strict=True)
            for start in range(0, count, BLOCK_ROWS)
        ]
        self.blocks = np.array(blocks, np.int32)

    def groups(self) -> list[tuple[int, np.ndarray]]:
        """Return (slot, rows) for each adapter of the step, whose slots are on the host."""
        starts = np.flatnonzero(np.diff(self.blocks[:, 0], prepend=-1))
        firsts = self.blocks[starts, 1].tolist()
        rows = np.split(self.order, firsts[1:])
        return list(zip(self.blocks[starts, 0].tolist(), rows, strict=True))


class Products(ABC):
    """The matrices of the adapters in all slots, for one linear layer."""

    def __init__(self, shape: LayerShape, rows: AdapterRows, num_slots: int, dtype: torch.dtype) -> None:
        self.shape, self.rows, self.num_slots, self.dtype = shape, rows, num_slots, dtype

    def pack(self, a: Tensor, b: Tensor) -> Any:
        """Return the matrices of one projection as `put` takes them. a: [rank, in]; b: [out, rank]; both float32"""
        return a.to(self.dtype), b.to(self.dtype)

    @abstractmethod
    def put(self, slot: int, packed: list[Any]) -> None:
        """Put an adapter into a slot. packed: of each projection, or None for one that it does not change"""

    @abstractmethod
    def add(self, x: Tensor, y: Tensor) -> None:
        """Add the changes to y = the layer's product of x. x: [num_tokens, in_features]; y: [num_tokens, out_features]

        Only called for steps in which rows have adapters.
        """


class TorchProducts(Products):
    """The products in PyTorch: two for each adapter that has rows, and each projection."""

    def __init__(self, shape: LayerShape, rows: AdapterRows, num_slots: int, dtype: torch.dtype) -> None:
        super().__init__(shape, rows, num_slots, dtype)
        self.slots: list[list[Any]] = [[None] * shape.num_projections for _ in range(num_slots + 1)]

    def put(self, slot: int, packed: list[Any]) -> None:
        self.slots[slot] = packed

    def add(self, x: Tensor, y: Tensor) -> None:
        for slot, rows in self.rows.groups():
            index = torch.from_numpy(rows).long()
            own = x[index]
            for (start, end), packed in zip(self.shape.spans, self.slots[slot], strict=True):
                if packed is not None:
                    a, b = packed
                    y[:, start:end].index_add_(0, index, F.linear(F.linear(own, a), b))


class DeviceProducts(Products):
    """Products of which the host decides nothing, so CUDA graphs can record them: the device has all matrices."""

    def __init__(
        self,
        shape: LayerShape,
        rows: AdapterRows,
        num_slots: int,
        dtype: torch.dtype,
        max_rank: int,
        device: torch.device,
    ) -> None:
        super().__init__(shape, rows, num_slots, dtype)
        self.rank = max(16, 1 << (max_rank - 1).bit_length())  # in memory, a power of two for the kernel
        num_ranks = shape.num_projections * self.rank
        self.a = torch.zeros(num_slots, num_ranks, shape.num_inputs, dtype=dtype, device=device)
        self.b = torch.zeros(num_slots, shape.columns[-1], self.rank, dtype=dtype, device=device)

    def put(self, slot: int, packed: list[Any]) -> None:
        for i, ((start, end), one) in enumerate(zip(self.shape.spans, packed, strict=True)):
            a, b = self.a[slot - 1, i * self.rank : (i + 1) * self.rank], self.b[slot - 1, start:end]
            a.zero_()
            b.zero_()
            if one is not None:
                a[: len(one[0])] = one[0]
                b[:, : len(one[0])] = one[1]


class MaskedProducts(DeviceProducts):
    """The products in PyTorch: those of all slots, of which a mask keeps those of a row's adapter.

    It computes `num_slots` times as much as is needed.
    """

    def add(self, x: Tensor, y: Tensor) -> None:
        assert self.rows.slots is not None
        slots = torch.arange(1, self.num_slots + 1, device=x.device)
        is_other = self.rows.slots[:, None] != slots  # [num_tokens, num_slots]
        t = F.linear(x, self.a.flatten(0, 1)).view(len(x), self.num_slots, self.shape.num_projections, self.rank)
        t = t.masked_fill(is_other[:, :, None, None], 0)  # not a product, since another adapter's may be infinite
        for i, (start, end) in enumerate(self.shape.spans):
            y[:, start:end] += torch.einsum("tsr,sor->to", t[:, :, i], self.b[:, start:end])
