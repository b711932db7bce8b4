"""From a configuration to the parts of an engine: a model folder, a runner that is ready, a scheduler, limits.

`LLMEngine` calls `assemble` once, when it is made, and `make_scheduler` then and after an interrupt.
`execution/startup.py` does the part that takes time. Overlap, swap and windows are extras: each is imported in the
branch that chooses it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.checks import extra
from nanovllm.config import Config, resolve_device
from nanovllm.engine.detokenizer import TokenDecoder
from nanovllm.engine.input_processor import InputProcessor, Limits
from nanovllm.execution.checkpoint import (
    load_tokenizer,
    read_default_sampling_params,
    read_eos_token_ids,
    read_model_config,
    resolve_model,
)
from nanovllm.execution.model_runner import ModelRunner
from nanovllm.execution.startup import Startup, StepSizes, start_runner
from nanovllm.models.config import ModelConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.block_manager import BlockManager
from nanovllm.scheduling.observer import Observer, SchedulingStats
from nanovllm.scheduling.preemption import Recompute
from nanovllm.scheduling.queues import POLICIES
from nanovllm.scheduling.scheduler import Scheduler


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
    startup: Startup

    @property
    def runner(self) -> ModelRunner:
        return self.startup.runner

    @property
    def num_kv_blocks(self) -> int:
        return self.startup.num_kv_blocks

    @property
    def block_size(self) -> int:
        return self.startup.runner.backend.block_size


def assemble(config: Config) -> Parts:
    """Raises ValueError or TypeError if the model cannot be loaded as the config says."""
    folder = resolve_model(config.model, config.load_format != "dummy", config.revision)
    model_class, shape = read_model_config(folder, config.hf_overrides)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(tokenizer_folder(config, folder))
    if config.chat_template is not None:
        with extra("extras/chat_options.py", "chat_template"):
            from nanovllm.extras.chat_options import set_chat_template
        set_chat_template(tokenizer, config.chat_template)
    eos_token_ids = read_eos_token_ids(folder) | tokenizer_eos(tokenizer)
    default_sampling_params = read_default_sampling_params(config, folder)  # bad ones show before weights are loaded
    max_model_len = limit_model_len(config.max_model_len, shape.max_position_embeddings)
    shape = replace(shape, max_position_embeddings=max_model_len)  # the model need not know longer positions
    is_cuda = resolve_device(config.device).type == "cuda"
    max_num_batched_tokens = config.max_num_batched_tokens or (8192 if is_cuda else 2048)
    enable_overlap = is_cuda if config.enable_overlap is None else config.enable_overlap
    sizes = StepSizes(max_num_batched_tokens, config.max_num_seqs, max_model_len)
    return Parts(
        config=config,
        model_config=shape,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(i for i in eos_token_ids if 0 <= i < shape.vocab_size),
        default_sampling_params=default_sampling_params,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_overlap=enable_overlap,
        startup=start_runner(config, folder, model_class, shape, sizes, enable_overlap),
    )


def make_input_processor(parts: Parts, capacity: int) -> InputProcessor:
    """`capacity`: tokens that one sequence can have in the cache when no other has any."""
    limits = Limits(
        vocab_size=parts.model_config.vocab_size,
        max_model_len=parts.max_model_len,
        max_num_seqs=parts.config.max_num_seqs,
        num_kv_blocks=parts.num_kv_blocks,
        block_size=parts.block_size,
        capacity=capacity,
        num_eos_tokens=len(parts.eos_token_ids),
        has_tokenizer=parts.tokenizer is not None,
    )
    decoder = None if parts.tokenizer is None else TokenDecoder(parts.tokenizer)
    return InputProcessor(
        limits, parts.tokenizer, decoder, parts.eos_token_ids, parts.default_sampling_params, parts.config.seed
    )


def tokenizer_folder(config: Config, model_folder: Path) -> Path:
    if config.tokenizer is None:
        return model_folder
    with extra("extras/checkpoint_options.py", "tokenizer"):
        from nanovllm.extras.checkpoint_options import find_tokenizer
    return find_tokenizer(config, config.tokenizer)


def limit_model_len(wanted: int | None, model_limit: int) -> int:
    if wanted is None:
        return model_limit
    if wanted > model_limit:
        raise ValueError(
            f"max_model_len must be at most the model's max_position_embeddings {model_limit}, got {wanted}"
        )
    return wanted


def tokenizer_eos(tokenizer: Any) -> frozenset[int]:
    eos = getattr(tokenizer, "eos_token_id", None)
    return frozenset() if eos is None else frozenset([eos])


# ---- scheduling: where extras are chosen


def make_scheduler(
    parts: Parts, observer: Observer, launch: Callable[[Any], Any]
) -> tuple[Scheduler, Callable[[Any], Any]]:
    """An empty scheduler over an empty block manager; and how the engine gets the step that it waits for.

    That is by its own `launch`, or from one that is a step ahead.
    """
    config, blocks = parts.config, make_block_manager(parts, observer)
    observer.on_start(blocks)
    policy = config.scheduling_policy
    arguments = (
        blocks,
        config.max_num_seqs,
        parts.max_num_batched_tokens,
        parts.max_model_len,
        policy if callable(policy) else POLICIES[policy],
        config.long_prefill_token_threshold,
        make_preemption(parts, blocks),
    )
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
    with extra("extras/windows.py", "a model whose layers all have a sliding window"):
        from nanovllm.extras.windows import WindowBlockManager
    max_chunk_len = parts.config.long_prefill_token_threshold or parts.max_num_batched_tokens
    return WindowBlockManager(*arguments, window=window, max_chunk_len=max_chunk_len)


def make_preemption(parts: Parts, blocks: BlockManager) -> Recompute:
    if parts.config.preemption_mode == "recompute":
        return Recompute(blocks)
    with extra("extras/swap", "preemption_mode='swap'"):
        from nanovllm.extras.swap.host_blocks import SwappingKVCache
        from nanovllm.extras.swap.space import Swap, SwapSpace
    kv_cache = parts.runner.kv_cache
    assert isinstance(kv_cache, SwappingKVCache)
    return Swap(blocks, SwapSpace(kv_cache.num_swap_blocks, parts.block_size))
