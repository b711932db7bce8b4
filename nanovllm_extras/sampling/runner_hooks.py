"""What surrounds a runner: a step's results on their way to the host, sampling with more, memory, defaults, a clock."""

import math
import mmap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.batch import Batch, SamplingBatch
from nanovllm_extras.machine.torch_defaults import reset_defaults
from nanovllm_extras.sampling.logits_processors import ReaderResult, apply_processors
from nanovllm_extras.sampling.logprobs import LogprobRow, Logprobs, compute_logprobs

NO_TOKEN = -1
"""The token id of a row for which no token could be sampled (`no_token.py`)."""
Draw = Callable[..., Tensor]
"""`sample_tokens`, or a fast version with the same signature."""


class Computed(NamedTuple):
    """A step after its forward pass."""

    hidden: Tensor  # [num_tokens, hidden_size]
    batch: Batch
    """As it was sent to the device."""
    token_ids: Tensor | None = None
    """[num_samples] int64, drawn by a CUDA graph of the whole step, for rows that ask for no more than a token."""


class SampledTokens(NamedTuple):
    """The result of one step, on the device."""

    token_ids: Tensor  # [num_samples] int64
    logprobs: Logprobs | None = None
    readings: tuple[ReaderResult, ...] = ()  # what the batch's readers have read


class StepTokens(NamedTuple):
    """The result of one step, on the host."""

    token_ids: list[int]
    logprobs: list[LogprobRow] | None  # one row for each token
    readings: tuple[ReaderResult, ...]


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


class LapClock:
    """Seconds of each part: `lap(name)` ends a part. Parts of the same name add up.

    `now` is the last reading, in seconds of `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.now = time.monotonic()

    def lap(self, name: str) -> None:
        before, self.now = self.now, time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now - before

    def resume(self) -> None:
        """Restart the clock without charging the elapsed time to any part."""
        self.now = time.monotonic()


def untouched_zeros(like: Tensor, num_blocks: int) -> Tensor:
    """Return zeros: [parts, num_layers, num_blocks, …] like a smaller tensor. Pages take memory when written."""
    shape = (*like.shape[:2], num_blocks, *like.shape[3:])
    num_bytes = math.prod(shape) * like.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(
            f"there was no memory for {num_blocks} blocks of KV cache, {num_bytes} bytes: lower kv_cache_memory_bytes "
            f"or num_kv_blocks; {error}"
        ) from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).view(shape)  # keeps `memory`


def plain_defaults() -> AbstractContextManager[None]:
    """Return a context without the program's default device, default dtype and autocast.

    The C code and the layers need tensors of known devices and dtypes.
    """
    is_plain = torch.get_default_dtype() == torch.float32 and torch.get_default_device().type == "cpu"
    has_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if is_plain and not has_autocast:
        return nullcontext()
    return reset_defaults()


# ---- tokens that only the device knows yet (`scheduling/pending.py`)


def has_placeholders(batch: Batch) -> bool:
    """Return whether `batch`, on the host, has placeholders. Only decodes have them."""
    return bool((batch.input_ids[: batch.metadata.num_decodes] < 0).any())


def fill_in(input_ids: Tensor, newest_ids: Tensor) -> Tensor:
    """Replace each placeholder -1 - row in input_ids: [num_tokens] by newest_ids[row].

    A row that has no token ends its sequence, so its input may be any token.
    """
    rows = (-1 - input_ids).clamp_(min=0)  # [num_tokens]
    return torch.where(input_ids < 0, newest_ids[rows].clamp_(min=0).to(input_ids.dtype), input_ids)


# ---- sampling


def sample(logits: Tensor, sampling: SamplingBatch, draw: Draw) -> tuple[Tensor, Logprobs | None]:
    """Sample logits: [num_samples, vocab_size] -> token ids [num_samples] int64, and log-probabilities or None

    The logits are not changed. Processors work on a copy.
    """
    arguments = draw_arguments(sampling)
    if wants_only_tokens(sampling):
        return mark_missing(logits, draw(logits, *arguments)), None
    asked: Any = sampling  # a `ProcessedSampling`
    processed = apply_processors(logits, asked.processors)
    token_ids = draw(processed, *arguments)
    logprobs = None if asked.num_logprobs is None else compute_logprobs(logits, token_ids, asked.num_logprobs)
    return mark_missing(processed, token_ids), logprobs


def mark_missing(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the sampled token ids: [num_samples], with `NO_TOKEN` where no token of the row can be sampled.

    A token can be sampled if its logit is above -inf. Logits of NaN, from a model whose weights or activations are
    broken, cannot be compared.
    """
    chosen = logits.gather(1, token_ids[:, None])[:, 0]  # [num_samples]
    return token_ids.where(chosen > -torch.inf, NO_TOKEN)


def wants_only_tokens(sampling: SamplingBatch) -> bool:
    """Return whether no row asks for more than a token from the model's own logits."""
    return not getattr(sampling, "processors", ()) and getattr(sampling, "num_logprobs", None) is None


def draw_arguments(sampling: SamplingBatch) -> tuple[Tensor | None, ...]:
    """Return the arguments of `sample_tokens` after the logits."""
    return sampling.temperatures, sampling.uniforms, sampling.top_k, sampling.top_p, sampling.min_p
