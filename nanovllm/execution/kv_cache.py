"""The KV cache's memory: a tensor on the device, one in host memory for swapped blocks, and copies of whole blocks.

The attention backend decides what the inside of a block looks like; the `BlockManager` and the `SwapSpace` decide which
sequence owns which block. `ModelRunner` calls `move_blocks` before each forward pass.

    moves.swap_outs [(3, 0)]    device block 3 -> host block 0      always done
    moves.swap_ins  [(1, 3)]    host block 1 -> device block 3      in this order
    moves.copies    [(5, 6)]    device block 5 -> device block 6: copy-on-write
"""

import torch

from nanovllm.execution.block_copies import HostBlocks, as_words, indices_on
from nanovllm.layers.backends import AttentionBackend
from nanovllm.scheduling.step import BlockMoves


class KVCache:
    """`tensor`: [parts, num_layers, num_blocks + 1, …] as the backend shapes it; block 0 is the null block.

    Made without blocks, for a forward pass that measures how much memory is left for them; then `allocate`.
    """

    def __init__(self, backend: AttentionBackend, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._backend = backend
        self._num_layers = num_layers
        self._dtype = dtype
        self._device = device
        self.allocate(0)

    @property
    def bytes_per_block(self) -> int:
        """Of all that one block holds, in all layers."""
        return torch.Size(self._backend.kv_cache_shape(self._num_layers, 1)).numel() * self._dtype.itemsize

    def allocate(self, num_blocks: int, num_swap_blocks: int = 0) -> None:
        """Room for `num_blocks` blocks and the null block, and for `num_swap_blocks` in host memory."""
        shape = self._backend.kv_cache_shape(self._num_layers, num_blocks + 1)
        self.tensor = torch.zeros(shape, dtype=self._dtype, device=self._device)  # a slot never written holds no NaN
        self.host_blocks = HostBlocks(self.tensor, num_swap_blocks)

    def move_blocks(self, moves: BlockMoves) -> None:
        """Copy whole blocks as the step asks for, all layers at once."""
        if moves.swap_outs:
            self.host_blocks.copy_out(self.tensor, moves.swap_outs)
        if moves.swap_ins:
            self.host_blocks.copy_in(self.tensor, moves.swap_ins)
        if moves.copies:
            sources, destinations = zip(*moves.copies, strict=True)
            blocks = as_words(self.tensor)  # [parts, num_layers, num_blocks + 1, …]
            blocks[:, :, indices_on(self._device, destinations)] = blocks[:, :, indices_on(self._device, sources)]
