"""Copies of blocks from and to host memory, for a K/V store. On CUDA, those to the host run in their own stream."""

from typing import NamedTuple

import numpy as np
import torch

from nanovllm_extras.kv_store.host_blocks import as_words, indices_on


def copy_in(kv_cache: torch.Tensor, loads: list[tuple[torch.Tensor, int]]) -> None:
    """Copy blocks from host memory to kv_cache: [parts, num_layers, num_blocks, …]."""
    if not kv_cache.is_cuda:
        blocks = as_bytes(kv_cache)
        for data, block_id in loads:
            block = blocks[:, :, block_id]
            np.copyto(block, data.numpy().reshape(block.shape))
        return
    shape = (*kv_cache.shape[:2], *kv_cache.shape[3:])
    arrived = torch.empty((len(loads), *shape), dtype=kv_cache.dtype, device=kv_cache.device)
    for device_block, (data, _) in zip(arrived, loads, strict=True):
        device_block.copy_(data.view(kv_cache.dtype).view(shape), non_blocking=True)
    block_ids = indices_on(kv_cache.device, tuple(block_id for _, block_id in loads))
    as_words(kv_cache)[:, :, block_ids] = as_words(arrived).movedim(0, 2)


def copy_out(kv_cache: torch.Tensor, block_ids: list[int], stream: torch.cuda.Stream | None) -> "Arriving":
    """Copy blocks of kv_cache: [parts, num_layers, num_blocks, …] to host memory, on CUDA in `stream`."""
    if stream is None:
        blocks = as_bytes(kv_cache)
        found = np.stack([blocks[:, :, block_id] for block_id in block_ids])  # [len(block_ids), parts, num_layers, …]
        return Arriving(torch.from_numpy(found).flatten(1), None)
    words = as_words(kv_cache)[:, :, indices_on(kv_cache.device, tuple(block_ids))]
    gathered = words.movedim(2, 0).contiguous()
    data = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
    stream.wait_stream(torch.cuda.current_stream(kv_cache.device))
    with torch.cuda.stream(stream):
        data.copy_(gathered, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(stream)
    gathered.record_stream(stream)
    return Arriving(data.view(torch.uint8).flatten(1), arrived)


class Arriving(NamedTuple):
    """Blocks on their way to the host: [num_blocks, bytes_per_block] uint8."""

    data: torch.Tensor
    event: torch.cuda.Event | None

    def wait(self) -> np.ndarray:
        if self.event is not None:
            self.event.synchronize()
        return self.data.numpy()


def as_bytes(kv_cache: torch.Tensor) -> np.ndarray:
    """View a cache in host memory as an array of bytes: [parts, num_layers, num_blocks, …, bytes of a row] uint8

    NumPy copies blocks in the caller's thread. PyTorch would wait for all of its threads at each block.
    """
    return kv_cache.view(torch.uint8).numpy()
