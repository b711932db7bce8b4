"""What the layers of a group keep of a sequence: K and V of all tokens, or only of those that a window still sees.

The token at position p of a layer with a window sees the positions from p - window + 1 on. In the group's block table,
the null block replaces each block that is wholly before these positions, so that the later entries keep their indices.
With block_size 4, a window of 5, and position 10 next, the positions 6 … 10 are seen:

    position        0 1 2 3    4 5 6 7    8 9 10
    block table     [  7          2          5   ]    before
                    [  0          2          5   ]    block 7 is free

Layers with a recurrent state keep one slot for a sequence instead of blocks (`slots.py`).
"""

from typing import Protocol

NULL_BLOCK = 0


class Kind(Protocol):
    """What a group of layers keeps."""

    max_held: int | None
    """The most blocks that a sequence holds at the same time; None if it holds those of all its tokens."""

    def num_behind(self, position: int) -> int:
        """Return how many of the first blocks no token from `position` on sees."""


class AllTokens:
    """Each token sees all tokens before it."""

    max_held: int | None = None

    def num_behind(self, position: int) -> int:
        return 0


class Window:
    """Each token sees `window` tokens: itself, and those before it. A chunk has at most `max_chunk_len` tokens."""

    def __init__(self, window: int, max_chunk_len: int, block_size: int) -> None:
        self.window = window
        self.block_size = block_size
        # the most blocks that a chunk and the window of its first token can touch
        self.max_held: int | None = -(-(window - 1 + max_chunk_len) // block_size) + 1

    def num_behind(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.block_size
