"""The KV cache: one tensor on the device, and copies of whole blocks.

The attention backend decides the layout inside a block. The `BlockManager` decides which sequence owns which block.
`ModelRunner` calls `copy_blocks` before each forward pass.
"""

import torch

from nanovllm.layers.attention import TorchAttention


class KVCache:
    """`tensor` is [2, num_layers, num_blocks + 1, …], where the backend defines the rest. Block 0 is the null block.

    A new cache has only the null block, which is enough to measure how much memory a forward pass takes. `allocate`
    makes the others.
    """

    def __init__(self, backend: TorchAttention, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.backend = backend
        self.num_layers = num_layers
        self.dtype = dtype
        self.device = device
        self.allocate(0)

    @property
    def num_blocks(self) -> int:
        """The number of blocks that sequences can own."""
        return self.tensor.shape[2] - 1

    @property
    def bytes_per_block(self) -> int:
        """The size of one block, in all layers together."""
        return torch.Size(self.backend.kv_cache_shape(self.num_layers, 1)).numel() * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Allocate `num_blocks` blocks and the null block."""
        shape = self.backend.kv_cache_shape(self.num_layers, num_blocks + 1)
        self.tensor = torch.zeros(shape, dtype=self.dtype, device=self.device)  # zeros: an unused slot holds no NaN

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers: (5, 6) copies block 5 to block 6. All are read before any is written."""
        if copies:
            sources, destinations = map(list, zip(*copies, strict=True))
            self.tensor[:, :, destinations] = self.tensor[:, :, sources]
