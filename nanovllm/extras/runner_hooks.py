"""What wraps the runner's parts: a step's tokens on their way to the host, sampling with more, kinds of devices."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nanovllm import model_runner
from nanovllm.batch import SamplingBatch
from nanovllm.sampler import sample_tokens

if TYPE_CHECKING:
    from nanovllm.extras.full_runner import ModelRunner
    from nanovllm.extras.logits_processors import ReaderResult
    from nanovllm.extras.logprobs import LogprobRow, Logprobs

Draw = Callable[..., Tensor]
"""`sample_tokens`, or a fast version with the same signature."""


class SampledTokens(NamedTuple):
    """The result of one step, on the device."""

    token_ids: Tensor  # [num_samples] int64
    logprobs: "Logprobs | None" = None
    readings: "tuple[ReaderResult, ...]" = ()  # what the batch's readers have read


class StepTokens(NamedTuple):
    """The result of one step, on the host."""

    token_ids: list[int]
    logprobs: "list[LogprobRow] | None"  # one row for each token
    readings: "tuple[ReaderResult, ...]"


class ArrivingTokens:
    """The result of one step, on its way to the host."""

    def __init__(self, sampled: SampledTokens) -> None:
        self._token_ids = sampled.token_ids.to("cpu", non_blocking=True)  # [num_samples]
        self._logprobs = None if sampled.logprobs is None else sampled.logprobs.to_host()
        self.readings = tuple(one.to_host() for one in sampled.readings)
        self._arrived = torch.cuda.Event() if sampled.token_ids.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> StepTokens:
        if self._arrived is not None:
            self._arrived.synchronize()
        logprobs = None if self._logprobs is None else self._logprobs.to_rows()
        return StepTokens(self._token_ids.tolist(), logprobs, self.readings)


class Device:
    """What a kind of device adds to the start: by default nothing. `cuda/startup.py` has a subclass."""

    note = ""
    """For the log."""
    memory_knob = "kv_cache_memory_bytes"
    """The option to raise if there is not enough memory."""

    def prepare(self, runner: "ModelRunner") -> None:
        """Called before the first forward pass."""

    def advice(self) -> AbstractContextManager[None]:
        """Return a context for what allocates memory."""
        return nullcontext()

    def free_bytes(self, runner: "ModelRunner") -> int:
        """Return the memory for the KV cache, if the options do not set it."""
        return model_runner.CPU_KV_CACHE_BYTES

    def wrap(self, runner: "ModelRunner", newest: Any) -> None:
        """Called last, when the KV cache is allocated. May wrap the runner's `compute`."""


# ---- sampling


def sample(logits: Tensor, sampling: SamplingBatch, draw: Draw) -> "tuple[Tensor, Logprobs | None]":
    """logits: [num_samples, vocab_size] -> token ids [num_samples] int64, and log-probabilities if a row wants them

    The logits are not changed. Processors work on a copy.
    """
    arguments = draw_arguments(sampling)
    processors, num_logprobs = getattr(sampling, "processors", ()), getattr(sampling, "num_logprobs", None)
    if not processors and num_logprobs is None:
        return draw(logits, *arguments), None
    from nanovllm.extras.logits_processors import apply_processors
    from nanovllm.extras.logprobs import compute_logprobs

    token_ids = draw(apply_processors(logits, processors), *arguments)
    return token_ids, None if num_logprobs is None else compute_logprobs(logits, token_ids, num_logprobs)


def draw_arguments(sampling: SamplingBatch) -> tuple[Tensor | None, ...]:
    """Return the arguments of `sample_tokens` after the logits."""
    return sampling.temperatures, sampling.uniforms, sampling.top_k, sampling.top_p, sampling.min_p


def sample_with(
    argmax: Callable[[Tensor], Tensor], logits: Tensor, temperatures: Tensor, uniforms: Tensor | None = None, *rest: Any
) -> Tensor:
    """As `sample_tokens`, with a faster `argmax` for batches whose rows are all greedy."""
    return argmax(logits) if uniforms is None else sample_tokens(logits, temperatures, uniforms, *rest)
