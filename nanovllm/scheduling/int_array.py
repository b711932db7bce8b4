"""An int32 array that grows at its end: token ids, and the block table of a sequence that owns no row of the pool."""

from collections.abc import Sequence as SequenceOf

import numpy as np


class IntArray:
    """Appends in amortised O(1): the first `length` elements of `data` are in use."""

    __slots__ = ("data", "length")

    def __init__(self, values: SequenceOf[int] = ()) -> None:
        self.length = len(values)
        self.data = np.zeros(max(16, 2 * self.length), dtype=np.int32)
        self.data[: self.length] = values

    def append(self, value: int) -> None:
        if self.length == len(self.data):
            self.grow()
        self.data[self.length] = value
        self.length += 1

    def grow(self) -> None:
        """Twice the room; elements that are in use keep their places."""
        self.data = np.concatenate([self.data, np.zeros_like(self.data)])

    def clear(self) -> None:
        self.length = 0

    def view(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Elements [start, stop) as an array that shares memory; valid until the next append."""
        return self.data[start : self.length if stop is None else stop]
