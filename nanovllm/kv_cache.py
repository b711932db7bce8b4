"""The KV cache's memory: a tensor on the device, one in host memory for what is swapped out, and copies of blocks.

Knows whole blocks only; what is inside of one is the attention backend's affair, and who owns which is decided by the
`BlockManager` and the `SwapSpace`. Called by `ModelRunner` before each forward pass.
"""

import torch

from nanovllm.layers.attention import AttentionBackend
from nanovllm.scheduler_output import BlockMoves


class KVCache:
    """`tensor`: [2, num_layers, num_kv_blocks + 1, …] as the backend shapes it; block 0 is the null block."""

    def __init__(
        self,
        backend: AttentionBackend,
        num_layers: int,
        num_kv_blocks: int,
        num_swap_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = backend.kv_cache_shape(num_layers, num_kv_blocks + 1)
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)  # zeroed: a slot never written holds no NaN
        # Pinned, and each block in one piece, else the host would wait for the copies: PyTorch makes those of scattered
        # memory by way of ordinary memory.
        is_pinned = device.type == "cuda" and num_swap_blocks > 0
        host_shape = (num_swap_blocks, *shape[:2], *shape[3:])  # [num_swap_blocks, 2, num_layers, …]
        self.host_tensor = torch.empty(host_shape, dtype=dtype, pin_memory=is_pinned)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and num_swap_blocks else None

    def move_blocks(self, moves: BlockMoves) -> None:
        if moves.swap_outs:
            self._swap_out(*zip(*moves.swap_outs, strict=True))
        if moves.swap_ins:
            self._swap_in(*zip(*moves.swap_ins, strict=True))
        if moves.copies:
            sources, destinations = zip(*moves.copies, strict=True)
            blocks = as_words(self.tensor)
            blocks[:, :, self._on_device(destinations)] = blocks[:, :, self._on_device(sources)]

    def _on_device(self, block_ids: tuple[int, ...]) -> torch.Tensor:
        """[len(block_ids)] int64. A list as an index would make the host wait for the device."""
        pinned = torch.tensor(block_ids, pin_memory=self.tensor.is_cuda)
        return pinned.to(self.tensor.device, non_blocking=True)

    def _swap_out(self, sources: tuple[int, ...], destinations: tuple[int, ...]) -> None:
        """The blocks are gathered before anything of this step is written; their way to the host may take longer."""
        found = as_words(self.tensor)[:, :, self._on_device(sources)]
        gathered = found.movedim(2, 0).contiguous()  # [num_moved, 2, num_layers, …]
        host_blocks = as_words(self.host_tensor)
        if self._stream is None:
            host_blocks[list(destinations)] = gathered
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.tensor.device))
        with torch.cuda.stream(self._stream):
            for block, destination in zip(gathered, destinations, strict=True):
                host_blocks[destination].copy_(block, non_blocking=True)
        gathered.record_stream(self._stream)

    def _swap_in(self, sources: tuple[int, ...], destinations: tuple[int, ...]) -> None:
        host_blocks = as_words(self.host_tensor)
        if self._stream is None:
            arrived = host_blocks[list(sources)]  # [num_moved, 2, num_layers, …]
        else:
            current = torch.cuda.current_stream(self.tensor.device)
            shape = (len(sources), *host_blocks.shape[1:])
            arrived = torch.empty(shape, dtype=host_blocks.dtype, device=self.tensor.device)
            self._stream.wait_stream(current)  # it may have had this memory before
            with torch.cuda.stream(self._stream):  # behind the copies out, which may still be under way
                for block, source in zip(arrived, sources, strict=True):
                    block.copy_(host_blocks[source], non_blocking=True)
            current.wait_stream(self._stream)
        as_words(self.tensor)[:, :, self._on_device(destinations)] = arrived.movedim(0, 2)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, 8 bytes each where rows are whole numbers of them: not all indexing knows fp8."""
    return tensor.view(torch.int64 if tensor.shape[-1] * tensor.itemsize % 8 == 0 else torch.uint8)
