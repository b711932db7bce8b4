"""What wraps the runner's parts: a step's tokens on their way to the host, sampling with more, devices, a clock."""

import math
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nanovllm import model_runner
from nanovllm.batch import SamplingBatch
from nanovllm.kv_cache import KVCache
from nanovllm.sampler import sample_tokens

if TYPE_CHECKING:
    from nanovllm.extras.full_runner import ModelRunner
    from nanovllm.extras.logits_processors import ReaderResult
    from nanovllm.extras.logprobs import LogprobRow, Logprobs

NO_TOKEN = -1
"""Stands for a token if none could be sampled (`no_token.py`)."""
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
        """Prepare the runner. The runner calls this before the first forward pass."""

    def advice(self) -> AbstractContextManager[None]:
        """Return a context for what allocates memory."""
        return nullcontext()

    def free_bytes(self, runner: "ModelRunner") -> int:
        """Return the memory for the KV cache, if the options do not set it: 1 GiB, or half of the free memory.

        The smaller of the two is taken. The other half is for activations and for other programs.
        """
        from nanovllm.extras.machine_limits import free_bytes

        num_ranks = max(1, runner.config.tensor_parallel_size // runner.config.nnodes)  # on this machine
        free = free_bytes()
        most = model_runner.CPU_KV_CACHE_BYTES
        return most if free is None else min(most, free // 2 // num_ranks)

    def allocate(self, kv_cache: KVCache, num_blocks: int) -> None:
        """Allocate the blocks of the KV cache."""
        kv_cache.allocate(0)
        kv_cache.tensor = untouched_zeros(kv_cache.tensor, num_blocks + 1)

    def wrap(self, runner: "ModelRunner", newest: Any) -> None:
        """Wrap the runner's `compute`, if needed. The runner calls this last, after allocating the KV cache."""


class Unchecked:
    """A self-check that checks nothing: PyTorch computes, or the kernels have been checked before (`self_check/`)."""

    def layers(self) -> AbstractContextManager[None]:
        """Return a context for the replacement of layers by fast versions."""
        return nullcontext()

    def steps(self) -> AbstractContextManager[None]:
        """Return a context for what follows the layers: CUDA graphs, and the function that draws tokens."""
        return nullcontext()


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


# ---- PyTorch's defaults


def plain_defaults() -> AbstractContextManager[None]:
    """Return a context without the program's default device, default dtype and autocast.

    The C code and the layers need tensors of known devices and dtypes.
    """
    is_plain = torch.get_default_dtype() == torch.float32 and torch.get_default_device().type == "cpu"
    has_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return nullcontext() if is_plain and not has_autocast else reset_defaults()


@contextmanager
def reset_defaults() -> Iterator[None]:
    """Give PyTorch its own defaults, and the program's again in the end."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_default_dtype(dtype)


# ---- sampling


def sample(logits: Tensor, sampling: SamplingBatch, draw: Draw) -> "tuple[Tensor, Logprobs | None]":
    """Sample logits: [num_samples, vocab_size] -> token ids [num_samples] int64, and log-probabilities or None

    The logits are not changed. Processors work on a copy.
    """
    arguments = draw_arguments(sampling)
    if wants_only_tokens(sampling):
        return mark_missing(logits, draw(logits, *arguments)), None
    from nanovllm.extras.logits_processors import apply_processors
    from nanovllm.extras.logprobs import compute_logprobs

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


def sample_with(
    argmax: Callable[[Tensor], Tensor], logits: Tensor, temperatures: Tensor, uniforms: Tensor | None = None, *rest: Any
) -> Tensor:
    """Sample as `sample_tokens` does, with a faster `argmax` for batches whose rows are all greedy."""
    return argmax(logits) if uniforms is None else sample_tokens(logits, temperatures, uniforms, *rest)
