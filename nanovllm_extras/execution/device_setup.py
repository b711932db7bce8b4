"""What a kind of device, and the self-check, add to the start of a runner: here nothing.

`cuda_startup.py` and `parallel/start_ranks.py` have subclasses of `Device`, and `self_check/` has one of `Unchecked`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nanovllm import model_runner
from nanovllm.kv_cache import KVCache
from nanovllm.sampler import sample_tokens
from nanovllm_extras.execution.runner_protocol import Record, Runner
from nanovllm_extras.machine.machine_limits import free_bytes
from nanovllm_extras.sampling.runner_hooks import Draw, untouched_zeros


class Device:
    """What a kind of device adds to the start: by default nothing. `cuda_startup.py` has a subclass."""

    note = ""  # for the log
    memory_knob = "kv_cache_memory_bytes"
    """The option to raise if there is not enough memory."""
    draw: Draw | None = None  # a kernel that draws tokens
    replayed: str | None = None  # what CUDA graphs have: a whole "step", or the "forward" pass

    def choose_draw(self, default: Draw) -> Draw:
        """Return the function that draws tokens: this device's, or `default`."""
        return self.draw or default

    def prepare(self, runner: Runner) -> None:
        """Prepare the runner. The runner calls this before the first forward pass."""

    def send(self, record: Record) -> Record:
        """Return a record of tensors, which are on the host, with its tensors on the device."""
        return record

    def step(self) -> AbstractContextManager[None]:
        """Return a context for each step."""
        return nullcontext()

    def advice(self) -> AbstractContextManager[None]:
        """Return a context for what allocates memory."""
        return nullcontext()

    def free_bytes(self, runner: Runner) -> int:
        """Return the memory for the KV cache, if the options do not set it: 1 GiB, or half of the free memory.

        The smaller of the two is taken. The other half is for activations and for other programs.
        """
        num_ranks = max(1, runner.config.tensor_parallel_size // runner.config.nnodes)  # on this machine
        free, most = free_bytes(), model_runner.CPU_KV_CACHE_BYTES
        return most if free is None else min(most, free // 2 // num_ranks)

    def num_common_blocks(self, num_blocks: int, device: torch.device) -> int:
        """Return the number of blocks that all ranks have, of which this one has memory for `num_blocks`."""
        return num_blocks

    def allocate(self, caches: list[KVCache], num_blocks: int) -> None:
        """Allocate the blocks of KV caches."""
        for cache in caches:
            cache.tensor = untouched_zeros(cache.tensor, num_blocks + 1)

    def record(self, runner: Runner) -> None:
        """Record CUDA graphs. The runner calls this last, after allocating the KV cache."""


class Unchecked:
    """A self-check that checks nothing: PyTorch computes, or the kernels have been checked before (`self_check/`)."""

    def layers(self) -> AbstractContextManager[None]:
        """Return a context for the replacement of layers by fast versions."""
        return nullcontext()

    def steps(self) -> AbstractContextManager[None]:
        """Return a context for what follows the layers: CUDA graphs, and the function that draws tokens."""
        return nullcontext()


def sample_with(
    argmax: Callable[[Tensor], Tensor],
    logits: Tensor,
    temperatures: Tensor,
    uniforms: Tensor | None = None,
    *rest: Any,
) -> Tensor:
    """Sample as `sample_tokens` does, with a faster `argmax` for batches whose rows are all greedy."""
    return argmax(logits) if uniforms is None else sample_tokens(logits, temperatures, uniforms, *rest)
