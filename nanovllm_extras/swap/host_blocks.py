"""A KV cache with more blocks in host memory, and copies to and from them that the host does not wait for.

On CUDA the copies run in a stream of their own, so that a copy to the host may take longer than a step.

    moves.swap_outs [(3, 0)]    device block 3 -> host block 0      always done
    moves.swap_ins  [(1, 3)]    host block 1 -> device block 3      in this order
    moves itself    [(5, 6)]    device block 5 -> device block 6: copy-on-write
"""

from typing import Any

import torch

from nanovllm.block_manager import BlockManager
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.swap.space import BlockPairs, Swap, SwapMoves, SwapSpace


class SwappingKVCache(KVCache):
    """A `KVCache` with as many blocks in host memory as `swap_space_bytes` holds; ValueError if it holds none."""

    def __init__(
        self,
        backend: TorchAttention,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        swap_space_bytes: int,
    ) -> None:
        self.num_swap_blocks = 0
        super().__init__(backend, num_layers, dtype, device)
        if swap_space_bytes < self.bytes_per_block:
            raise ValueError(f"swap_space_bytes must be >= {self.bytes_per_block}, one block, got {swap_space_bytes}")
        self.num_swap_blocks = swap_space_bytes // self.bytes_per_block

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        self.host_blocks = HostBlocks(self.tensor, self.num_swap_blocks)

    def copy_blocks(self, copies: BlockPairs) -> None:
        if isinstance(copies, SwapMoves):
            self.host_blocks.copy_both(self.tensor, copies)
        super().copy_blocks(copies)


def make_swap(kv_cache: Any, blocks: BlockManager) -> Swap:
    """Return the strategy for a `SwappingKVCache`, or groups of them, with as many blocks in host memory as it has."""
    return Swap(blocks, SwapSpace(kv_cache.num_swap_blocks, blocks.block_size))


class HostBlocks:
    """`num_blocks` blocks of the KV cache in host memory: [num_blocks, parts, num_layers, …].

    On CUDA this memory is pinned and each block is contiguous: PyTorch copies scattered memory through pageable
    memory, and the host waits for such copies.
    """

    def __init__(self, kv_cache: torch.Tensor, num_blocks: int) -> None:
        is_cuda = kv_cache.is_cuda and num_blocks > 0
        shape = (num_blocks, *kv_cache.shape[:2], *kv_cache.shape[3:])
        self.tensor = torch.empty(shape, dtype=kv_cache.dtype, pin_memory=is_cuda)
        self._stream = torch.cuda.Stream(kv_cache.device) if is_cuda else None

    def copy_both(self, kv_cache: torch.Tensor, moves: SwapMoves) -> None:
        """Copy the blocks of a step out, and then in."""
        if moves.swap_outs:
            self.copy_out(kv_cache, moves.swap_outs)
        if moves.swap_ins:
            self.copy_in(kv_cache, moves.swap_ins)

    def copy_out(self, kv_cache: torch.Tensor, pairs: BlockPairs) -> None:
        """Copy pairs (device block, host block). The blocks are gathered before this step writes to the cache."""
        sources, destinations = zip(*pairs, strict=True)
        found = as_words(kv_cache)[:, :, indices_on(kv_cache.device, sources)]
        gathered = found.movedim(2, 0).contiguous()  # [num_moved, parts, num_layers, …]
        host_blocks = as_words(self.tensor)
        if self._stream is None:
            host_blocks[list(destinations)] = gathered
            return
        self._stream.wait_stream(torch.cuda.current_stream(kv_cache.device))
        with torch.cuda.stream(self._stream):
            for block, destination in zip(gathered, destinations, strict=True):
                host_blocks[destination].copy_(block, non_blocking=True)
        gathered.record_stream(self._stream)

    def copy_in(self, kv_cache: torch.Tensor, pairs: BlockPairs) -> None:
        """Copy pairs (host block, device block)."""
        sources, destinations = zip(*pairs, strict=True)
        host_blocks = as_words(self.tensor)
        if self._stream is None:
            arrived = host_blocks[list(sources)]  # [num_moved, parts, num_layers, …]
        else:
            current = torch.cuda.current_stream(kv_cache.device)
            shape = (len(sources), *host_blocks.shape[1:])
            arrived = torch.empty(shape, dtype=host_blocks.dtype, device=kv_cache.device)
            self._stream.wait_stream(current)  # `arrived` may reuse memory that a kernel of this stream still reads
            with torch.cuda.stream(self._stream):  # after the copies out, which may not be done yet
                for block, source in zip(arrived, sources, strict=True):
                    block.copy_(host_blocks[source], non_blocking=True)
            current.wait_stream(self._stream)
        as_words(kv_cache)[:, :, indices_on(kv_cache.device, destinations)] = arrived.movedim(0, 2)


def indices_on(device: torch.device, block_ids: tuple[int, ...]) -> torch.Tensor:
    """Copy block ids to the device: [len(block_ids)] int64. From pinned memory, so that the host does not wait."""
    return torch.tensor(block_ids, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of 8 bytes, or of 1 byte if its rows are shorter. PyTorch cannot index some dtypes."""
    return tensor.view(torch.int64 if tensor.shape[-1] * tensor.itemsize % 8 == 0 else torch.uint8)
