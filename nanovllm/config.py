"""The options of the engine, frozen and checked once.

Values that are only known at start-up (the number of KV blocks that fit, the end-of-sequence ids) are not options: they
are arguments of the classes that need them.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from nanovllm.checks import (
    check_backend,
    check_bool,
    check_callable,
    check_choice,
    check_class,
    check_classes,
    check_int,
    check_mapping,
    check_number,
    check_str,
    checked,
    checks_of,
)
from nanovllm.extension import find_parts

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Config:
    """Options of `LLM(...)` and `LLMEngine(Config(...))`.

    A bad value raises a TypeError or ValueError that names the field, the value and what is allowed.
    """

    model: str | Path
    """A folder in Hugging Face's layout."""
    dtype: str | torch.dtype = checked("auto", check_choice, allowed=("auto", *DTYPES, *DTYPES.values()))
    """Of weights, activations and KV cache: float32, bfloat16 or float16. `auto` is the checkpoint's own."""
    device: str = checked("auto", check_str)
    """`cpu`, `cuda` or `cuda:1`. `auto` is CUDA if there is a CUDA device."""
    max_model_len: int | None = checked(None, check_int, minimum=2, optional=True)
    """Prompt and output of one request together, in tokens. None is the model's own limit."""
    max_num_seqs: int = checked(256, check_int, minimum=1)
    """Sequences that run at the same time."""
    max_num_batched_tokens: int | None = checked(None, check_int, minimum=1, optional=True)
    """Token budget of one step. Longer prompts are prefilled in chunks. None is 8192 on CUDA, and 2048 on CPU, where
    larger steps do not fit in the processor's caches."""
    block_size: int | None = checked(None, check_int, minimum=1, optional=True)
    """Tokens in a block of the KV cache. None is the attention backend's default."""
    num_kv_blocks: int | None = checked(None, check_int, minimum=1, optional=True)
    """Blocks that sequences can own. None is 1 GiB on CPU, and on CUDA what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = checked(0.9, check_number, low=0, high=1, open_low=True)
    """Share of the GPU's memory for weights, activations, CUDA graphs and KV cache together."""
    enable_prefix_caching: bool = checked(True, check_bool)
    """Whether prompts that begin alike share their KV blocks."""
    attention_backend: Any = checked("auto", check_backend)
    """`torch`, `flash_attn`, a name that another package registers (`plugins.py`), a class or "module:Class". `auto` is
    flash-attn if this machine can run it, otherwise the best plug-in, otherwise PyTorch."""
    enforce_eager: bool = checked(False, check_bool)
    """Whether to run decodes on CUDA kernel by kernel instead of replaying CUDA graphs, and to keep PyTorch's layers
    even if a plug-in has faster ones."""
    load_format: str = checked("auto", check_choice, allowed=("auto", "safetensors", "dummy"))
    """`safetensors` (the same as `auto`), or `dummy` for random weights, which need only config.json."""
    seed: int = checked(0, check_int, minimum=0, maximum=2**64 - 1)
    """Seed of the requests that have none of their own."""

    # ---- parts of one's own: classes, or their names as "module:Class" (docs/extending.md)
    extension: str | Path | None = checked(None, check_str, or_path=True, optional=True)
    """A Python file, or the name of a module, whose top-level names are the options below (`extension.py`)."""
    scheduler_cls: Any = checked(None, check_class)
    """A subclass of `Scheduler`."""
    block_manager_cls: Any = checked(None, check_class)
    """A subclass of `BlockManager`."""
    prefix_cache_cls: Any = checked(None, check_class)
    """A subclass of `PrefixCache`."""
    runner_cls: Any = checked(None, check_class)
    """A subclass of `ModelRunner`."""
    sampler_cls: Any = checked(None, check_callable)
    """A function that replaces `sample_tokens`."""
    models: Mapping[str, Any] | None = checked(None, check_mapping)
    """Names in `architectures` of config.json, and the classes of their networks (docs/adding_a_model.md)."""
    extra_args: Mapping[str, type] | None = checked(None, check_classes)
    """The fields that `SamplingParams.extra_args` may have, and the class of each."""

    def __post_init__(self) -> None:
        check_str("model", self.model, or_path=True)
        self.take_parts()
        for name, check in checks_of(self).items():
            check(name, getattr(self, name))

    def take_parts(self) -> None:
        """Set the options for parts of one's own to those that the extension names, and to classes instead of names."""
        check_str("extension", self.extension, or_path=True, optional=True)
        for name, part in find_parts(self.given_parts(), self.extension).items():
            if part is not None:
                object.__setattr__(self, name, part)

    def given_parts(self) -> dict[str, Any]:
        """Return the options for parts of one's own, None for those that are not given."""
        names = [one.name for one in fields(self) if one.name.endswith("_cls")]
        names += ["attention_backend", "models", "extra_args"]
        given = {name: getattr(self, name) for name in names}
        if given["attention_backend"] == "auto":
            given["attention_backend"] = None
        return given


def resolve_device(device: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda` or `cuda:N` names. ValueError if this machine does not have it."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return torch.device("cuda" if num_gpus else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if resolved.type == "cuda" and (resolved.index or 0) >= num_gpus:
        raise ValueError(f"device {device!r} is not on this machine: it has {num_gpus} CUDA devices")
    return resolved


def resolve_dtype(dtype: str | torch.dtype, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype that the option `dtype` names; `auto` is `checkpoint_dtype`, from config.json.

    GPUs before Ampere (T4, RTX 20) only emulate bfloat16, so there `auto` is float16 instead.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    name = checkpoint_dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ValueError(f"config.json names the dtype {name!r}; give dtype= one of {', '.join(DTYPES)}")
    if dtype == "auto" and name == "bfloat16" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            logger.info("dtype='auto' is float16: a GPU of compute capability %d.%d has no bfloat16", *capability)
            return torch.float16
    return DTYPES[name]
