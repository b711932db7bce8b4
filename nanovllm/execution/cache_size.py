"""How many blocks of KV cache fit? As many as configured, or as a forward pass of the largest batch leaves room for.

Called by `startup.py`, once the weights are loaded.
"""

import gc
from dataclasses import dataclass

import torch

from nanovllm.config import Config
from nanovllm.execution.batch import Batch
from nanovllm.execution.cuda_graph import measure_graph_bytes
from nanovllm.execution.model_runner import ModelRunner
from nanovllm.execution.sampling_batch import SamplingBatch
from nanovllm.layers.attention import AttentionMetadata
from nanovllm.scheduling.step import BlockMoves

CPU_KV_CACHE_BYTES = 1 << 30  # the default on CPU


@dataclass(frozen=True)
class StepSizes:
    """How large a step can get."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int

    @property
    def max_decodes(self) -> int:
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def count_swap_blocks(swap_space_bytes: int, bytes_per_block: int) -> int:
    if 0 < swap_space_bytes < bytes_per_block:
        raise ValueError(f"swap_space_bytes must be >= {bytes_per_block}, one block, got {swap_space_bytes}")
    return swap_space_bytes // bytes_per_block


def num_blocks_that_fit(runner: ModelRunner, config: Config, sizes: StepSizes, has_graphs: bool) -> int:
    """Blocks for sequences: as configured, or as many as memory allows, but no more than sequences can ever fill."""
    block_size = runner.backend.block_size
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.kv_cache_memory_bytes is not None:
        num_bytes, knob = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif runner.device.type == "cuda":
        num_bytes, knob = measure_free_bytes(runner, config, sizes, has_graphs), "gpu_memory_utilization"
    else:
        num_bytes, knob = CPU_KV_CACHE_BYTES, "kv_cache_memory_bytes"
    num_blocks = num_bytes // runner.kv_cache.bytes_per_block - 1  # one is the null block
    if num_blocks < 1:
        raise ValueError(
            f"{max(num_bytes, 0)} bytes are left for the KV cache, but its least size, two blocks, takes "
            f"{2 * runner.kv_cache.bytes_per_block}: raise {knob}, or lower block_size or max_num_batched_tokens"
        )
    return min(num_blocks, sizes.max_num_seqs * -(-sizes.max_model_len // block_size))


def measure_free_bytes(runner: ModelRunner, config: Config, sizes: StepSizes, has_graphs: bool) -> int:
    """What weights, a forward pass of the largest batch, and CUDA graphs leave of this GPU for the KV cache."""
    device = runner.device
    release_unused_memory()  # of an engine that is gone: it would count as memory that this engine needs
    torch.cuda.reset_peak_memory_stats(device)
    # all slots of this batch are in the null block, which a cache without blocks has too
    runner.run(widest_batch(sizes, runner.backend.block_size)).wait()
    peak = torch.cuda.max_memory_allocated(device)
    release_unused_memory()
    num_graph_bytes = 0
    if has_graphs:
        table_width = -(-sizes.max_model_len // runner.backend.block_size)
        recorded = (runner.model, runner.kv_cache.tensor, runner.draw, sizes.max_decodes, table_width)
        num_graph_bytes = measure_graph_bytes(*recorded)
        release_unused_memory()
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)  # the CUDA context, other processes
    return int(total * config.gpu_memory_utilization) - peak - num_graph_bytes - used_by_others


def release_unused_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def widest_batch(sizes: StepSizes, block_size: int) -> Batch:
    """The batch that needs most memory: a full budget over as many samples as there can be, in the null block."""
    max_num_tokens = sizes.max_num_batched_tokens
    num_seqs = max(sizes.max_decodes, -(-max_num_tokens // sizes.max_model_len))
    lens = torch.full((num_seqs,), max_num_tokens // num_seqs, dtype=torch.int32)
    lens[: max_num_tokens % num_seqs] += 1
    num_tokens = int(lens.sum())
    cu = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0, dtype=torch.int32)])
    zeros = torch.zeros(num_tokens, dtype=torch.int32)
    return Batch(
        input_ids=zeros,
        positions=zeros,
        metadata=AttentionMetadata(
            slot_mapping=zeros,
            block_tables=torch.zeros(num_seqs, -(-int(lens.max()) // block_size), dtype=torch.int32),
            seq_lens=lens,
            cu_seqlens_q=cu,
            prefill_cu_seqlens_q=cu,
            prefill_cu_seqlens_k=cu,
            num_decodes=0,
            max_seqlen_q=int(lens.max()),
            max_seqlen_k=int(lens.max()),
        ),
        logits_indices=cu[1:] - 1,
        has_expected_ids=False,
        sampling=SamplingBatch(
            temperatures=torch.ones(num_seqs),
            uniforms=torch.full((num_seqs,), 0.5, dtype=torch.float64),
            top_p=torch.full((num_seqs,), 0.5),
            num_logprobs=1,
        ),
        prompt_work=None,
        moves=BlockMoves(),
    )
