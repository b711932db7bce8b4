"""From a configuration to the parts of an engine: model folder, tokenizer, limits, a runner that is ready, a scheduler.

`LLMEngine` calls `assemble` once, when it is made, and `make_scheduler` then and after an interrupt.
`execution/startup.py` does the part that takes time.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.config import Config, resolve_device
from nanovllm.engine.chat import set_chat_template
from nanovllm.engine.detokenizer import TokenDecoder
from nanovllm.engine.intake import Intake
from nanovllm.engine.limits import Limits
from nanovllm.execution.grammar_compiler import GrammarCompiler
from nanovllm.execution.loader import (
    load_tokenizer,
    read_default_sampling_params,
    read_eos_token_ids,
    read_model_config,
    resolve_model,
    resolve_tokenizer,
)
from nanovllm.execution.startup import Startup, start_runner
from nanovllm.models.config import ModelConfig
from nanovllm.scheduling.observer import Observer
from nanovllm.scheduling.policies import POLICIES
from nanovllm.scheduling.preemption import Recompute
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.swap import Swap, SwapSpace
from nanovllm.scheduling.windows import capacity, make_block_manager


@dataclass(frozen=True)
class Parts:
    """What an engine is made of: the config says what was asked for, this record what was found."""

    folder: Path
    model_config: ModelConfig
    max_model_len: int
    max_num_batched_tokens: int
    enable_overlap: bool
    startup: Startup
    intake: Intake


def assemble(config: Config) -> Parts:
    """Raises ValueError or TypeError if the model cannot be loaded as the config says."""
    folder = resolve_model(config.model, config.load_format != "dummy", config.revision)
    model_class, shape = read_model_config(folder, config.hf_overrides)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(resolve_tokenizer(config, folder))
    set_chat_template(tokenizer, config.chat_template)
    eos_token_ids = read_eos_token_ids(folder) | tokenizer_eos(tokenizer)
    default_sampling_params = read_default_sampling_params(config, folder)  # bad ones show before weights are loaded
    max_model_len = limit_model_len(config.max_model_len, shape.max_position_embeddings)
    shape = replace(shape, max_position_embeddings=max_model_len)  # the model need not know longer positions
    is_cuda = resolve_device(config.device).type == "cuda"
    max_num_batched_tokens = config.max_num_batched_tokens or (8192 if is_cuda else 2048)
    startup = start_runner(config, folder, model_class, shape, max_model_len, max_num_batched_tokens)
    eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < shape.vocab_size)
    block_size = startup.runner.backend.block_size
    max_chunk_len = config.long_prefill_token_threshold or max_num_batched_tokens
    limits = Limits(
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_kv_blocks=startup.num_kv_blocks,
        block_size=block_size,
        capacity=capacity(startup.num_kv_blocks, block_size, shape.widest_window, max_chunk_len),
        num_eos_tokens=len(eos_token_ids),
        has_tokenizer=tokenizer is not None,
    )
    decoder = None if tokenizer is None else TokenDecoder(tokenizer)
    grammars = GrammarCompiler(tokenizer, shape.vocab_size, eos_token_ids)
    intake = Intake(limits, tokenizer, decoder, eos_token_ids, default_sampling_params, grammars, config.seed)
    enable_overlap = is_cuda if config.enable_overlap is None else config.enable_overlap
    return Parts(folder, shape, max_model_len, max_num_batched_tokens, enable_overlap, startup, intake)


def make_scheduler(config: Config, parts: Parts, observer: Observer) -> Scheduler:
    """An empty scheduler over an empty block manager."""
    startup, block_size = parts.startup, parts.startup.runner.backend.block_size
    max_chunk_len = config.long_prefill_token_threshold or parts.max_num_batched_tokens
    enables_hits, window = config.enable_prefix_caching, parts.model_config.widest_window
    blocks = make_block_manager(startup.num_kv_blocks, block_size, enables_hits, observer, window, max_chunk_len)
    observer.on_start(blocks)
    preemption = Recompute(blocks)
    if startup.num_swap_blocks:
        preemption = Swap(blocks, SwapSpace(startup.num_swap_blocks, block_size))
    return Scheduler(
        blocks,
        config.max_num_seqs,
        parts.max_num_batched_tokens,
        parts.max_model_len,
        config.scheduling_policy if callable(config.scheduling_policy) else POLICIES[config.scheduling_policy],
        config.long_prefill_token_threshold,
        preemption,
    )


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
