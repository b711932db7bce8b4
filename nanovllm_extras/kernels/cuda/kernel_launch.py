"""Choose tile sizes and numbers of splits for the attention kernels, from shapes and the GPU, without measurements.

The choices do not depend on the sequences' lengths, so a launch can be recorded in a CUDA graph, and the same request
gives the same bits in every run. `python -m benchmarks.kernels --sweep` measures the alternatives on a GPU.
"""

import functools
from dataclasses import dataclass

import torch

MIN_SPLIT_LEN = 128  # tokens; in shorter splits, merging costs more than splitting gains
MIN_CHUNK_SPLIT_LEN = 512  # the same for prefill, where a part has many rows
MAX_FLASH_ATTN_SPLITS = 64  # the library takes at most 128
LONG_SPLIT_LEN = 4096  # longer contexts are split even if there are enough programs without splits


@dataclass(frozen=True)
class GPU:
    """Properties of a GPU that the choices depend on. The default is an H100, also used on machines without a GPU."""

    num_multiprocessors: int = 132
    shared_memory: int = 227 * 1024  # bytes available to one program


@dataclass(frozen=True)
class Launch:
    """Constants of a kernel launch: a program processes `rows` of queries and one `tile` of tokens at a time."""

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
    """Choose small tiles, so that two or three programs with several tiles in flight each fit on a multiprocessor.

    A decode computes little and waits for memory, so its speed depends on the number of bytes in flight. With an fp8
    cache, the number of instructions matters too: half as many bytes arrive, all of them must be converted, and V is
    read from shared memory byte by byte. Tiles of twice as many tokens take 11 to 24 % fewer instructions per token.
    """
    rows = max(16, round_up_to_power_of_2(group))  # the tensor cores multiply at least 16
    if dtype == torch.float32:  # for tests and comparisons: exact products, without tensor cores
        return Launch(rows, 32 if head_dim <= 256 else 16, 4, 1)
    tile = (128 if cache_dtype.itemsize == 1 else 64) if head_dim <= 128 else 32
    return Launch(rows, tile, 4, num_stages(2, tile, head_dim, cache_dtype, gpu.shared_memory // 2))


def prefill_launch(group: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, gpu: GPU) -> Launch:
    """Choose many rows, which share each K and V that is loaded; prefill is limited by the tensor cores."""
    if dtype == torch.float32:
        return Launch(max(16, round_up_to_power_of_2(group)), 32 if head_dim <= 256 else 16, 4, 1)
    rows = 128 if head_dim <= 128 else 64 if head_dim <= 256 else 32  # as registers allow
    rows = max(rows, round_up_to_power_of_2(group))
    tile = 64 if head_dim <= 128 else 32
    # Q is in shared memory too. So are the attention weights if there are fewer than 16 rows per warp (the tensor cores
    # give each warp 16 rows), because warps then share rows. If two tiles fit, Hopper keeps a third, the one in use.
    num_warps = 8
    occupied = rows * head_dim + (rows * tile if rows < 16 * num_warps else 0)
    free = gpu.shared_memory - occupied * dtype.itemsize
    return Launch(rows, tile, num_warps, num_stages(2, tile, head_dim, cache_dtype, free))


def num_stages(wanted: int, tile: int, head_dim: int, cache_dtype: torch.dtype, num_bytes: int) -> int:
    """Return Triton's `num_stages` for `wanted` tiles of K and V in flight, or as many as fit in `num_bytes`.

    A tile is loaded in two steps, and Triton counts both: the look-up of its blocks, then the load of K and V.
    """
    tiles_that_fit = num_bytes // (2 * tile * head_dim * cache_dtype.itemsize)
    return 1 + 2 * max(0, min(wanted, tiles_that_fit))


def choose_splits(num_programs: int, max_len: int, gpu: GPU) -> tuple[int, int]:
    """Return (number of splits, minimum tokens in a split), given `num_programs` without splits and a maximum context.

    Two programs for each multiprocessor keep the memory busy. If there are enough programs without splits, only long
    contexts are split, so that one long sequence among short ones does not delay the whole launch.
    """
    to_fill = -(-2 * gpu.num_multiprocessors // num_programs)
    if to_fill > 1:
        return max(1, min(to_fill, -(-max_len // MIN_SPLIT_LEN))), MIN_SPLIT_LEN
    # an empty split still launches a program, so the number of splits has a limit
    affordable = max(1, 16 * gpu.num_multiprocessors // num_programs)
    return max(1, min(affordable, -(-max_len // LONG_SPLIT_LEN))), LONG_SPLIT_LEN


def flash_attn_splits(num_programs: int, max_len: int, head_dim: int, gpu: GPU) -> int:
    """Return `num_splits` for a decode of flash-attn 2, or 0 if its own choice is as good.

    The library cuts the block tables' width `max_len` into parts of the same length, whatever a sequence's length is.
    In a CUDA graph the tables are as wide as the longest sequence allowed, so a short context would be one part. Parts
    are whole tiles. Each empty part launches a program and is read when parts are joined, so their number is limited.
    """
    at_a_time = 2 * gpu.num_multiprocessors  # programs of four warps, as the library counts them
    if num_programs >= 0.8 * at_a_time:
        return 0
    tile = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
    return max(1, min(MAX_FLASH_ATTN_SPLITS, -(-max_len // tile), 4 * at_a_time // num_programs))


def choose_chunk_splits(num_programs: int, max_len: int, gpu: GPU) -> tuple[int, int]:
    """Choose splits for prefill, like `choose_splits`. Short chunks over long contexts have few programs.

    One program fills a multiprocessor, and all programs should run at the same time.
    """
    return max(1, min(gpu.num_multiprocessors // num_programs, max_len // MIN_CHUNK_SPLIT_LEN)), MIN_CHUNK_SPLIT_LEN
