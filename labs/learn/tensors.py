"""Compare the tensors of two answers up to rounding, and draw them as tables of numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Numbers:
    """A tensor as an observed value. It prints as its shape, or as its numbers if it has few."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().clone()

    def __repr__(self) -> str:
        if self.tensor.numel() > 8:
            return f"shape {list(self.tensor.shape)}"
        return "[" + ", ".join(f"{x:.4g}" for x in self.tensor.flatten().tolist()) + "]"

    def compare(self, other: "Numbers") -> tuple[str, str]:
        """Return the numbers, or of many the first that differs, of both tensors."""
        cell = first_cell(self.tensor, other.tensor)
        if cell is None or self.tensor.numel() <= 8:
            return f"numbers {self!r}", f"numbers {other!r}"
        return f"number {self.tensor[cell]:.4g} at {list(cell)}", f"number {other.tensor[cell]:.4g} at {list(cell)}"


def read_tensor(value: Any, shape: Sequence[int]) -> Numbers | str:
    """Return the learner's value as numbers of this shape, or a text that says what it is instead."""
    try:
        tensor = torch.as_tensor(value).to(torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return f"{type(value).__name__}: {value!r}"
    if list(tensor.shape) != list(shape):
        return f"shape {list(tensor.shape)} != {list(shape)}"
    return Numbers(tensor)


def is_close(a: Any, b: Any) -> bool:
    """Return whether two observed values are equal up to rounding. NaN equals NaN."""
    if isinstance(a, Numbers) and isinstance(b, Numbers):
        return a.tensor.shape == b.tensor.shape and torch.allclose(a.tensor, b.tensor, 1e-4, 1e-5, equal_nan=True)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(is_close(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def first_cell(a: Tensor, b: Tensor) -> tuple[int, ...] | None:
    """Return the index of the first element that differs, or None."""
    differs = ~torch.isclose(a, b, 1e-4, 1e-5, equal_nan=True)
    return tuple(differs.nonzero()[0].tolist()) if differs.any() else None


def draw_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def draw_matrix(
    tensor: Tensor, rows: Sequence[str], columns: Sequence[str], mark: tuple[int, int] | None = None
) -> str:
    """Return a table of numbers with two decimals. `mark`: the (row, column) of the cell to put in brackets."""
    cells = [[f" {x:.2f} " for x in row] for row in tensor.tolist()]
    if mark is not None:
        cells[mark[0]][mark[1]] = f"[{cells[mark[0]][mark[1]].strip()}]"
    header = ["", *(f"{name} " for name in columns)]
    return draw_table(header, [[name, *row] for name, row in zip(rows, cells, strict=True)])
