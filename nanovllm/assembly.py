"""From a configuration to the parts of an engine: a tokenizer, a runner that is ready, a scheduler.

`LLMEngine` calls `assemble` once, when it is made, and `make_scheduler` then and after an interrupt. Kernels, CUDA,
overlap, swap, windows and other policies are extras: each is imported in the branch that chooses it.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanovllm.block_manager import BlockManager
from nanovllm.checkpoint import (
    load_tokenizer,
    read_default_sampling_params,
    read_eos_token_ids,
    read_model_config,
    resolve_model,
)
from nanovllm.checks import MissingExtra, extra, import_extra
from nanovllm.config import Config, resolve_device, resolve_dtype
from nanovllm.kv_cache import KVCache
from nanovllm.layers.backends import AttentionBackend, TorchAttention, pytorch_layers
from nanovllm.model_runner import ModelRunner
from nanovllm.models.config import ModelConfig
from nanovllm.observer import Observer, SchedulingStats
from nanovllm.preemption import Recompute
from nanovllm.queues import Policy, fcfs
from nanovllm.sampler import draw_tokens
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.stats import LapClock
from nanovllm.weights import load_model

logger = logging.getLogger(__name__)

CPU_KV_CACHE_BYTES = 1 << 30  # the default on CPU


@dataclass(frozen=True)
class Parts:
    """What an engine is made of: the config says what was asked for, this record what was found."""

    config: Config
    model_config: ModelConfig
    tokenizer: Any
    eos_token_ids: frozenset[int]
    default_sampling_params: SamplingParams
    max_model_len: int
    max_num_batched_tokens: int
    enable_overlap: bool
    runner: ModelRunner
    description: str  # what computes, and why that was chosen
    startup_seconds: dict[str, float]  # how long each part of the start took, in order

    @property
    def num_kv_blocks(self) -> int:
        return self.runner.kv_cache.tensor.shape[2] - 1  # one is the null block

    @property
    def block_size(self) -> int:
        return self.runner.backend.block_size


def assemble(config: Config) -> Parts:
    """Raises ValueError or TypeError if the model cannot be loaded as the config says."""
    folder = resolve_model(config.model, config.load_format != "dummy", config.revision)
    model_class, shape = read_model_config(folder, config.hf_overrides)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config, folder)
    if config.chat_template is not None:
        with extra("extras/chat_options.py", "chat_template"):
            from nanovllm.extras.chat_options import set_chat_template
        set_chat_template(tokenizer, config.chat_template)
    eos = getattr(tokenizer, "eos_token_id", None)
    eos_token_ids = read_eos_token_ids(folder) | (set() if eos is None else {eos})
    default_sampling_params = read_default_sampling_params(config, folder)  # bad ones show before weights are loaded
    longest = shape.max_position_embeddings
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len must be at most {longest}, the model's max_position_embeddings, got {max_model_len}"
        )
    shape = replace(shape, max_position_embeddings=max_model_len)  # the model need not know longer positions
    is_cuda = resolve_device(config.device).type == "cuda"
    max_num_batched_tokens = config.max_num_batched_tokens or (8192 if is_cuda else 2048)
    can_overlap = is_cuda and config.speculative_config is None
    enable_overlap = can_overlap if config.enable_overlap is None else config.enable_overlap
    clock = LapClock()
    start: Callable[..., tuple[ModelRunner, str]] = start_runner
    if max(config.tensor_parallel_size, config.nnodes, config.node_rank + 1) > 1:
        with extra("parallel", "tensor_parallel_size > 1"):
            from nanovllm.extras.parallel.start_ranks import start_ranks as start
    runner, description = start(config, folder, model_class, shape, max_num_batched_tokens, enable_overlap, clock)
    logger.info("started in " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in clock.seconds.items()))
    return Parts(
        config=config,
        model_config=shape,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(i for i in eos_token_ids if 0 <= i < shape.vocab_size),
        default_sampling_params=default_sampling_params,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_overlap=enable_overlap,
        runner=runner,
        description=description,
        startup_seconds=clock.seconds,
    )


# ---- the runner: what happens once, before the first step


class Device:
    """What a kind of device adds to the start, by default nothing; `extras/cuda/startup.py` has a subclass."""

    note = ""
    """For the log."""
    memory_knob = "kv_cache_memory_bytes"
    """What to raise if memory does not suffice."""

    def prepare(self, runner: ModelRunner) -> None:
        """Before the first forward pass."""

    def advice(self) -> AbstractContextManager[None]:
        """Around what takes memory."""
        return nullcontext()

    def free_bytes(self, runner: ModelRunner) -> int:
        """Left for the KV cache, if the config does not say how much it takes."""
        return CPU_KV_CACHE_BYTES

    def wrap(self, runner: ModelRunner, newest: Any) -> None:
        """Take the place of the runner's `compute`, once the KV cache is there."""


