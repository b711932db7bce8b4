"""The choice of an attention backend for this machine, with the reason.

Called once, by `full_runner.py`, unless the user asks for PyTorch's layers.
"""

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch

from nanovllm.layers.attention import TorchAttention
from nanovllm_extras.kernels.backend import AttentionBackend, KernelBackend
from nanovllm_extras.kernels.cpu.threads import limit_threads
from nanovllm_extras.models.masking import PLAIN, AttentionOptions
from nanovllm_extras.models.network_config import NetworkConfig
from nanovllm_extras.options.all_options import Config

BACKENDS = {  # best first; a module is imported only when `select_backend` tries it
    "flash_attn": "nanovllm_extras.kernels.cuda.flash_backend.FlashAttention",
    "cpu": "nanovllm_extras.kernels.cpu.cpu_attention.CpuAttention",
    "triton": "nanovllm_extras.kernels.cuda.triton_attention.TritonAttention",
    "torch": "nanovllm.layers.attention.TorchAttention",
}
LATENT_BACKENDS = {  # the same for models whose cache holds latents; None has no such attention
    "flash_attn": None,
    "cpu": "nanovllm_extras.kernels.cpu.cpu_latent_attention.CpuLatentAttention",
    "triton": None,
    "torch": "nanovllm_extras.kernels.latent_backend.TorchLatentAttention",
}


def choose(
    config: Config, device: torch.device, dtype: torch.dtype, shape: NetworkConfig
) -> tuple[TorchAttention, str]:
    """Return the attention backend, and a line that says what was chosen and why."""
    if device.type == "cpu":
        limit_threads()
    assert isinstance(config.attention_backend, str)  # a class is not chosen here
    choice = (config.attention_backend, device, dtype, shape.head_dim, config.block_size, config.kv_cache_dtype)
    is_latent = shape.latent_rank is not None
    paths = LATENT_BACKENDS if is_latent else BACKENDS
    options = tuple(dict.fromkeys(shape.attention_options)) or (PLAIN,)
    backend_class, reasons = select_backend(*choice, options, paths)
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    if config.kv_cache_dtype != "auto" and not issubclass(backend_class, KernelBackend):
        backend_class = with_small_cache(backend_class, config.kv_cache_dtype)
    if backend_class is TorchAttention:
        return TorchAttention(*heads, config.block_size), reasons
    latent = {"rank": shape.latent_rank} if is_latent else {}
    make: Callable[..., TorchAttention] = backend_class
    return make(*heads, config.block_size, dtype, config.kv_cache_dtype, **latent), reasons


def choose_all(
    config: Config, device: torch.device, dtype: torch.dtype, shape: NetworkConfig
) -> tuple[tuple[TorchAttention, ...], str]:
    """Return the attention backend of each shape of K and V, with the same block size, and why they were chosen."""
    if not shape.kv_groups:
        backend, reasons = choose(config, device, dtype, shape)
        return (backend,), reasons
    chosen: list[tuple[TorchAttention, str]] = []
    for group in shape.kv_groups:
        of_group = replace(
            shape,
            head_dim=group.head_dim,
            num_key_value_heads=group.num_kv_heads,
            attention_options=(group.options,),
        )
        chosen.append(choose(config, device, dtype, of_group))
        config = replace(config, block_size=chosen[0][0].block_size)
    reasons = " and ".join(dict.fromkeys(reason for _, reason in chosen))
    return tuple([backend for backend, _ in chosen]), reasons


def with_small_cache(backend_class: type[TorchAttention], kv_cache_dtype: str) -> type[AttentionBackend]:
    """Return PyTorch's attention with a cache of 8 bits."""
    base = AttentionBackend if backend_class is TorchAttention else backend_class
    if kv_cache_dtype == "fp8":
        from nanovllm_extras.kernels.fp8_kv import with_fp8_cache

        return with_fp8_cache(base)
    if backend_class is not TorchAttention:
        from nanovllm_extras.kernels.latent_backend import Int8LatentAttention

        return Int8LatentAttention
    from nanovllm_extras.kernels.int8_kv import with_int8_cache

    return with_int8_cache(base)


def select_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int | None = None,
    kv_cache_dtype: str = "auto",
    options: Collection[AttentionOptions] = (),
    paths: Mapping[str, str | None] = BACKENDS,
) -> tuple[type[TorchAttention], str]:
    """Return the backend `name`, or for `auto` the best one here, and a line that says why it was chosen."""
    reasons: list[str] = []
    advice = "take attention_backend='torch'"
    for candidate, path in paths.items():
        if name not in ("auto", candidate):
            continue
        if path is None:
            reasons.append(f"not {candidate}: it has no latent attention")
            continue
        module, _, class_name = path.rpartition(".")
        backend_class: type[TorchAttention] = getattr(importlib.import_module(module), class_name)
        if issubclass(backend_class, KernelBackend):
            reason = why_not(backend_class, device, dtype, head_dim, block_size, kv_cache_dtype, options)
            if name == "auto":
                reason = reason or backend_class.why_slow(device, dtype, kv_cache_dtype)
            elif (
                reason
                and kv_cache_dtype != "auto"
                and not why_not(backend_class, device, dtype, head_dim, block_size, "auto", options)
            ):
                advice += ", or kv_cache_dtype='auto'"
        else:  # PyTorch's attention always runs
            is_slow = name == "auto" and device.type == "cuda" and kv_cache_dtype != "auto"
            reason = "there it is for comparisons, and slow" if is_slow else None
        if reason is None:
            return backend_class, "; ".join([f"attention_backend={candidate}", *reasons])
        reasons.append(f"not {candidate}: {reason}")
    wanted = f"attention_backend={name!r}"
    if kv_cache_dtype != "auto":
        wanted += f" with kv_cache_dtype={kv_cache_dtype!r}"
        advice += ", or kv_cache_dtype='auto'" if name == "auto" else ""
    raise ValueError(f"{wanted} cannot be used ({'; '.join(reasons)}); {advice}")


def why_not(
    backend_class: type[KernelBackend],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int | None,
    kv_cache_dtype: str,
    options: Collection[AttentionOptions],
) -> str | None:
    """Return the first reason against a backend, or None if it can serve the model on this machine."""
    reason = backend_class.why_not(device, dtype, head_dim, block_size)
    reason = reason or backend_class.why_not_any(options, device, dtype, head_dim)
    if kv_cache_dtype != "auto":
        reason = reason or backend_class.why_no_kv_cache(kv_cache_dtype, head_dim)
    return reason
