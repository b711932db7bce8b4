"""The GPU's memory: how much of it is left for the KV cache, and which option to lower where it does not suffice."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nanovllm.config import Config
from nanovllm.execution.batch import Batch
from nanovllm.execution.model_runner import ModelRunner, SampledTokens
from nanovllm.execution.sampling_batch import SamplingBatch
from nanovllm.extras.cuda.graphs import StepSizes, measure_graph_bytes
from nanovllm.layers.attention import AttentionMetadata
from nanovllm.scheduling.step import BlockMoves

Compute = Callable[[ModelRunner, Batch], SampledTokens]


@contextmanager
def advice_on_start_memory() -> Iterator[None]:
    """ValueError with advice, if the engine finds no room to start."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "the GPU's memory does not suffice to start: lower gpu_memory_utilization (if others use this GPU too), "
            "kv_cache_memory_bytes or num_kv_blocks, max_num_batched_tokens or max_num_seqs; "
            f"{error.__cause__ or error}"
        ) from error


def advised(compute: Compute) -> Compute:
    """`compute`, whose torch.OutOfMemoryError says what to lower; the engine goes on with other steps."""

    def compute_with_advice(runner: ModelRunner, batch: Batch) -> SampledTokens:
        try:
            return compute(runner, batch)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                "the GPU's memory does not suffice for this step: lower gpu_memory_utilization, which leaves it more, "
                f"or max_num_batched_tokens or max_num_seqs; {error}"
            ) from error

    return compute_with_advice


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
        sampling=SamplingBatch(
            temperatures=torch.ones(num_seqs),
            uniforms=torch.full((num_seqs,), 0.5, dtype=torch.float64),
            top_p=torch.full((num_seqs,), 0.5),
            num_logprobs=1,
        ),
        taps=(),
        moves=BlockMoves(),
    )
