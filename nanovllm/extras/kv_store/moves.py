"""What a step does for the store: blocks that are loaded before its forward pass, and saved after it.

    moves.loads     data: [num_loads, bytes_per_block] in host memory -> blocks of the KV cache
    moves.saves     blocks of the KV cache -> host memory, [num_saves, bytes_per_block]

A step's moves are a list of copies on the device, as in the core, with the moves of `swap/` if there are any. Loads are
done after all of those: a block that is loaded may have been the source of a copy out. On CUDA, copies to the host run
in a stream of their own.
"""

from collections.abc import Callable
from typing import Any

import torch

from nanovllm.batch import Batch
from nanovllm.extras.kv_store.tier import BlockName
from nanovllm.extras.runner_hooks import SampledTokens
from nanovllm.extras.swap.host_blocks import as_words, indices_on
from nanovllm.extras.swap.space import SwapMoves


class StoreMoves(SwapMoves):
    """`loads` is a list of (data: [bytes_per_block] uint8, block id), `saves` one of (name, block id)."""

    def __init__(
        self,
        copies: list[tuple[int, int]],
        loads: list[tuple[torch.Tensor, int]],
        saves: list[tuple[BlockName, int]],
    ) -> None:
        super().__init__(copies, getattr(copies, "swap_outs", []), getattr(copies, "swap_ins", []))
        self.loads = loads
        self.saves = saves


def loading(cache_class: type[Any]) -> type[Any]:
    """Return `cache_class` with `copy_blocks` that also does the loads of a step."""

    class LoadingKVCache(cache_class):  # type: ignore[misc, valid-type]
        def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
            super().copy_blocks(copies)
            if isinstance(copies, StoreMoves) and copies.loads:
                copy_in(self.tensor, copies.loads)

    return LoadingKVCache


class SavesAfterwards:
    """Wraps the runner's `compute`: when a step has computed, its full blocks are copied to the host and saved."""

    def __init__(self, compute: Callable[[Any, Batch], SampledTokens], saver: Any) -> None:
        self._compute = compute
        self._saver = saver

    def __call__(self, runner: Any, batch: Batch) -> SampledTokens:
        sampled = self._compute(runner, batch)
        if isinstance(batch.copies, StoreMoves) and batch.copies.saves:
            self._saver.save_blocks(runner.kv_cache.tensor, batch.copies.saves)
        return sampled


def copy_in(kv_cache: torch.Tensor, loads: list[tuple[torch.Tensor, int]]) -> None:
    """Copy blocks from host memory to kv_cache: [parts, num_layers, num_blocks, …]."""
    shape = (*kv_cache.shape[:2], *kv_cache.shape[3:])
    if not kv_cache.is_cuda:
        for data, block_id in loads:
            kv_cache[:, :, block_id].copy_(data.view(kv_cache.dtype).view(shape))
        return
    arrived = torch.empty((len(loads), *shape), dtype=kv_cache.dtype, device=kv_cache.device)
    for block, (data, _) in zip(arrived, loads, strict=True):
        block.copy_(data.view(kv_cache.dtype).view(shape), non_blocking=True)
    block_ids = indices_on(kv_cache.device, tuple(block_id for _, block_id in loads))
    as_words(kv_cache)[:, :, block_ids] = as_words(arrived).movedim(0, 2)


class CopyOut:
    """Blocks on their way to the host. `wait` returns their data: [num_blocks, bytes_per_block] uint8."""

    def __init__(self, kv_cache: torch.Tensor, block_ids: list[int], stream: torch.cuda.Stream | None) -> None:
        shape = (len(block_ids), *kv_cache.shape[:2], *kv_cache.shape[3:])
        self._arrived: torch.cuda.Event | None = None
        if stream is None:
            self._data = torch.empty(shape, dtype=kv_cache.dtype)
            for block, block_id in zip(self._data, block_ids, strict=True):
                block.copy_(kv_cache[:, :, block_id])
            return
        found = as_words(kv_cache)[:, :, indices_on(kv_cache.device, tuple(block_ids))]
        gathered = found.movedim(2, 0).contiguous()  # [num_blocks, parts, num_layers, …]
        self._data = torch.empty(shape, dtype=kv_cache.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(kv_cache.device))
        with torch.cuda.stream(stream):
            as_words(self._data).copy_(gathered, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(stream)
        gathered.record_stream(stream)

    def wait(self) -> torch.Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._data.view(torch.uint8).flatten(1) if self._data.dim() > 1 else self._data
