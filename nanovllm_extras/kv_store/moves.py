"""What a step does for the store: blocks that are loaded before its forward pass, and saved after it.

    moves.loads     data: [num_loads, bytes_per_block] in host memory -> blocks of the KV cache
    moves.saves     blocks of the KV cache -> host memory, [num_saves, bytes_per_block]

A step's moves are a list of copies on the device, as in the core, with the moves of `swap/` if there are any. Loads are
done after all of those: a block that is loaded may have been the source of a copy out. On CUDA, copies to the host run
in a stream of their own.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm_extras.kv_store.tier import BlockName
from nanovllm_extras.swap.host_blocks import as_words, indices_on
from nanovllm_extras.swap.space import SwapMoves

NamedBlocks = list[tuple[BlockName, int]]


class StoreMoves(SwapMoves):
    """`loads` and `saves` are lists of (name, block id). `loaded` has the data of loads: [bytes_per_block] uint8."""

    def __init__(
        self, copies: list[tuple[int, int]], loads: NamedBlocks, saves: NamedBlocks, loaded: dict[BlockName, Any]
    ) -> None:
        super().__init__(copies, getattr(copies, "swap_outs", []), getattr(copies, "swap_ins", []))
        self.loads = loads
        self.saves = saves
        self.loaded = loaded

    @property
    def has_saves(self) -> bool:
        return bool(self.saves)

    def save(self, saver: Any, kv_cache: Any) -> None:
        """Give what the step has filled to `saver`."""
        if self.saves:
            saver.save_blocks(kv_cache.tensor, self.saves)


def moves_of(copies: Any) -> Any:
    """Return the moves of blocks among a step's copies, which may also have copies of states (`states/`)."""
    return getattr(copies, "block_moves", copies)


def loading(cache_class: type[Any]) -> type[Any]:
    """Return `cache_class` with `copy_blocks` that also does the loads of a step."""

    class LoadingKVCache(cache_class):  # type: ignore[misc, valid-type]
        first_byte = 0
        """Where this cache's part of a block's data begins."""

        def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
            super().copy_blocks(copies)
            moves = moves_of(copies)
            if isinstance(moves, StoreMoves) and moves.loads:
                part = slice(self.first_byte, self.first_byte + self.bytes_per_block)
                copy_in(self.tensor, [(moves.loaded[name][part], block_id) for name, block_id in moves.loads])

    return LoadingKVCache


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
