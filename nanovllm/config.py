"""Every option of the engine, frozen and checked once.

Decides what a user may set and which values are legal. What is found out later (the number of KV blocks that fit, the
end-of-sequence ids) is a constructor argument of the class that needs it. Made by `LLM`, or by a user of `LLMEngine`;
read by `assembly.py` and `startup.py`.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from nanovllm.checks import check_bool, check_choice, check_dict, check_int, check_number, check_str, translate_options

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION_BACKENDS = ("auto", "torch", "flash_attn", "triton", "cpu")
KV_CACHE_DTYPES = ("auto", "fp8")
SCHEDULING_POLICIES = ("fcfs", "priority", "sjf")
LOAD_FORMATS = ("auto", "safetensors", "dummy")


@dataclass(frozen=True)
class Config:
    """What `LLM(...)` and `LLMEngine(Config(...))` take.

    A bad value raises a TypeError or ValueError that names the field, the value and what is allowed.
    """

    model: str | Path
    """A local folder in Hugging Face's layout, or a hub id such as `Qwen/Qwen3-0.6B`."""
    dtype: str | torch.dtype = "auto"
    """Of weights, activations and KV cache: float32, bfloat16, float16; `auto` is the checkpoint's own."""
    device: str = "auto"
    """`cpu`, `cuda` or `cuda:1`; `auto` is CUDA where there is one."""
    max_model_len: int | None = None
    """Prompt and output of one request together, in tokens; None is the model's own limit."""
    max_num_seqs: int = 256
    """Sequences that run at the same time."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step: longer prompts are prefilled in chunks. None is 8192 on CUDA and 2048 on CPU, where
    larger steps fall out of its caches."""
    block_size: int | None = None
    """Tokens in a block of the KV cache; None is the attention backend's default."""
    num_kv_blocks: int | None = None
    """Blocks that sequences can own; None sizes the cache by memory."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache; None is 1 GiB on CPU, and on CUDA what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights, activations, CUDA graphs and KV cache together."""
    enable_prefix_caching: bool = True
    """Whether prompts that begin alike share their KV blocks."""
    attention_backend: str = "auto"
    """`torch`, `flash_attn`, `triton` or `cpu`; `auto` is the fastest that this machine has."""
    kv_cache_dtype: str = "auto"
    """`fp8` stores K and V in 8 bits, for twice the tokens (with `triton` or `torch`); `auto` is the model's dtype."""
    scheduling_policy: str | Callable[[Any], float] = "fcfs"
    """`fcfs`, `priority` or `sjf`, or a function of your own: see `scheduling/queues.py`."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one sequence in a step, so that short prompts get past a long one; 0 sets no limit."""
    preemption_mode: str = "recompute"
    """What becomes of a preempted sequence's K and V: `recompute`, or `swap` to host memory while there is room."""
    swap_space_bytes: int = 0
    """Host memory for `preemption_mode="swap"`."""
    enforce_eager: bool = False
    """Run all layers but attention by their definition in PyTorch, without fast twins and without CUDA graphs."""
    enable_cuda_graphs: bool | None = None
    """Whether decode steps are replayed from CUDA graphs; None replays them wherever possible."""
    enable_overlap: bool | None = None
    """Whether the next step is launched while one is in flight; None means only on CUDA. Outputs are the same."""
    load_format: str = "auto"
    """`safetensors` (the same as `auto`), or `dummy` for seeded random weights, which need only config.json."""
    seed: int = 0
    """Seed of sampling and of dummy weights."""
    revision: str | None = None
    """Branch, tag or commit of `model` on the hub; a folder is taken as it is."""
    hf_overrides: Mapping[str, Any] | None = None
    """Fields of config.json that are to have other values."""
    tokenizer: str | Path | None = None
    """Folder or hub id of another tokenizer than the model's own."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of `tokenizer` on the hub; None is `revision`."""
    skip_tokenizer_init: bool = False
    """Whether to go without a tokenizer: prompts and outputs are token ids, without text."""
    chat_template: str | Path | None = None
    """Another chat template than the tokenizer's own: a file, or the template itself."""
    generation_config: str | Path = "auto"
    """Where the default sampling parameters come from: `auto` is the model's generation_config.json, `vllm` are those
    of `SamplingParams`, else a folder that holds a generation_config.json."""
    override_generation_config: Mapping[str, Any] | None = None
    """Fields of generation_config.json that are to have other values."""

    def __post_init__(self) -> None:
        check_str("model", self.model, or_path=True)
        if not isinstance(self.dtype, torch.dtype):
            check_choice("dtype", self.dtype, ("auto", *DTYPES))
        elif self.dtype not in DTYPES.values():
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        if not isinstance(self.device, str):
            raise TypeError(f"device must be a str such as auto, cpu, cuda or cuda:1, got {self.device!r}")
        check_int("max_model_len", self.max_model_len, 2, optional=True)  # one token in, one out
        check_int("max_num_seqs", self.max_num_seqs, 1)
        for name in ("max_num_batched_tokens", "block_size", "num_kv_blocks", "kv_cache_memory_bytes"):
            check_int(name, getattr(self, name), 1, optional=True)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, open_low=True)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if not callable(self.scheduling_policy):
            check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        check_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        check_choice("preemption_mode", self.preemption_mode, ("recompute", "swap"))
        check_int("swap_space_bytes", self.swap_space_bytes, 0)
        if (self.preemption_mode == "swap") != (self.swap_space_bytes > 0):
            raise ValueError(
                f"preemption_mode='swap' and swap_space_bytes > 0 go together, "
                f"got {self.preemption_mode!r} and {self.swap_space_bytes}"
            )
        check_bool("enforce_eager", self.enforce_eager)
        for name in ("enable_cuda_graphs", "enable_overlap"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_int("seed", self.seed, 0, maximum=2**64 - 1)
        self._check_files()

    def _check_files(self) -> None:
        check_bool("skip_tokenizer_init", self.skip_tokenizer_init)
        for name in ("revision", "tokenizer_revision"):
            check_str(name, getattr(self, name), optional=True)
        for name in ("tokenizer", "chat_template", "generation_config"):
            check_str(name, getattr(self, name), optional=name != "generation_config", or_path=True)
        for name in ("hf_overrides", "override_generation_config"):
            check_dict(name, getattr(self, name))

    @classmethod
    def from_options(cls, model: str | Path, options: dict[str, Any]) -> "Config":
        """`Config(model, **options)`, where names and values may be vLLM's, too: `extras/vllm/options.py`.

        An unknown name raises a TypeError that lists the legal ones.
        """
        with suppress(TypeError, ValueError):
            return cls(model, **options)
        return cls(model, **translate_options(options, [field.name for field in fields(cls)], "engine"))


def resolve_device(device: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` to a device that this machine has."""
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


def resolve_dtype(dtype: str | torch.dtype, checkpoint_dtype: str) -> torch.dtype:
    """`auto` is the dtype that config.json names."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = checkpoint_dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ValueError(f"config.json names the dtype {name!r}; give dtype= one of {', '.join(DTYPES)}")
    return DTYPES[name]
