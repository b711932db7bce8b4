"""The kernels as `nanovllm.LLM` takes them: the entry points `nanovllm.backends` name these classes.

They check the layers that they replace, and keep PyTorch's threads out of the steps. `nanovllm_extras.LLM` does both in
its own runner.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nanovllm.layers.attention import BackendError, LoadedModel
from nanovllm_extras.kernels.backend import KernelBackend
from nanovllm_extras.kernels.cpu.cpu_attention import CpuAttention
from nanovllm_extras.kernels.cpu.threads import limit_threads
from nanovllm_extras.kernels.cuda.triton_attention import TritonAttention
from nanovllm_extras.machine.one_thread import one_thread
from nanovllm_extras.self_check.mode import raise_if_strict

logger = logging.getLogger(__name__)


class CheckedBackend(KernelBackend):
    """A backend whose fast layers are compared with PyTorch's when they replace them."""

    def replace_layers(self, loaded: LoadedModel) -> None:
        """Replace layers of the network by fast versions. SelfCheckError, a `BackendError`, if they are wrong here."""
        from nanovllm_extras.self_check.core_check import checked_layers

        with checked_layers(self, loaded):
            if not loaded.enforce_eager:
                self.make_fast(loaded.model, loaded.max_model_len)


class CpuBackend(CheckedBackend, CpuAttention):
    """Paged attention and all other layers in C."""

    priority = 20
    supports_graphs = False

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> str | None:
        try:
            return super().why_not(device, dtype, head_dim, block_size)
        except BackendError as error:  # the library crashes or hangs when it is loaded
            raise_if_strict(error)
            logger.warning("the CPU kernels cannot be used: %s", error)
            return str(error)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        limit_threads()
        super().__init__(*args, **kwargs)

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Run PyTorch's small operations on one thread, and the kernels on all: they have a team of their own.

        After an operation with threads, those of PyTorch spin for some time on the cores that the kernels need.
        """
        self.library.keep_threads(torch.get_num_threads())
        try:
            with one_thread():
                yield
        finally:
            self.library.keep_threads(0)


class TritonBackend(CheckedBackend, TritonAttention):
    """Paged attention and fused layers in Triton."""

    priority = 10
