"""Attention backends and networks of other packages, found by entry points as in vLLM.

A package registers classes in its pyproject.toml, and they are imported only when they are needed:

    [project.entry-points."nanovllm.backends"]
    cpu = "nanovllm_extras.plugins.backends:CpuBackend"

    [project.entry-points."nanovllm.models"]
    LlamaForCausalLM = "nanovllm_extras.plugins.networks:NETWORKS"

`nanovllm_extras`, which is installed with this package, registers kernels in C and in Triton and 19
architectures. A backend has the methods of `TorchAttention`, a network those of `Qwen3ForCausalLM`.
"""

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from nanovllm.extension import load_object
from nanovllm.layers.attention import TorchAttention
from nanovllm.layers.flash_attention import FlashAttention
from nanovllm.models.qwen3 import Qwen3ForCausalLM

logger = logging.getLogger(__name__)

OWN_BACKENDS = {"flash_attn": FlashAttention, "torch": TorchAttention}
OWN_NETWORKS = {"Qwen3ForCausalLM": Qwen3ForCausalLM}
"""The name in `architectures` of config.json -> the class of the network."""


def find_plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of `group`, `backends` or `models`, by name."""
    return {one.name: one for one in entry_points(group=f"nanovllm.{group}")}


def is_missing(plugin: EntryPoint, error: Exception) -> bool:
    """Return whether `error` says that the plug-in's own package is not installed: its metadata is out of date."""
    package = plugin.value.partition(":")[0].partition(".")[0]
    return isinstance(error, ModuleNotFoundError) and error.name == package


# ---- backends


def choose_backends(
    name: str | type[TorchAttention], device: torch.device, dtype: torch.dtype, shape: Any, block_size: int | None
) -> tuple[list[type[TorchAttention]], list[str]]:
    """Return the backends that can compute this network here, best first, and the reasons against the others.

    name: `auto`, a name of `OWN_BACKENDS`, a registered name, "module:Class", or the class itself
    shape: the network's `ModelConfig`
    Raises ValueError if there is none.
    """
    reasons: list[str] = []
    usable = []
    for label, kind in find_backends(name, reasons):
        why_not = kind.why_not(device, dtype, shape.head_dim, block_size) or shape.why_not(kind, device, dtype)
        if why_not is None:
            usable.append(kind)
        else:
            reasons.append(f"not {label}: {why_not}")
    if not usable:
        raise ValueError(f"attention_backend={name!r} cannot be used ({'; '.join(reasons)}); take 'torch' or 'auto'")
    return usable, reasons


def find_backends(name: str | type[TorchAttention], reasons: list[str]) -> Iterator[tuple[str, type[TorchAttention]]]:
    """Yield the backends that `name` may mean, with their names. ValueError if it means none.

    `auto` means flash-attn, then the plug-ins by their `priority`, then PyTorch. A plug-in that cannot be imported is
    added to `reasons`.
    """
    if isinstance(name, type):
        yield name.__name__, name
    elif name in OWN_BACKENDS:
        yield name, OWN_BACKENDS[name]
    elif name == "auto":
        yield "flash_attn", FlashAttention
        yield from sorted(load_plugins(reasons), key=lambda found: -found[1].priority)
        yield "torch", TorchAttention
    else:
        yield name, load_backend(name)


def load_plugins(reasons: list[str]) -> Iterator[tuple[str, type[TorchAttention]]]:
    """Yield all registered backends that can be imported."""
    for name, plugin in find_plugins("backends").items():
        try:
            yield name, plugin.load()
        except Exception as error:  # a broken package raises any kind
            if is_missing(plugin, error):
                logger.debug("the attention backend %s is registered, but not installed: %s", name, error)
                continue
            logger.warning("the attention backend %s cannot be imported: %s: %s", name, type(error).__name__, error)
            reasons.append(f"not {name}: it cannot be imported ({type(error).__name__}: {error})")


def load_backend(name: str) -> type[TorchAttention]:
    """Import the backend that a registered name or "module:Class" names. ValueError if that is not possible."""
    plugins = find_plugins("backends")
    if name not in plugins and ":" not in name and "." not in name:
        allowed = ", ".join(["auto", *OWN_BACKENDS, *sorted(plugins)])
        raise ValueError(f"attention_backend must be one of {allowed}, or 'module:Class', got {name!r}")
    load = plugins[name].load if name in plugins else partial(load_object, name)
    try:
        return load()
    except Exception as error:  # as above
        message = f"attention_backend={name!r} cannot be imported ({type(error).__name__}: {error})"
        raise ValueError(f"{message}; take 'torch' or 'auto'") from error


# ---- networks


def find_architecture(raw: Mapping[str, Any], models: Mapping[str, Any] | None = None) -> Any:
    """Return the class of the network that `raw`, the content of config.json, describes.

    models: networks of one's own, by their names in `architectures`
    Raises ValueError if it is none of `OWN_NETWORKS` and no package registers it, and what the import of one raises.
    """
    own = {**OWN_NETWORKS, **(models or {})}
    for name in raw.get("architectures") or ():
        if name in own:
            return own[name]
        if plugin := find_plugins("models").get(name):
            try:
                return plugin.load()
            except ModuleNotFoundError as error:
                if not is_missing(plugin, error):
                    raise
                logger.debug("the architecture %s is registered, but not installed: %s", name, error)
    known = ", ".join(sorted({*own, *find_plugins("models")}))
    raise ValueError(
        f"architectures must name one of {known}, got {raw.get('architectures')}; "
        f"nanovllm_extras.LLM serves more models"
    )
