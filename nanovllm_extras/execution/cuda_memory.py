"""The GPU's memory: how much of it is left for the KV cache, and which option to lower where it does not suffice."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanovllm.batch import Batch
from nanovllm.layers.attention import AttentionMetadata
from nanovllm_extras.execution.cuda_warm_up import draws, null_batch
from nanovllm_extras.execution.runner_protocol import Runner
from nanovllm_extras.execution.step_graphs import StepSizes, measure_graph_bytes
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.sampling.processed_batch import ProcessedSampling, values_of


@contextmanager
def advice_on_start_memory() -> Iterator[None]:
    """Raise ValueError with advice if the GPU's memory does not suffice to start the engine."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "the GPU's memory does not suffice to start: lower gpu_memory_utilization (if others use this GPU too), "
            "kv_cache_memory_bytes or num_kv_blocks, max_num_batched_tokens or max_num_seqs; for weights "
            "that are too large, set quantization or tensor_parallel_size; "
            f"{error.__cause__ or error}"
        ) from error


def measure_free_bytes(runner: Runner, config: Config, sizes: StepSizes, replayed: str | None) -> int:
    """Measure the memory that weights, the largest forward pass and CUDA graphs leave for the KV cache, in bytes."""
    device = runner.device
    release_unused_memory()  # of an engine that is gone: it would count as memory that this engine needs
    torch.cuda.reset_peak_memory_stats(device)
    # all slots of this batch are in the null block, which a cache without blocks has too
    runner.run(widest_batch(sizes, runner.backend.block_size, runner.metadata_cls)).wait()
    peak = torch.cuda.max_memory_allocated(device)
    release_unused_memory()
    num_graph_bytes = 0
    if replayed == "forward":
        with torch.cuda.device_of(runner.kv_cache.tensor):
            num_graph_bytes = max(0, runner.make_graphs().measure_bytes())
        release_unused_memory()
    if replayed == "step":
        table_width = -(-sizes.max_model_len // runner.backend.block_size)
        recorded = (runner.network, runner.kv_cache.tensor, runner.draw, sizes.max_decodes, table_width)
        num_graph_bytes = measure_graph_bytes(*recorded, runner.more_inputs)
        release_unused_memory()
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)  # the CUDA context, other processes
    needed = peak + num_graph_bytes + runner.bytes_to_leave(num_graph_bytes) + used_by_others
    return int(total * config.gpu_memory_utilization) - needed


def release_unused_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def widest_batch(sizes: StepSizes, block_size: int, metadata_cls: type[AttentionMetadata] = AttentionMetadata) -> Batch:
    """Return the batch that needs most memory: a full budget over the most samples, all in the null block."""
    max_num_tokens = sizes.max_num_batched_tokens
    num_seqs = max(sizes.max_decodes, -(-max_num_tokens // sizes.max_model_len))
    lens = [max_num_tokens // num_seqs + (i < max_num_tokens % num_seqs) for i in range(num_seqs)]
    sampling = ProcessedSampling(**values_of(draws("limited", num_seqs)), num_logprobs=1)
    return null_batch(lens, lens, False, -(-max(lens) // block_size), sampling, metadata_cls)
