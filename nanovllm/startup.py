"""From a configuration to a model that is ready to run: what happens once, and how long each part of it takes.

    choose a backend → load the weights → put fast layers in place → size and allocate the KV cache → record CUDA graphs

Called by `LLMEngine`, which has read the model's folder before, and makes the scheduler afterwards.
"""

import gc
import importlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from nanovllm.batch import Batch
from nanovllm.config import Config, resolve_device, resolve_dtype
from nanovllm.cuda_graph import measure_graph_bytes, record_graphs
from nanovllm.layers.attention import AttentionBackend, select_backend
from nanovllm.loader import load_model
from nanovllm.model_runner import ModelRunner
from nanovllm.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from nanovllm.sampler import Draw, draw_tokens
from nanovllm.sampling_batch import SamplingBatch
from nanovllm.scheduler_output import BlockMoves

logger = logging.getLogger(__name__)

CPU_KV_CACHE_BYTES = 1 << 30  # the default on CPU


@dataclass(frozen=True)
class Startup:
    """What `LLMEngine` works with, and how it came about."""

    runner: ModelRunner
    num_kv_blocks: int
    num_swap_blocks: int
    description: str
    """What was chosen, and why."""
    seconds: dict[str, float]
    """How long each part took, in order."""


def start_runner(
    config: Config,
    folder: Path,
    model_class: type[Qwen3ForCausalLM],
    shape: Qwen3Config,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> Startup:
    """Raises ValueError if the model, the config and this machine do not go together, or memory does not suffice."""
    device, dtype = resolve_device(config.device), resolve_dtype(config.dtype, shape.dtype)
    sizes = StepSizes(max_num_batched_tokens, config.max_num_seqs, max_model_len)
    clock = PartsClock()
    with clock.part("backend"):
        backend, description = make_backend(config, device, dtype, shape)
        draw = choose_draw(config, device)
        has_graphs, graphs = choose_graphs(config, backend, draw, device)
        description += graphs
    logger.info(description)
    with clock.part("weights"):
        seed = config.seed if config.load_format == "dummy" else None
        model = load_model(model_class, shape, backend, dtype, device, folder, seed)
    with clock.part("layers"):
        if not config.enforce_eager:
            backend.replace_layers(model)
        runner = ModelRunner(model, backend, shape.num_hidden_layers, dtype, device, draw)
    with clock.part("memory"), advice_on_memory():
        num_kv_blocks = num_blocks_that_fit(runner, config, sizes, has_graphs)
        num_swap_blocks = count_swap_blocks(config.swap_space_bytes, runner.bytes_per_block)
        runner.allocate_kv_cache(num_kv_blocks, num_swap_blocks)
    with clock.part("graphs"), advice_on_memory():
        if has_graphs:
            table_width = -(-max_model_len // backend.block_size)
            runner.graphs = record_graphs(model, runner.kv_cache.tensor, draw, sizes.max_decodes, table_width)
    logger.info("started in " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in clock.seconds.items()))
    return Startup(runner, num_kv_blocks, num_swap_blocks, description, clock.seconds)


@dataclass(frozen=True)
class StepSizes:
    """How large a step can get."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int

    @property
    def max_decodes(self) -> int:
        return min(self.max_num_seqs, self.max_num_batched_tokens)


class PartsClock:
    """Seconds of the parts of a whole, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 3)


def make_backend(
    config: Config, device: torch.device, dtype: torch.dtype, shape: Qwen3Config
) -> tuple[AttentionBackend, str]:
    """The backend, and a line that says what was chosen and why."""
    choice = (config.attention_backend, device, dtype, shape.head_dim, config.block_size, config.kv_cache_dtype)
    backend_class, reasons = select_backend(*choice)
    block_size = config.block_size or backend_class.default_block_size
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    backend = backend_class(*heads, block_size, dtype, config.kv_cache_dtype)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return backend, f"{reasons}; {backend.instructions} on {device}{threads}, {dtype}, blocks of {block_size}"


def choose_draw(config: Config, device: torch.device) -> Draw:
    """What turns logits into tokens: on CUDA kernels that neither sort nor make the host wait, if triton is there."""
    if device.type == "cuda" and not config.enforce_eager:
        with suppress(ImportError):
            return importlib.import_module("nanovllm.kernels.sample").draw_tokens
    return draw_tokens


def choose_graphs(config: Config, backend: AttentionBackend, draw: Draw, device: torch.device) -> tuple[bool, str]:
    """Whether decodes are replayed from CUDA graphs; and on CUDA, a word about it."""
    reason = None
    if device.type != "cuda":
        reason = f"they need a CUDA device, got {device}"
    elif config.enforce_eager:
        reason = "enforce_eager=True"
    elif not backend.supports_graphs:
        reason = "this attention backend reads lengths back to the host"
    elif draw is draw_tokens:
        reason = "without triton, drawing tokens makes the host wait"
    elif config.enable_cuda_graphs is False:
        reason = "enable_cuda_graphs=False"
    if reason is not None and config.enable_cuda_graphs:
        raise ValueError(
            f"enable_cuda_graphs=True cannot be had ({reason}); leave it None, which takes them where possible"
        )
    if device.type != "cuda":
        return False, ""
    return reason is None, "; with CUDA graphs" if reason is None else f"; no CUDA graphs ({reason})"


@contextmanager
def advice_on_memory() -> Iterator[None]:
    """Say which knob to turn where the GPU's memory does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "the GPU's memory does not suffice to start: lower gpu_memory_utilization (if others use this GPU too), "
            "kv_cache_memory_bytes or num_kv_blocks, max_num_batched_tokens or max_num_seqs; "
            f"{error.__cause__ or error}"
        ) from error


def count_swap_blocks(swap_space_bytes: int, bytes_per_block: int) -> int:
    if 0 < swap_space_bytes < bytes_per_block:
        raise ValueError(f"swap_space_bytes must be >= {bytes_per_block}, one block, got {swap_space_bytes}")
    return swap_space_bytes // bytes_per_block


# ---- how many blocks fit


def num_blocks_that_fit(runner: ModelRunner, config: Config, sizes: StepSizes, has_graphs: bool) -> int:
    """How many blocks sequences get: as told, or as many as memory allows, but no more than they can ever fill."""
    block_size = runner.backend.block_size
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.kv_cache_memory_bytes is not None:
        num_bytes, knob = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif runner.device.type == "cuda":
        num_bytes, knob = measure_free_bytes(runner, config, sizes, has_graphs), "gpu_memory_utilization"
    else:
        num_bytes, knob = CPU_KV_CACHE_BYTES, "kv_cache_memory_bytes"
    num_blocks = num_bytes // runner.bytes_per_block - 1  # one is the null block
    if num_blocks < 1:
        raise ValueError(
            f"{max(num_bytes, 0)} bytes are left for the KV cache, but its least size, two blocks, takes "
            f"{2 * runner.bytes_per_block}: raise {knob}, or lower block_size or max_num_batched_tokens"
        )
    return min(num_blocks, sizes.max_num_seqs * -(-sizes.max_model_len // block_size))


def measure_free_bytes(runner: ModelRunner, config: Config, sizes: StepSizes, has_graphs: bool) -> int:
    """What weights, a forward pass of the largest batch, and CUDA graphs leave of this GPU for the KV cache."""
    device = runner.device
    release_unused_memory()  # of an engine that is gone, which would count as what this one needs
    torch.cuda.reset_peak_memory_stats(device)
    # all of the batch's slots lie in the null block, which the cache of no blocks has too
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
