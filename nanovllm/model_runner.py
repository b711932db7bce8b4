"""The model and its KV cache on one device: Batch → token ids. Never sees a `Sequence`.

`run` returns a handle, because on CUDA the tokens have not arrived on the host when it returns. Made by `assembly.py`,
called by `LLMEngine`. Extras wrap `send` (a step's tensors to the device) and `compute` (a batch to tokens).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nanovllm.batch import Batch
from nanovllm.kv_cache import KVCache
from nanovllm.layers.backends import AttentionBackend
from nanovllm.models.registry import CausalLM
from nanovllm.sampler import Draw, LogprobRow, Logprobs, sample
from nanovllm.sampling_batch import SamplingBatch
from nanovllm.extras.logits_processors import ReaderResult


class SampledTokens(NamedTuple):
    """The result of one step, on the device."""

    token_ids: torch.Tensor  # [num_samples] int64
    logprobs: Logprobs | None
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


class ModelRunner:
    """Owns the model, and the KV cache, whose block 0 is the null block."""

    def __init__(self, model: CausalLM, backend: AttentionBackend, kv_cache: KVCache, draw: Draw) -> None:
        self.model = model
        self.backend = backend
        self.kv_cache = kv_cache
        self.draw = draw
        self.device = kv_cache.tensor.device
        self.send: Callable[[Any], Any] = lambda record: record  # a record of tensors on the host -> on the device
        self.compute: Callable[[ModelRunner, Batch], SampledTokens] = compute_eagerly
        self.stop: Callable[[], object] = lambda: None  # ends what computes along

    @torch.inference_mode()
    def run(self, batch: Batch) -> ArrivingTokens:
        """Compute the batch, and draw one token for each of the step's samples."""
        with torch.cuda.device_of(self.kv_cache.tensor):
            self.kv_cache.move_blocks(batch.moves)
            return ArrivingTokens(self.compute(self, batch))

    def choose_tokens(self, hidden: torch.Tensor, sampling: SamplingBatch) -> tuple[torch.Tensor, Logprobs | None]:
        """hidden: [num_samples, hidden_size] -> [num_samples] int64, and log-probabilities if a row wants them"""
        return sample(self.model.compute_logits(hidden), sampling, self.draw)


def compute_eagerly(runner: ModelRunner, batch: Batch) -> SampledTokens:
    """Any batch, in as many launches as it takes."""
    batch = runner.send(batch)
    hidden = runner.model(batch.input_ids, batch.positions, batch.metadata, runner.kv_cache.tensor)
    token_ids, logprobs = runner.choose_tokens(hidden[batch.logits_indices], batch.sampling)
    readings = tuple(reader.compute(hidden, runner.model.compute_logits) for reader in batch.readers)
    return SampledTokens(token_ids, logprobs, readings)
