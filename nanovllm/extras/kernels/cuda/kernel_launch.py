"""The size and number of the pieces that kernels work on: computed from shapes and the GPU, never by trial.

What is chosen here does not depend on the sequences' lengths, so a launch can be recorded in a CUDA graph, and the same
request gives the same bits in every run. `python -m benchmarks.kernels --sweep` measures the alternatives on a GPU.
"""

import functools
from dataclasses import dataclass

import torch

MIN_SPLIT_LEN = 128  # below this, merging costs more than splitting gains
MIN_CHUNK_SPLIT_LEN = 512  # the same for prefill, whose parts are those of many rows
LONG_SPLIT_LEN = 4096  # a context longer than this is worth splitting even where there is work enough for all


@dataclass(frozen=True)
class GPU:
    """What the choices depend on; the default is an H100, and stands in where there is no GPU."""

    num_multiprocessors: int = 132
    shared_memory: int = 227 * 1024  # bytes that one program can have


@dataclass(frozen=True)
class Launch:
    """Constants of one kernel: `rows` of queries against a `tile` of tokens at a time."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


@functools.cache
def describe_gpu(device: torch.device) -> GPU:
    if device.type != "cuda":
        return GPU()
    properties = torch.cuda.get_device_properties(device)
    shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return GPU(properties.multi_processor_count, shared_memory)


def round_up_to_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def decode_launch(group: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, gpu: GPU) -> Launch:
    """Small tiles, so that two or three programs with several tiles each on their way fit a multiprocessor.

    A decode computes little and waits for memory, so what counts is how many bytes are in flight. Over an fp8 cache
    instructions count too: half the bytes arrive, all have to be converted, and V is read from shared memory byte by
    byte. Tiles of twice as many tokens take 11 to 24 % fewer instructions a token.
    """
    rows = max(16, round_up_to_power_of_2(group))  # the tensor cores take 16 at least
    if dtype == torch.float32:  # no tensor cores, for exactness: for tests and comparisons
        return Launch(rows, 32, 4, 1)
    tile = (128 if cache_dtype.itemsize == 1 else 64) if head_dim <= 128 else 32
    return Launch(rows, tile, 4, num_stages(2, tile, head_dim, cache_dtype, gpu.shared_memory // 2))


def prefill_launch(group: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, gpu: GPU) -> Launch:
    """Many rows: each K and V that is loaded serves all of them, and the tensor cores are what is waited for."""
    if dtype == torch.float32:
        return Launch(max(16, round_up_to_power_of_2(group)), 32, 4, 1)
    rows = max(128 if head_dim <= 128 else 64, round_up_to_power_of_2(group))  # what registers hold
    tile = 64 if head_dim <= 128 else 32
    # Q lies in shared memory too; so do weights where warps share rows, of which the tensor cores give each warp 16.
    # Where there is room for the two tiles anyway, Hopper keeps a third, which it computes with.
    num_warps = 8
    occupied = rows * head_dim + (rows * tile if rows < 16 * num_warps else 0)
    free = gpu.shared_memory - occupied * dtype.itemsize
    return Launch(rows, tile, num_warps, num_stages(2, tile, head_dim, cache_dtype, free))


def num_stages(wanted: int, tile: int, head_dim: int, cache_dtype: torch.dtype, num_bytes: int) -> int:
    """Triton's `num_stages` for `wanted` tiles of K and V that are being loaded, or as many as `num_bytes` hold.

    A tile is loaded in two steps, each of which Triton counts: first its blocks are looked up, then K and V loaded.
    """
    tiles_that_fit = num_bytes // (2 * tile * head_dim * cache_dtype.itemsize)
    return 1 + 2 * max(0, min(wanted, tiles_that_fit))


def choose_splits(num_programs: int, max_len: int, gpu: GPU) -> tuple[int, int]:
    """(number of splits, least tokens in one), for `num_programs` without splits and contexts of up to `max_len`.

    Two programs for each multiprocessor keep the memory busy. Where there are enough without splitting, only long
    contexts are split, so that one long sequence among short ones does not hold up the whole launch.
    """
    to_fill = -(-2 * gpu.num_multiprocessors // num_programs)
    if to_fill > 1:
        return max(1, min(to_fill, -(-max_len // MIN_SPLIT_LEN))), MIN_SPLIT_LEN
    # an empty split is still a program, so their number has a limit
    affordable = max(1, 16 * gpu.num_multiprocessors // num_programs)
    return max(1, min(affordable, -(-max_len // LONG_SPLIT_LEN))), LONG_SPLIT_LEN


def choose_chunk_splits(num_programs: int, max_len: int, gpu: GPU) -> tuple[int, int]:
    """As `choose_splits`, for prefill: chunks of a few tokens over a long context are too few programs.

    One program fills a multiprocessor, and all of them should run at the same time.
    """
    return max(1, min(gpu.num_multiprocessors // num_programs, max_len // MIN_CHUNK_SPLIT_LEN)), MIN_CHUNK_SPLIT_LEN
