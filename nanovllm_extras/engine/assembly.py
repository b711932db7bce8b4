"""The parts of an engine that options choose: runner, scheduler, block manager, observer, K/V store, grammars.

Each extra is imported where its option asks for it. `full_engine.py` calls these functions, unless the core's parts
suffice (`is_plain` in `plain_parts.py`). `input_processor.py` calls `RequestExtras`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.block_manager import BlockManager as CoreBlockManager
from nanovllm.config import DTYPES, resolve_device, resolve_dtype
from nanovllm.scheduler import Scheduler as CoreScheduler
from nanovllm_extras.engine.input_processor import InputProcessor
from nanovllm_extras.execution.full_runner import ModelRunner
from nanovllm_extras.execution.parts import Parts
from nanovllm_extras.options.all_options import Config
from nanovllm_extras.options.compatibility import check_combinations
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_observer import Observer, SchedulingStats
from nanovllm_extras.requests.full_detokenizer import TokenDecoder
from nanovllm_extras.requests.full_request import Request
from nanovllm_extras.sampling.logits_processors import Processor, PromptReader
from nanovllm_extras.weights.checkpoint import read_model_config

if TYPE_CHECKING:
    from nanovllm_extras.engine.watching import Observers
    from nanovllm_extras.kv_store.store import KVStore
    from nanovllm_extras.lora.registry import AdapterRegistry
    from nanovllm_extras.sampling.thinking_budget import ThinkingTags
    from nanovllm_extras.structured.compiler import GrammarCompiler


def start_runner(config: Config, folder: Path) -> tuple[ModelRunner, Config]:
    """Return a runner with kernels, ranks or a draft model, and the options as they are possible.

    The self-check has passed, or was not needed.
    """
    _, shape = read_model_config(folder, config.hf_overrides, config.max_model_len, config.models)
    check_combinations(config, shape)
    config = with_own_cache_dtype(config, shape.dtype)
    if config.has_mtp_head:
        from nanovllm_extras.execution.mtp_head import check_head

        check_head(config, folder, shape)
    kind: Callable[..., ModelRunner] = ModelRunner
    if config.runner_cls is not None:
        from nanovllm_extras.execution.own_runner import combine

        kind = combine(config.runner_cls)
    if max(config.tensor_parallel_size, config.nnodes, config.node_rank + 1) > 1:
        from nanovllm_extras.parallel.start_ranks import start_ranks

        kind = start_ranks
        if config.load_format == "gguf":  # a file that cannot be read is refused before the ranks start
            from nanovllm_extras.weights.gguf import GgufFile

            GgufFile(folder, shape)
    if config.has_draft_model:
        from nanovllm_extras.speculation.draft_needs import measure_draft

        kind = partial(kind, measure_draft=measure_draft)
    is_checked = not config.has_own_backend and config.runner_cls is None and config.models is None
    if is_checked and (config.attention_backend != "torch" or not config.enforce_eager):  # not only PyTorch's layers
        from nanovllm_extras.self_check.fallbacks import start

        kind = partial(start, kind)
    runner = kind(config, folder)
    runner.description = runner.layout.describe_tables() + runner.description
    return runner, replace(config, max_num_seqs=runner.config.max_num_seqs)  # fewer, if there is memory for fewer


def with_own_cache_dtype(config: Config, checkpoint_dtype: str) -> Config:
    """Return options whose `kv_cache_dtype` is `auto` if it names the dtype that K and V have anyway.

    Raises ValueError if it names another dtype that is not of 8 bits.
    """
    named = DTYPES.get(config.kv_cache_dtype)
    if named is None:
        return config
    dtype = resolve_dtype(config.dtype, checkpoint_dtype, resolve_device(config.device))
    if named != dtype:
        own = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"kv_cache_dtype must be auto, fp8, int8 or {own}, which the model computes in, got "
            f"{config.kv_cache_dtype!r}; set dtype={config.kv_cache_dtype!r} to change both"
        )
    return replace(config, kv_cache_dtype="auto")


def make_block_manager(parts: Parts, observer: Observer) -> CoreBlockManager:
    """Return the core's block manager, unless the model or an option needs more."""
    config, sizes = parts.config, (parts.num_kv_blocks, parts.block_size)
    if not needs_full_scheduler(parts):
        kind_of_core = config.block_manager_cls or CoreBlockManager
        more = () if config.prefix_cache_cls is None else (config.prefix_cache_cls,)
        blocks: CoreBlockManager = kind_of_core(*sizes, config.enable_prefix_caching, observer, *more)
        return blocks
    from nanovllm_extras.memory.block_manager import BlockManager
    from nanovllm_extras.memory.kinds import AllTokens, Window

    max_chunk_len = config.long_prefill_token_threshold or parts.max_num_batched_tokens
    layout = parts.runner.layout
    kind, *others = [
        AllTokens() if window is None else Window(window, max_chunk_len, parts.block_size) for window in layout.windows
    ]
    held: dict[str, Any] = {"kind": kind, "num_groups": 1 + len(others), "other_kind": others[0] if others else None}
    if (pool := layout.pool) is not None:
        from nanovllm_extras.memory.slots import Slots

        held["states"] = Slots(
            pool.num_slots,
            parts.block_size,
            observer,
            config.enable_prefix_caching,
            config.state_snapshot_interval,
            pool.bytes_per_slot,
        )
    if config.preemption_mode == "swap":
        from nanovllm_extras.memory.swap_space import SwapSpace

        transfers = parts.runner.transfers
        held["swap_space"] = SwapSpace(transfers.num_swap_blocks, transfers.num_swap_slots)
    if parts.kv_store is not None:
        from nanovllm_extras.memory.store_link import StoreLink

        held["store"] = StoreLink(parts.kv_store)
    if config.prefix_cache_cls is not None:
        held["prefix_cache_cls"] = config.prefix_cache_cls
    made: CoreBlockManager = (config.block_manager_cls or BlockManager)(
        *sizes, config.enable_prefix_caching, observer, **held
    )
    return made


