"""The model and its KV cache on one device: Batch → token ids. Never sees a `Sequence`.

Decides how much memory the cache takes, and runs the forward pass. `run` returns a handle, since on CUDA the tokens are
still on their way when it returns. Called by `LLMEngine.step()`.
"""

import gc
from dataclasses import fields, replace
from typing import NamedTuple

import torch

from nanovllm.batch import Batch
from nanovllm.config import Config
from nanovllm.in_flight import BlockMoves
from nanovllm.kv_cache import KVCache
from nanovllm.layers.attention import AttentionBackend
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.sampler import LogprobRows, Logprobs, compute_logprobs, sample
from nanovllm.sampling_batch import SamplingBatch

CPU_KV_CACHE_BYTES = 1 << 30  # the default on CPU


LOGITS_SLICE = 256  # rows of logits for prompt_logprobs at a time: a long prompt's together would fill the memory


class SampledTokens:
    """What one step brings, which may not have arrived on the host yet."""

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
    token_ids: list[int]
    logprobs: LogprobRows | None
    """One row for each token."""
    prompt_logprobs: LogprobRows | None
    """One row for each of the batch's `prompt_logprobs.targets`."""


class ModelRunner:
    """Owns the model, and the KV cache, whose block 0 is the null block."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        backend: AttentionBackend,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model = model
        self.backend = backend
        self.num_layers = num_layers
        self.kv_cache_dtype = backend.kv_cache_dtype or dtype
        self.device = device
        self.kv_cache = self._empty_cache(0)
        self._newest_ids = torch.empty(0, dtype=torch.int64, device=device)  # what the step before has drawn

    @property
    def bytes_per_block(self) -> int:
        return torch.Size(self.backend.kv_cache_shape(self.num_layers, 1)).numel() * self.kv_cache_dtype.itemsize

    def allocate_kv_cache(self, num_kv_blocks: int, num_swap_blocks: int = 0) -> None:
        """Room for `num_kv_blocks` blocks and the null block, and `num_swap_blocks` in host memory."""
        self.kv_cache = self._empty_cache(num_kv_blocks, num_swap_blocks)

    @torch.inference_mode()
    def run(self, batch: Batch) -> SampledTokens:
        """Compute the batch, and draw one token for each sequence that catches up."""
        self.kv_cache.move_blocks(batch.moves)
        batch = batch.to(self.device)
        if batch.has_expected_ids:
            batch = replace(batch, input_ids=fill_in(batch.input_ids, self._newest_ids))
        hidden = self.model(batch, self.kv_cache.tensor)  # [num_tokens, hidden_size]
        logits = self.model.compute_logits(hidden[batch.logits_indices])  # [num_samples, vocab_size]
        self._newest_ids, logprobs = sample(logits, batch.sampling)
        return SampledTokens(self._newest_ids, logprobs, self._compute_prompt_logprobs(hidden, batch))

    def _compute_prompt_logprobs(self, hidden: torch.Tensor, batch: Batch) -> Logprobs | None:
        """hidden: [num_tokens, hidden_size]; log-probabilities of the batch's prompt_logprobs.targets, one row each"""
        prompt = batch.prompt_logprobs
        if prompt is None:
            return None
        parts = []
        for start in range(0, len(prompt.rows), LOGITS_SLICE):
            rows = slice(start, start + LOGITS_SLICE)
            logits = self.model.compute_logits(hidden[prompt.rows[rows]]).float()  # [LOGITS_SLICE, vocab_size]
            parts.append(compute_logprobs(logits, prompt.targets[rows], prompt.num_logprobs))
        return Logprobs(*[torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Logprobs)])

    def _empty_cache(self, num_kv_blocks: int, num_swap_blocks: int = 0) -> KVCache:
        dtype = self.kv_cache_dtype
        return KVCache(self.backend, self.num_layers, num_kv_blocks, num_swap_blocks, dtype, self.device)

    def num_blocks_that_fit(self, config: Config, max_num_batched_tokens: int, max_model_len: int) -> int:
        """How many blocks sequences get: as told, or as many as memory allows, but no more than they can ever fill."""
        block_size = self.backend.block_size
        if config.num_kv_blocks is not None:
            return config.num_kv_blocks
        if config.kv_cache_memory_bytes is not None:
            num_bytes, knob = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        elif self.device.type == "cuda":
            batch = widest_batch(max_num_batched_tokens, config.max_num_seqs, max_model_len, block_size)
            num_bytes, knob = self._measure_free_bytes(config.gpu_memory_utilization, batch), "gpu_memory_utilization"
        else:
            num_bytes, knob = CPU_KV_CACHE_BYTES, "kv_cache_memory_bytes"
        num_blocks = num_bytes // self.bytes_per_block - 1  # one is the null block
        if num_blocks < 1:
            raise ValueError(
                f"{max(num_bytes, 0)} bytes are left for the KV cache, but its least size, two blocks, takes "
                f"{2 * self.bytes_per_block}: raise {knob}, or lower block_size or max_num_batched_tokens"
            )
        return min(num_blocks, config.max_num_seqs * -(-max_model_len // block_size))

    def _measure_free_bytes(self, gpu_memory_utilization: float, batch: Batch) -> int:
        """Bytes that the KV cache may take on this GPU: what a forward pass of the largest batch leaves."""
        # all of the batch's slots lie in the null block, which the cache of no blocks has too
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run(batch).wait()
        peak = torch.cuda.max_memory_allocated(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        used_by_others = total - free - torch.cuda.memory_reserved(self.device)  # the CUDA context, other processes
        return int(total * gpu_memory_utilization) - peak - used_by_others


def fill_in(input_ids: torch.Tensor, newest_ids: torch.Tensor) -> torch.Tensor:
    """input_ids: [num_tokens], -1 - row for the id that is newest_ids[row] -> [num_tokens], all of them ids"""
    rows = (-1 - input_ids).clamp_(min=0)  # [num_tokens]
    return torch.where(input_ids < 0, newest_ids[rows].to(input_ids.dtype), input_ids)


def widest_batch(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int) -> Batch:
    """The batch that needs most memory: a full budget over as many samples as there can be, in the null block."""
    num_seqs = max(min(max_num_seqs, max_num_batched_tokens), -(-max_num_batched_tokens // max_model_len))
    lens = torch.full((num_seqs,), max_num_batched_tokens // num_seqs, dtype=torch.int32)
    lens[: max_num_batched_tokens % num_seqs] += 1
    num_tokens = int(lens.sum())
    cu = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0, dtype=torch.int32)])
    zeros = torch.zeros(num_tokens, dtype=torch.int32)
    return Batch(
        input_ids=zeros,
        positions=zeros,
        slot_mapping=zeros,
        block_tables=torch.zeros(num_seqs, -(-int(lens.max()) // block_size), dtype=torch.int32),
        seq_lens=lens,
        cu_seqlens_q=cu,
        prefill_cu_seqlens_q=cu,
        prefill_cu_seqlens_k=cu,
        logits_indices=cu[1:] - 1,
        has_expected_ids=False,
        num_decodes=0,
        max_seqlen_q=int(lens.max()),
        max_seqlen_k=int(lens.max()),
        sampling=SamplingBatch(
            temperatures=torch.ones(num_seqs),
            uniforms=torch.full((num_seqs,), 0.5, dtype=torch.float64),
            top_p=torch.full((num_seqs,), 0.5),
            num_logprobs=1,
        ),
        prompt_logprobs=None,
        moves=BlockMoves(),
    )
