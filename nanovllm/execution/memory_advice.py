"""Which option to lower where a GPU's memory does not suffice."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def advice_on_start_memory() -> Iterator[None]:
    """ValueError with advice, if the engine finds no room to start."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "the GPU's memory does not suffice to start: lower gpu_memory_utilization (if others use this GPU too), "
            "kv_cache_memory_bytes or num_kv_blocks, max_num_batched_tokens or max_num_seqs; "
            f"{error.__cause__ or error}"
        ) from error


@contextmanager
def advice_on_step_memory() -> Iterator[None]:
    """torch.OutOfMemoryError with advice, if a step finds no room; the engine goes on with other steps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            "the GPU's memory does not suffice for this step: lower gpu_memory_utilization, which leaves it more, "
            f"or max_num_batched_tokens or max_num_seqs; {error}"
        ) from error
