"""The model and its KV cache on one device: Batch → token ids. Never sees a `Sequence`.

`run` returns a handle, because on CUDA the tokens have not arrived on the host when it returns. Made by `startup.py`,
called by `LLMEngine`. CUDA graphs wrap `compute` at start-up (`cuda_graph.py`); this file does not know of them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from nanovllm.execution.batch import Batch
from nanovllm.execution.input_buffer import fill_in, make_sender
from nanovllm.execution.kv_cache import KVCache
from nanovllm.execution.logprobs import LogprobRows, Logprobs
from nanovllm.execution.memory_advice import advice_on_step_memory
from nanovllm.execution.prompt_results import PromptResults, PromptRows, compute_prompt_results
from nanovllm.execution.sampler import Draw, draw_tokens, sample
from nanovllm.execution.sampling_batch import SamplingBatch
from nanovllm.layers.backends import AttentionBackend
from nanovllm.models.registry import CausalLM


class SampledTokens(NamedTuple):
    """The result of one step, on the device."""

    token_ids: torch.Tensor  # [num_samples] int64
    logprobs: Logprobs | None
    prompt_results: PromptResults | None


class StepTokens(NamedTuple):
    """The result of one step, on the host."""

    token_ids: list[int]
    logprobs: LogprobRows | None
    """One row for each token."""
    prompt_results: PromptRows | None
    """Of the batch's `prompt_work`."""


class ArrivingTokens:
    """The result of one step, on its way to the host."""

    def __init__(self, sampled: SampledTokens) -> None:
        token_ids, logprobs, prompt_results = sampled
        self._token_ids = token_ids.to("cpu", non_blocking=True)  # [num_samples]
        self._parts: list[Any] = [None if part is None else part.to_host() for part in (logprobs, prompt_results)]
        self._arrived = torch.cuda.Event() if token_ids.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> StepTokens:
        if self._arrived is not None:
            self._arrived.synchronize()
        rows = [None if part is None else part.to_rows() for part in self._parts]
        return StepTokens(self._token_ids.tolist(), *rows)


class ModelRunner:
    """Owns the model, and the KV cache, whose block 0 is the null block."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        draw: Draw = draw_tokens,
    ) -> None:
        self.model = model
        self.backend = backend
        self.draw = draw
        self.device = device
        self.kv_cache = KVCache(backend, num_layers, backend.kv_cache_dtype or dtype, device)
        self.compute: Callable[[ModelRunner, Batch], SampledTokens] = compute_eagerly  # may be wrapped
        self.send = make_sender(device)  # a record of tensors on the host -> the same on the device
        self.newest_ids = torch.empty(0, dtype=torch.int64, device=device)  # drawn by the step before

    @torch.inference_mode()
    def run(self, batch: Batch) -> ArrivingTokens:
        """Compute the batch, and draw one token for each of the step's samples."""
        with advice_on_step_memory(), torch.cuda.device_of(self.kv_cache.tensor):
            self.kv_cache.move_blocks(batch.moves)
            sampled = self.compute(self, batch)
            self.newest_ids = sampled.token_ids
            return ArrivingTokens(sampled)

    def choose_tokens(self, hidden: torch.Tensor, sampling: SamplingBatch) -> tuple[torch.Tensor, Logprobs | None]:
        """hidden: [num_samples, hidden_size] -> [num_samples] int64, and log-probabilities if a row wants them"""
        return sample(self.model.compute_logits(hidden), sampling, self.draw)


def compute_eagerly(runner: ModelRunner, batch: Batch) -> SampledTokens:
    """Any batch, in as many launches as it takes."""
    batch = runner.send(batch)
    if batch.has_expected_ids:
        batch = replace(batch, input_ids=fill_in(batch.input_ids, runner.newest_ids))
    hidden = runner.model(batch.input_ids, batch.positions, batch.metadata, runner.kv_cache.tensor)
    token_ids, logprobs = runner.choose_tokens(hidden[batch.logits_indices], batch.sampling)
    prompt_results = compute_prompt_results(hidden, runner.model.compute_logits, batch.prompt_work)
    return SampledTokens(token_ids, logprobs, prompt_results)
