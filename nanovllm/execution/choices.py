"""What computes on this machine: the attention backend, how tokens are drawn, and whether CUDA graphs replay decodes.

Each choice is made once, at start-up, and comes with its reason. Called by `startup.py`.
"""

import importlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.execution.greedy import draw_greedily_by
from nanovllm.execution.sampler import Draw, draw_tokens
from nanovllm.layers.backends import AttentionBackend
from nanovllm.layers.masking import AttentionOptions
from nanovllm.models.config import ModelConfig

BACKENDS = {  # best first; a module is imported only when `select_backend` tries it
    "flash_attn": "nanovllm.kernels.cuda.flash_attention.FlashAttention",
    "cpu": "nanovllm.kernels.cpu.attention.CpuAttention",
    "triton": "nanovllm.kernels.cuda.triton_attention.TritonAttention",
    "torch": "nanovllm.layers.backends.TorchAttention",
}
LATENT_BACKENDS = {  # the same for models whose cache holds latents; None has no such attention
    "flash_attn": None,
    "cpu": "nanovllm.kernels.cpu.latent_attention.CpuLatentAttention",
    "triton": None,
    "torch": "nanovllm.layers.latent_attention.TorchLatentAttention",
}


def make_backend(
    config: Config, device: torch.device, dtype: torch.dtype, shape: ModelConfig
) -> tuple[AttentionBackend, str]:
    """The backend, and a line that says what was chosen and why."""
    choice = (config.attention_backend, device, dtype, shape.head_dim, config.block_size, config.kv_cache_dtype)
    is_latent = shape.latent_rank is not None
    paths = LATENT_BACKENDS if is_latent else BACKENDS
    backend_class, reasons = select_backend(*choice, shape.attention_options(), paths)
    block_size = config.block_size or backend_class.default_block_size
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    latent: dict[str, Any] = {"rank": shape.latent_rank} if is_latent else {}
    backend = backend_class(*heads, block_size, dtype, config.kv_cache_dtype, **latent)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return backend, f"{reasons}; {backend.instructions} on {device}{threads}, {dtype}, blocks of {block_size}"


def choose_draw(config: Config, device: torch.device, backend: AttentionBackend) -> Draw:
    """The function that draws tokens: on CUDA, with triton, kernels that neither sort nor make the host wait.

    On CPU, greedy steps take the backend's argmax."""
    if config.enforce_eager:
        return draw_tokens
    if device.type == "cuda":
        with suppress(ImportError):
            return importlib.import_module("nanovllm.kernels.cuda.sample").draw_tokens
        return draw_tokens
    return draw_greedily_by(backend.argmax)


def choose_graphs(
    config: Config, backend: AttentionBackend, draw: Draw, device: torch.device, num_experts: int = 0
) -> tuple[bool, str]:
    """Whether decodes are replayed from CUDA graphs; and on CUDA the reason, for the log."""
    reason = None
    if device.type != "cuda":
        reason = f"they need a CUDA device, got {device}"
    elif config.enforce_eager:
        reason = "enforce_eager=True"
    elif not backend.supports_graphs:
        reason = "this attention backend reads lengths back to the host"
    elif num_experts:
        reason = "tokens are grouped by expert on the host"
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


def select_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int | None = None,
    kv_cache_dtype: str = "auto",
    options: Collection[AttentionOptions] = (),
    paths: Mapping[str, str | None] = BACKENDS,
) -> tuple[type[AttentionBackend], str]:
    """The backend called `name`, or for `auto` the best that runs here; and a line that says why it was chosen."""
    reasons: list[str] = []
    for candidate, path in paths.items():
        if name not in ("auto", candidate):
            continue
        if path is None:
            reasons.append(f"not {candidate}: it has no latent attention")
            continue
        module, _, class_name = path.rpartition(".")
        backend_class: type[AttentionBackend] = getattr(importlib.import_module(module), class_name)
        reason = backend_class.why_not(device, dtype, head_dim, block_size)
        for one in options:
            reason = reason or backend_class.why_not_options(one, device, dtype, head_dim)
        if kv_cache_dtype == "fp8":
            reason = reason or backend_class.why_no_fp8_kv_cache()
        if name == "auto":
            reason = reason or backend_class.why_slow(device, dtype, kv_cache_dtype)
        if reason is None:
            return backend_class, "; ".join([f"attention_backend={candidate}", *reasons])
        reasons.append(f"not {candidate}: {reason}")
    wanted, advice = f"attention_backend={name!r}", "take attention_backend='torch'"
    if kv_cache_dtype == "fp8":
        wanted, advice = f"{wanted} with kv_cache_dtype='fp8'", f"{advice}, or kv_cache_dtype='auto'"
    raise ValueError(f"{wanted} cannot be used ({'; '.join(reasons)}); {advice}")
