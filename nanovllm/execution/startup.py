"""From a configuration to a model that is ready to run: what happens once, before the first step.

    choose a backend → load the weights → put fast layers in place → size and allocate the KV cache → record CUDA graphs

Called by `engine/assembly.py`, which has read the model's folder before, and makes the scheduler afterwards. Kernels,
CUDA, swap and overlap are extras: each is imported in the branch that chooses it.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanovllm.checks import MissingExtra, extra
from nanovllm.config import Config, resolve_device, resolve_dtype
from nanovllm.execution.kv_cache import KVCache
from nanovllm.execution.model_runner import ModelRunner
from nanovllm.execution.sampler import draw_tokens
from nanovllm.execution.weights import load_model
from nanovllm.layers.backends import AttentionBackend, pytorch_layers
from nanovllm.layers.torch_attention import TorchAttention
from nanovllm.models.config import ModelConfig

logger = logging.getLogger(__name__)


CPU_KV_CACHE_BYTES = 1 << 30  # the default on CPU


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
    lap: Callable[[str], None],
) -> tuple[ModelRunner, str]:
    """A runner that is ready, and what was chosen, and why. `lap` is told the name of each part that is done.

    Raises ValueError if the model, the config and this machine do not go together, or memory does not suffice.
    """
    device, dtype = resolve_device(config.device), resolve_dtype(config.dtype, shape.dtype)
    backend, reasons = choose_backend(config, device, dtype, shape)
    kind = make_device(config, device, backend, shape, max_num_batched_tokens)
    lap("backend")
    seed = config.seed if config.load_format == "dummy" else None
    model = load_model(model_class, shape, backend, dtype, device, folder, seed)
    lap("weights")
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
    lap("layers")
    with kind.advice():
        kv_cache.allocate(num_blocks_that_fit(runner, config, shape.max_position_embeddings, kind))
    lap("memory")
    with kind.advice():
        kind.wrap(runner, read_newest_tokens(runner) if has_overlap else None)
    lap("graphs")
    return runner, description


def num_blocks_that_fit(runner: ModelRunner, config: Config, max_model_len: int, kind: Device) -> int:
    """Blocks for sequences: as configured, or as many as memory allows, but no more than sequences can ever fill."""
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
    return min(num_blocks, config.max_num_seqs * -(-max_model_len // runner.backend.block_size))


# ---- where extras are chosen


def choose_backend(
    config: Config, device: torch.device, dtype: torch.dtype, shape: ModelConfig
) -> tuple[AttentionBackend, str]:
    """The backend, and why. `torch` and eager is PyTorch's attention."""
    is_plain = config.kv_cache_dtype == "auto" and shape.latent_rank is None
    reason = "attention_backend=torch"
    if not (config.attention_backend == "torch" and config.enforce_eager and is_plain):
        try:
            with extra("kernels", f"attention_backend={config.attention_backend!r} for this model"):
                from nanovllm.kernels.choices import choose
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
    config: Config,
    device: torch.device,
    backend: AttentionBackend,
    shape: ModelConfig,
    max_num_batched_tokens: int,
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
