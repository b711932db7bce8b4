"""Where K and V of each layer are in a block, if layers with a window have K and V of another size than the others.

Blocks of all groups have the same number of bytes, so that every block can serve every group. A block of group 0 has
room for all layers that see all tokens. A block of another group has room for as many layers with a window as fit. In
Gemma 4 E2B, K of a token is 512 numbers in the 3 layers that see all tokens, and 256 in the 12 layers with a window:

    row             0        1        2        3        4        5
    group 0         K0       V0       K1       V1       K2       V2             3 layers
    group 1         K0 V0    K1 V1    K2 V2    K3 V3    K4 V4    K5 V5          6 layers with a window
    group 2         K0 V0    K1 V1    K2 V2    K3 V3    K4 V4    K5 V5          the other 6 layers with a window

K or V of one layer fills a *piece* of a row. The KV cache is [1, num_rows, num_blocks + 1, row_size], so a row of all
blocks is contiguous. In row 0, for the groups 1 and 2, each block has two pieces:

    block           0        1        …    7         …
    piece           0   1    2   3    …    14  15    …
    holds           K0  V0   K0  V0   …    K0  V0    …

An attention backend finds K0 of block 7 in piece 14. For V0, it gets a view of the cache that begins one piece later:
then V0 of block 7 is in piece 14, too. So it gets 14 instead of 7 in slots and block tables (`cached_layers.py`).

If the sizes do not divide, as in Gemma 4 26B-A4B, a part of each block is never used: `unused_share`.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from nanovllm_extras.models.groups import KVGroup

LONG = 8  # windows: the length of a sequence for which `lay_out` minimises the memory


@dataclass(frozen=True)
class BlockLayout:
    """The parts of a block. Each tuple has an entry for the layers of each shape, in the order of `kv_groups`."""

    num_rows: int
    row_size: int  # numbers
    sizes: tuple[int, ...]  # numbers of a piece, which is K or V of one layer and `block_size` tokens
    layers_per_block: tuple[int, ...]
    num_groups: int
    unused_share: float  # of the memory of one block in each group

    def kv_cache_shape(self, num_rows: int, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of the KV cache, as an attention backend does for layers of one shape."""
        return (1, num_rows, num_blocks, self.row_size)

    def pieces_per_row(self, shape: int) -> int:
        """Return the number of pieces of a row of one block, for layers of this shape."""
        return self.row_size // self.sizes[shape]

    def view(self, kv_cache: Tensor, shape: int, layer: int, piece_shape: tuple[int, ...]) -> Tensor:
        """Return K and V of a layer of this shape, with `pieces_per_row` entries for each block: [2, …, *piece_shape].

        layer: its number in the blocks of its group
        """
        size, per_row, num_blocks = self.sizes[shape], self.pieces_per_row(shape), kv_cache.shape[2]
        starts = [  # of the pieces of K and V in block 0
            piece // per_row * num_blocks * self.row_size + piece % per_row * size
            for piece in (2 * layer, 2 * layer + 1)
        ]
        num_pieces = (num_blocks - 1) * per_row + 1
        strides = (starts[1] - starts[0], size, 1)
        both = kv_cache.as_strided((2, num_pieces, size), strides, kv_cache.storage_offset() + starts[0])
        return both.unflatten(2, piece_shape)


def lay_out(kv_groups: tuple[KVGroup, ...], block_size: int = 1) -> BlockLayout:
    """Return the layout of blocks for layers of two shapes, of which one sees a window and the other all tokens.

    Larger blocks waste memory in group 0 if all layers that see all tokens fill only a part, and smaller blocks may
    waste memory in the other groups. The layout with the least memory for a sequence of `LONG` windows is chosen.
    """
    sizes = tuple([group.num_kv_heads * group.head_dim * block_size for group in kv_groups])
    row_size = math.lcm(*sizes)
    num_used = 2 * sum([group.num_layers * size for group, size in zip(kv_groups, sizes, strict=True)])
    num_windowed = sum([group.num_layers for group in kv_groups if group.options.window is not None])
    layouts = []
    for windowed_per_block in range(num_windowed, 0, -1):
        layers = [group.num_layers if group.options.window is None else windowed_per_block for group in kv_groups]
        num_rows = max([-(-2 * one * size // row_size) for one, size in zip(layers, sizes, strict=True)])
        num_groups = 1 + -(-num_windowed // windowed_per_block)
        unused_share = 1 - num_used / (num_groups * num_rows * row_size)
        layouts.append(BlockLayout(num_rows, row_size, sizes, tuple(layers), num_groups, unused_share))
    return min(layouts, key=lambda one: one.num_rows * (LONG + one.num_groups - 1))  # the first of equal ones
