"""The self-check for `nanovllm.LLM`: a backend compares the layers that it replaces with PyTorch's, before and after.

`CheckedBackend.replace_layers` calls `checked_layers`. The engine with all options checks its own start instead
(`runner_check.py`), which includes CUDA graphs and the functions that draw tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from nanovllm.layers.attention import BackendError, LoadedModel, TorchAttention
from nanovllm.sampler import sample_tokens
from nanovllm_extras.execution.alone import Whole
from nanovllm_extras.execution.device_setup import Device, sample_with
from nanovllm_extras.kernels.backend import AttentionBackend
from nanovllm_extras.machine.own_process import SelfCheckError
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.self_check.comparison import has_kernels
from nanovllm_extras.self_check.mode import mode_of, raise_if_strict
from nanovllm_extras.self_check.runner_check import SelfCheck
from nanovllm_extras.self_check.stored_results import Result, StoredResult


class CoreStart:
    """What a check needs to know of a start of `nanovllm.LLM`. It has the names of a runner's attributes."""

    def __init__(self, backend: AttentionBackend, loaded: LoadedModel) -> None:
        self.config = Config(
            "a model of nanovllm.LLM", block_size=backend.block_size, enforce_eager=loaded.enforce_eager
        )
        self.backend, self.model, self.part = backend, loaded.model, Whole()
        shape = loaded.shape
        self.shape = shape if isinstance(shape, NetworkConfig) else NetworkConfig(**vars(shape))
        self.dtype, self.device, self.max_model_len = loaded.dtype, loaded.device, loaded.max_model_len
        has_argmax = type(backend).argmax is not TorchAttention.argmax
        self.draw = partial(sample_with, backend.argmax) if has_argmax else sample_tokens


@contextmanager
def checked_layers(backend: AttentionBackend, loaded: LoadedModel) -> Iterator[None]:
    """Compare the layers after the context with those before it. SelfCheckError, a `BackendError`, if they are wrong.

    A result is stored, so that later starts need not compare. With `NANOVLLM_SELF_CHECK=strict`, the error is one that
    no other backend replaces.
    """
    start: Any = CoreStart(backend, loaded)
    if mode_of(start.config) == "off" or not has_kernels(start):
        yield
        return
    stored = StoredResult(start)
    known = stored.read()
    try:
        if known is None:
            check = SelfCheck.begin(start, Device(), stored)
            with check.layers():
                yield
            check.compare_draws()
            if check.is_complete:
                stored.write(Result(True))
        elif not known.is_right:
            raise SelfCheckError(f"{known.reason}; found on {known.date}; delete {stored.path} to check again")
        else:
            yield
    except BackendError as error:
        raise_if_strict(error)
        raise
