"""The KV cache: one tensor on the device, and copies of whole blocks.

The attention backend decides what the inside of a block looks like; the `BlockManager` decides which sequence owns
which block. `ModelRunner` calls `move_blocks` before each forward pass.
"""

import torch

from nanovllm.layers.backends import AttentionBackend
from nanovllm.step import BlockMoves


class KVCache:
    """`tensor`: [parts, num_layers, num_blocks + 1, …] as the backend shapes it; block 0 is the null block.

    Made without blocks, for a forward pass that measures how much memory is left for them; then `allocate`.
    """

    def __init__(self, backend: AttentionBackend, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._backend = backend
        self._num_layers = num_layers
        self._dtype = backend.kv_cache_dtype or dtype
        self._device = device
        self.allocate(0)

    @property
    def bytes_per_block(self) -> int:
        """Of all that one block holds, in all layers."""
        return torch.Size(self._backend.kv_cache_shape(self._num_layers, 1)).numel() * self._dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Room for `num_blocks` blocks and the null block."""
        shape = self._backend.kv_cache_shape(self._num_layers, num_blocks + 1)
        self.tensor = torch.zeros(shape, dtype=self._dtype, device=self._device)  # a slot never written holds no NaN

    def move_blocks(self, moves: BlockMoves) -> None:
        """Copy whole blocks as the step asks for, all layers at once: (5, 6) copies block 5 to block 6."""
        if moves.copies:
            sources, destinations = zip(*moves.copies, strict=True)
            blocks = as_words(self.tensor)  # [parts, num_layers, num_blocks + 1, …]
            blocks[:, :, indices_on(self._device, destinations)] = blocks[:, :, indices_on(self._device, sources)]


def indices_on(device: torch.device, block_ids: tuple[int, ...]) -> torch.Tensor:
    """[len(block_ids)] int64 on the device. A list as an index would make the host wait for the device."""
    pinned = torch.tensor(block_ids, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of 8 bytes, or of 1 if a row is no multiple of 8 bytes: fp8 cannot be indexed."""
    return tensor.view(torch.int64 if tensor.shape[-1] * tensor.itemsize % 8 == 0 else torch.uint8)