def needs_full_scheduler(parts: Parts) -> bool:
    """Return whether the core's scheduler and block manager lack what the model or an option needs."""
    config, layout = parts.config, parts.runner.layout
    own = [kind for kind in (config.scheduler_cls, config.block_manager_cls, config.prefix_cache_cls) if kind]
    return any(
        [
            own and not config.has_own_scheduling,  # they extend the classes of this package
            config.scheduling_policy != "fcfs",
            config.long_prefill_token_threshold,
            config.preemption_mode != "recompute",
            config.speculative_config is not None,
            parts.enable_overlap,
            config.enable_lora,
            parts.kv_store is not None,
            layout.pool is not None,
            any(window is not None for window in layout.windows),
        ]
    )


def make_scheduler(parts: Parts, blocks: CoreBlockManager, requests: Mapping[str, Request]) -> CoreScheduler:
    """Return an empty scheduler: the core's, if that is enough. requests: the engine's"""
    config = parts.config
    sizes = (config.max_num_seqs, parts.max_num_batched_tokens, parts.max_model_len)
    if not needs_full_scheduler(parts):
        made: CoreScheduler = (config.scheduler_cls or CoreScheduler)(blocks, *sizes)
        return made
    from nanovllm_extras.lora.slots import AdapterSlots
    from nanovllm_extras.memory.block_manager import BlockManager
    from nanovllm_extras.scheduling.policies import POLICIES
    from nanovllm_extras.scheduling.scheduler import Scheduler

    assert isinstance(blocks, BlockManager)
    policy, drafter = config.scheduling_policy, None
    if config.speculative_config is not None:
        from nanovllm_extras.self_check.fallbacks import start
        from nanovllm_extras.speculation.start_speculation import make_drafter

        start_draft = partial(start, partial(ModelRunner, max_rows=parts.runner.max_rows))
        drafter = make_drafter(parts, blocks, requests, start_draft)
    full: CoreScheduler = (config.scheduler_cls or Scheduler)(
        blocks,
        *sizes,
        policy if callable(policy) else POLICIES[policy],
        config.long_prefill_token_threshold,
        overlaps=parts.enable_overlap,
        drafter=drafter,
        adapter_slots=AdapterSlots(config.max_loras) if config.enable_lora else None,
    )
    return full


def make_observers(stats: SchedulingStats, watcher: Observer | None, explains_misses: bool) -> "Observers":
    """Return the observers of an engine with a watcher (a user's observer, a recording) or with explained misses."""
    from nanovllm_extras.engine.watching import Observers

    watchers = [] if watcher is None else [watcher]
    if not explains_misses:
        return Observers(stats, watchers)
    from nanovllm_extras.engine.prefix_misses import CAUSES, PrefixMisses

    stats.prefix_cache_miss_tokens = dict.fromkeys(CAUSES, 0)
    return Observers(stats, watchers, PrefixMisses())


def make_store(runner: ModelRunner) -> "KVStore":
    """Return the K/V store of an engine, which has the tiers that the options name."""
    from nanovllm_extras.kv_store.store import KVStore

    store = runner.store = KVStore(runner)
    return store


def make_registry(
    parts: Parts, runner: ModelRunner, requests: Callable[[], Mapping[str, Request]]
) -> "AdapterRegistry | None":
    """Return the LoRA adapters of an engine, or None if it serves none. requests: returns the engine's"""
    if not parts.config.enable_lora:
        return None
    from nanovllm_extras.lora.registry import AdapterRegistry

    def in_use() -> set[int]:
        return {seq.adapter.number for one in requests().values() for seq in one.seqs if seq.adapter is not None}

    assert runner.adapters is not None
    return AdapterRegistry(runner.adapters, lambda: runner.ranks, parts.config.max_cpu_loras, in_use)


def make_checks(config: Config) -> tuple[Callable[[Any], None], ...]:
    """Return what the engine calls with itself after each step: the check of its invariants, if it is wanted."""
    if not config.check_invariants:
        return ()
    from nanovllm_extras.engine.invariants import check_invariants

    return (check_invariants,)


# ---- for a request


class RequestExtras:
    """Makes what few requests ask for."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def grammars(self) -> "GrammarCompiler":
        from nanovllm_extras.structured.compiler import GrammarCompiler

        parts = self.parts
        assert parts.tokenizer is not None  # requests without one are refused
        return GrammarCompiler(parts.tokenizer, parts.model_config.vocab_size, parts.eos_token_ids)

    def processors(self, params: SamplingParams) -> tuple[Processor, ...]:
        from nanovllm_extras.sampling.logits import processors_of

        return processors_of(params, self.parts.tokenizer, self.parts.model_config.vocab_size)

    def thinking_tags(self) -> "ThinkingTags":
        from nanovllm_extras.sampling.thinking_budget import ThinkingTags

        parts = self.parts
        return ThinkingTags(parts.config.reasoning_parser, parts.tokenizer, parts.model_config.vocab_size)

    def prompt_logprobs(self, num_logprobs: int, decoder: TokenDecoder | None, gives_once: bool) -> PromptReader:
        from nanovllm_extras.requests.prompt_logprobs import PromptLogprobs

        return PromptLogprobs(num_logprobs, decoder, gives_once)


def make_input_processor(parts: Parts, capacity: int) -> InputProcessor:
    """Return what makes requests. capacity: tokens that one sequence can have in the cache when no other has any"""
    return InputProcessor(parts, capacity, RequestExtras(parts))
