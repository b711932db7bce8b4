"""The block tables of all sequences that own blocks, as rows of one array.

A batch needs the tables of its sequences as one padded array. If each sequence kept an array of its own, every step
would gather hundreds of small arrays; from rows of one array, the step takes all of its rows at once:

    row   rows                       sequence A has row 2: blocks [7, 2]
     0    [ 0 0 0 0 ]                sequence B has row 1: blocks [3, 5, 4]
     1    [ 3 5 4 0 ]                0 is the null block: rows are zero behind their tables' ends
     2    [ 7 2 0 0 ]                rows[[2, 1], :3] = [[7, 2, 0], [3, 5, 4]]

`BlockManager` gives a sequence a row together with its first block, and takes the row back together with the last one.
`build_batch` reads the rows.
"""

import numpy as np


class IntArray:
    """Appends in amortised O(1): the first `length` elements of `data` are in use."""

    __slots__ = ("data", "length")

    def __init__(self, values: list[int] | tuple[int, ...] = ()) -> None:
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

    def view(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Elements [start, stop) as an array that shares memory; valid until the next append."""
        return self.data[start : self.length if stop is None else stop]


class BlockTable(IntArray):
    """The blocks of one sequence, in order; `data` is its row of the pool while it has one."""

    __slots__ = ("pool", "row")

    def __init__(self) -> None:
        super().__init__()
        self.pool: BlockTables | None = None
        self.row = -1

    def grow(self) -> None:
        if self.pool is None:
            super().grow()
        else:
            self.pool.widen()

    def clear(self) -> None:
        """Own nothing, and give the row back."""
        if self.pool is not None:
            self.pool.release(self)
        self.length = 0


class BlockTables:
    """`rows`: [num_rows, width] int32; grows in both directions as sequences need it."""

    def __init__(self, block_size: int, num_rows: int = 16, width: int = 16) -> None:
        self.block_size = block_size
        self.rows = np.zeros((num_rows, width), dtype=np.int32)
        self._owners: list[BlockTable | None] = [None] * num_rows
        self._free_rows = list(range(num_rows))[::-1]

    def bind(self, table: BlockTable) -> None:
        """Give `table` a row, which takes over its blocks."""
        while table.length > self.rows.shape[1]:
            self.widen()
        if not self._free_rows:
            self._free_rows = list(range(len(self.rows), 2 * len(self.rows)))[::-1]
            self._owners += [None] * len(self.rows)
            self._replace(np.concatenate([self.rows, np.zeros_like(self.rows)]))
        table.pool, table.row = self, self._free_rows.pop()
        self._owners[table.row] = table
        self.rows[table.row, : table.length] = table.view()
        table.data = self.rows[table.row]

    def release(self, table: BlockTable) -> None:
        """Take the row of `table` back; the `BlockManager` takes back the blocks."""
        table.data[:] = 0
        self._owners[table.row] = None
        self._free_rows.append(table.row)
        table.pool, table.row, table.data = None, -1, np.zeros(16, dtype=np.int32)

    def widen(self) -> None:
        self._replace(np.concatenate([self.rows, np.zeros_like(self.rows)], axis=1))

    def _replace(self, rows: np.ndarray) -> None:
        self.rows = rows
        for table in self._owners:
            if table is not None:
                table.data = rows[table.row]
