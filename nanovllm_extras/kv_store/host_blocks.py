"""Blocks in host memory, and copies to and from them that the host does not wait for.

On CUDA the copies run in a stream of their own, so that a copy to the host may take longer than a step.
"""

import torch

from nanovllm_extras.records.moves import Pair


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

    def copy_both(self, kv_cache: torch.Tensor, outs: list[Pair], ins: list[Pair]) -> None:
        """Copy pairs (device block, host block) out, and then pairs (host block, device block) in."""
        if outs:
            self.copy_out(kv_cache, outs)
        if ins:
            self.copy_in(kv_cache, ins)

    def copy_out(self, kv_cache: torch.Tensor, pairs: list[Pair]) -> None:
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

    def copy_in(self, kv_cache: torch.Tensor, pairs: list[Pair]) -> None:
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
