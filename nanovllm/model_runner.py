"""The model and its KV cache on one device: Batch → token ids. Never sees a `Sequence`.

`run` returns a handle, since on CUDA the tokens are still on their way when it returns. Made by `startup.py`, called by
`LLMEngine.step()`.
"""

from dataclasses import fields, replace
from typing import NamedTuple, TypeVar

import torch

from nanovllm.batch import Batch
from nanovllm.cuda_graph import CudaGraphs
from nanovllm.input_buffer import InputBuffer, fill_in
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import AttentionBackend
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.sampler import Draw, LogprobRows, Logprobs, compute_logprobs, draw_tokens, sample
from nanovllm.sampling_batch import SamplingBatch

T = TypeVar("T")

LOGITS_SLICE = 256  # rows of logits for prompt_logprobs at a time: a long prompt's together would fill the memory


class ArrivingTokens:
    """What one step brings, on its way to the host."""

    def __init__(self, token_ids: torch.Tensor, logprobs: Logprobs | None, prompt_logprobs: Logprobs | None) -> None:
        self._token_ids = token_ids.to("cpu", non_blocking=True)  # [num_samples]
        self._logprobs = None if logprobs is None else logprobs.to_host()
        self._prompt_logprobs = None if prompt_logprobs is None else prompt_logprobs.to_host()
        self._arrived = torch.cuda.Event() if token_ids.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> "StepTokens":
        if self._arrived is not None:
            self._arrived.synchronize()
        rows = [None if part is None else part.to_rows() for part in (self._logprobs, self._prompt_logprobs)]
        return StepTokens(self._token_ids.tolist(), *rows)


class StepTokens(NamedTuple):
    """What one step brings, on the host."""

    token_ids: list[int]
    logprobs: LogprobRows | None
    """One row for each token."""
    prompt_logprobs: LogprobRows | None
    """One row for each of the batch's `prompt_logprobs.targets`."""


class SampledTokens(NamedTuple):
    """What one step brings, on the device."""

    token_ids: torch.Tensor  # [num_samples] int64
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None


class ModelRunner:
    """Owns the model, and the KV cache, whose block 0 is the null block."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        backend: AttentionBackend,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        draw: Draw = draw_tokens,
    ) -> None:
        self.model = model
        self.backend = backend
        self.num_layers = num_layers
        self.kv_cache_dtype = backend.kv_cache_dtype or dtype
        self.device = device
        self.draw = draw
        self.kv_cache = self._empty_cache(0)
        self._inputs = InputBuffer(device, 1 << 16) if device.type == "cuda" else None
        self.graphs: CudaGraphs | None = None  # set when the KV cache has its place
        self._newest_ids = torch.empty(0, dtype=torch.int64, device=device)  # what the step before has drawn

    @property
    def bytes_per_block(self) -> int:
        return torch.Size(self.backend.kv_cache_shape(self.num_layers, 1)).numel() * self.kv_cache_dtype.itemsize

    def allocate_kv_cache(self, num_kv_blocks: int, num_swap_blocks: int = 0) -> None:
        """Room for `num_kv_blocks` blocks and the null block, and `num_swap_blocks` in host memory."""
        self.kv_cache = self._empty_cache(num_kv_blocks, num_swap_blocks)

    @torch.inference_mode()
    def run(self, batch: Batch) -> ArrivingTokens:
        """Compute the batch, and draw one token for each sequence that catches up."""
        try:
            with torch.cuda.device_of(self.kv_cache.tensor):
                self.kv_cache.move_blocks(batch.moves)
                can_replay = self.graphs is not None and self.graphs.can_replay(batch, self._newest_ids)
                sampled = self._replay(batch) if can_replay else self._compute_eagerly(batch)
                self._newest_ids = sampled.token_ids
                return ArrivingTokens(*sampled)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                "the GPU's memory does not suffice for this step: lower gpu_memory_utilization, which leaves it more, "
                f"or max_num_batched_tokens or max_num_seqs; {error}"
            ) from error

    def _replay(self, batch: Batch) -> SampledTokens:
        """Decodes alone, in one launch. If a row asks for more than a draw, all are drawn again, outside the graph."""
        assert self.graphs is not None
        token_ids, hidden = self.graphs.replay(batch, self._newest_ids)
        if batch.sampling.wants_only_draws:
            return SampledTokens(token_ids, None, None)
        return SampledTokens(*self._choose_tokens(hidden, self._send(batch.sampling)), None)

    def _compute_eagerly(self, batch: Batch) -> SampledTokens:
        """Any batch, in as many launches as it takes."""
        batch = self._send(batch)
        if batch.has_expected_ids:
            batch = replace(batch, input_ids=fill_in(batch.input_ids, self._newest_ids))
        hidden = self.model(batch, self.kv_cache.tensor)  # [num_tokens, hidden_size]
        token_ids, logprobs = self._choose_tokens(hidden[batch.logits_indices], batch.sampling)
        return SampledTokens(token_ids, logprobs, self._compute_prompt_logprobs(hidden, batch))

    def _send(self, record: T) -> T:
        """A dataclass of tensors, to the device. It is good for the kernels up to the next call."""
        return record if self._inputs is None else self._inputs.send_record(record)

    def _choose_tokens(self, hidden: torch.Tensor, sampling: SamplingBatch) -> tuple[torch.Tensor, Logprobs | None]:
        """hidden: [num_samples, hidden_size] -> [num_samples] int64, and log-probabilities if a row wants them"""
        return sample(self.model.compute_logits(hidden), sampling, self.draw)

    def _compute_prompt_logprobs(self, hidden: torch.Tensor, batch: Batch) -> Logprobs | None:
        """hidden: [num_tokens, hidden_size]; log-probabilities of the batch's prompt_logprobs.targets, one row each"""
        prompt = batch.prompt_logprobs
        if prompt is None:
            return None
        parts = []
        for start in range(0, len(prompt.rows), LOGITS_SLICE):
            rows = slice(start, start + LOGITS_SLICE)
            logits = self.model.compute_logits(hidden[prompt.rows[rows]])  # [LOGITS_SLICE, vocab_size]
            parts.append(compute_logprobs(logits, prompt.targets[rows], prompt.num_logprobs))
        return Logprobs(*[torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Logprobs)])

    def _empty_cache(self, num_kv_blocks: int, num_swap_blocks: int = 0) -> KVCache:
        dtype = self.kv_cache_dtype
        return KVCache(self.backend, self.num_layers, num_kv_blocks, num_swap_blocks, dtype, self.device)