def start_runner(
    config: Config,
    folder: Path,
    model_class: Any,
    shape: ModelConfig,
    max_num_batched_tokens: int,
    has_overlap: bool,
    clock: LapClock,
    load: Callable[..., Any] = load_model,
    adapt: Callable[[Device], Device] = lambda kind: kind,
) -> tuple[ModelRunner, str]:
    """A runner that is ready, and what was chosen, and why.

        choose a backend → load the weights → put fast layers in place → allocate the KV cache → record CUDA graphs

    Raises ValueError if the model, the config and this machine do not go together, or memory does not suffice.
    """
    device, dtype = resolve_device(config.device), resolve_dtype(config.dtype, shape.dtype)
    backend, reasons = choose_backend(config, device, dtype, shape)
    kind = adapt(make_device(config, device, backend, shape, max_num_batched_tokens))
    clock.lap("backend")
    seed = config.seed if config.load_format == "dummy" else None
    if shape.quantization_config is not None or config.load_format == "gguf":
        load = import_extra("quantization/stored", "a quantised checkpoint").loader(shape, config)
    model = load(model_class, shape, backend, dtype, device, folder, seed)
    if config.quantization is not None:
        import_extra("quantization/quantise", "quantization").quantise(model, config.quantization, shape)
    clock.lap("weights")
    if not config.enforce_eager:
        backend.replace_layers(model)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    what = f"{backend.instructions} on {device}{threads}, {dtype}, blocks of {backend.block_size}"
    in_pytorch = ", ".join(sorted(pytorch_layers(model))) or "nothing"
    description = f"{reasons}; {what}, in PyTorch: {in_pytorch}{kind.note}"
    logger.info(description)
    kv_cache = make_kv_cache(config, backend, shape.num_hidden_layers, dtype, device)
    runner = ModelRunner(model, backend, kv_cache, partial(draw_tokens, argmax=backend.argmax))
    kind.prepare(runner)
    clock.lap("layers")
    with kind.advice():
        kv_cache.allocate(num_blocks_that_fit(runner, config, shape.max_position_embeddings, kind))
    clock.lap("memory")
    with kind.advice():
        kind.wrap(runner, read_newest_tokens(runner) if has_overlap else None)
    clock.lap("graphs")
    return runner, description


def num_blocks_that_fit(runner: ModelRunner, config: Config, max_model_len: int, kind: Device) -> int:
    """Blocks for sequences: as configured, or of the free memory no more than running sequences can ever fill."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    num_bytes, knob = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    if num_bytes is None:
        num_bytes, knob = kind.free_bytes(runner), kind.memory_knob
    num_blocks = num_bytes // runner.kv_cache.bytes_per_block - 1  # one is the null block
    if num_blocks < 1:
        raise ValueError(
            f"{max(num_bytes, 0)} bytes are left for the KV cache, but its least size, two blocks, takes "
            f"{2 * runner.kv_cache.bytes_per_block}: raise {knob}, or lower block_size or max_num_batched_tokens"
        )
    if config.kv_cache_memory_bytes is not None:  # the prefix cache may keep more than what runs
        return num_blocks
    return min(num_blocks, config.max_num_seqs * -(-max_model_len // runner.backend.block_size))


def choose_backend(
    config: Config, device: torch.device, dtype: torch.dtype, shape: ModelConfig
) -> tuple[AttentionBackend, str]:
    """The backend, and why. `torch` and eager is PyTorch's attention."""
    is_plain = config.kv_cache_dtype == "auto" and shape.latent_rank is None
    reason = "attention_backend=torch"
    if not (config.attention_backend == "torch" and config.enforce_eager and is_plain):
        try:
            with extra("kernels", f"attention_backend={config.attention_backend!r} for this model"):
                from nanovllm.extras.kernels.choices import choose
            return choose(config, device, dtype, shape)
        except MissingExtra as missing:
            if config.attention_backend not in ("auto", "torch") or not is_plain:
                raise
            reason += f"; {missing}"
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    return TorchAttention(*heads, config.block_size or TorchAttention.default_block_size, dtype), reason


def make_kv_cache(
    config: Config, backend: AttentionBackend, num_layers: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    if not config.swap_space_bytes:
        return KVCache(backend, num_layers, dtype, device)
    with extra("extras/swap", "preemption_mode='swap'"):
        from nanovllm.extras.swap.host_blocks import SwappingKVCache
    return SwappingKVCache(backend, num_layers, dtype, device, config.swap_space_bytes)


def make_device(
    config: Config, device: torch.device, backend: AttentionBackend, shape: ModelConfig, max_num_batched_tokens: int
) -> Device:
    """CUDA brings more along. Elsewhere it refuses `enable_cuda_graphs=True`."""
    if device.type != "cuda" and not config.enable_cuda_graphs:
        return Device()
    with extra("extras/cuda", "CUDA"):
        from nanovllm.extras.cuda.startup import CudaDevice
    return CudaDevice(config, device, backend, shape, max_num_batched_tokens)


def read_newest_tokens(runner: ModelRunner) -> Any:
    """Let the runner take tokens that the host does not know yet from the step before."""
    with extra("extras/overlap.py", "enable_overlap"):
        from nanovllm.extras.overlap import NewestTokens
    return NewestTokens(runner)


# ---- scheduling


def make_scheduler(
    parts: Parts, observer: Observer, launch: Callable[[Any], Any]
) -> tuple[Scheduler, Callable[[Any], Any]]:
    """An empty scheduler over an empty block manager; and how the engine gets the step that it waits for.

    That is by its own `launch`, or from one that is a step ahead.
    """
    config, blocks = parts.config, make_block_manager(parts, observer)
    observer.on_start(blocks)
    arguments = (
        blocks,
        config.max_num_seqs,
        parts.max_num_batched_tokens,
        parts.max_model_len,
        choose_policy(config),
        config.long_prefill_token_threshold,
        make_preemption(parts, blocks),
    )
    if config.speculative_config is not None:
        with extra("extras/speculation", "speculative_config"):
            from nanovllm.extras.speculation.start_speculation import make_speculation
        return make_speculation(parts, arguments, launch)
    if not parts.enable_overlap:
        return Scheduler(*arguments), launch
    with extra("extras/overlap.py", "enable_overlap"):
        from nanovllm.extras.overlap import Ahead, OverlappedScheduler
    scheduler = OverlappedScheduler(*arguments)
    return scheduler, Ahead(launch, scheduler)


def watched_by(observer: Observer) -> SchedulingStats:
    """The engine's statistics, which tell `observer` what they see."""
    with extra("extras/watching.py", "an observer"):
        from nanovllm.extras.watching import Watching
    return Watching(observer)


def make_block_manager(parts: Parts, observer: Observer) -> BlockManager:
    arguments = (parts.num_kv_blocks, parts.block_size, parts.config.enable_prefix_caching, observer)
    window = parts.model_config.widest_window
    if window is None:
        return BlockManager(*arguments)
    with extra("extras/window_blocks.py", "a model whose layers all have a sliding window"):
        from nanovllm.extras.window_blocks import WindowBlockManager
    max_chunk_len = parts.config.long_prefill_token_threshold or parts.max_num_batched_tokens
    return WindowBlockManager(*arguments, window=window, max_chunk_len=max_chunk_len)


def choose_policy(config: Config) -> Policy:
    policy = config.scheduling_policy
    if callable(policy):
        return policy
    if policy == "fcfs":
        return fcfs
    with extra("extras/policies.py", f"scheduling_policy={policy!r}"):
        from nanovllm.extras.policies import POLICIES
    return POLICIES[policy]


def make_preemption(parts: Parts, blocks: BlockManager) -> Recompute:
    if parts.config.preemption_mode == "recompute":
        return Recompute(blocks)
    with extra("extras/swap", "preemption_mode='swap'"):
        from nanovllm.extras.swap.host_blocks import make_swap
    return make_swap(parts.runner.kv_cache, blocks)
