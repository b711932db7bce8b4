"""The parts of an engine that options choose: runner, scheduler, block manager, preemption, observer, launches.

Each extra is imported where its option asks for it. `full_engine.py` calls these functions, unless the core's parts
suffice (`is_plain` in `plain_runner.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.block_manager import BlockManager
from nanovllm.config import DTYPES, resolve_dtype
from nanovllm.scheduler import Scheduler
from nanovllm_extras.all_options import Config
from nanovllm_extras.checkpoint import read_model_config
from nanovllm_extras.compatibility import check_combinations
from nanovllm_extras.full_observer import Observer, SchedulingStats
from nanovllm_extras.full_runner import ModelRunner
from nanovllm_extras.layouts import Layout

if TYPE_CHECKING:
    from nanovllm_extras.full_engine import Parts


def start_runner(config: Config, folder: Path) -> tuple[ModelRunner, Config]:
    """Return a runner with kernels, ranks, states, groups or a draft model, and the options as they are possible.

    The self-check has passed, or was not needed.
    """
    _, shape = read_model_config(folder, config.hf_overrides, config.max_model_len)
    check_combinations(config, shape)
    config = with_own_cache_dtype(config, shape.dtype)
    layout = choose_layout(config, shape)
    drafts = config.speculative_config or {}
    if drafts.get("method") == "mtp":
        from nanovllm_extras.speculation.mtp_layout import check_head

        check_head(config, folder, shape)
    kind: Callable[[Config, Path], ModelRunner] = ModelRunner
    if layout is not Layout:
        kind = partial(ModelRunner, layout=layout)
    if max(config.tensor_parallel_size, config.nnodes, config.node_rank + 1) > 1:
        from nanovllm_extras.parallel.start_ranks import start_ranks

        kind = partial(start_ranks, layout=layout)
    if drafts.get("model") is not None:
        from nanovllm_extras.speculation.draft_needs import measure_draft

        kind = partial(ModelRunner, layout=layout, measure_draft=measure_draft)
    if config.attention_backend != "torch" or not config.enforce_eager:  # not only PyTorch's layers
        from nanovllm_extras.self_check.fallbacks import start

        kind = partial(start, kind)
    runner = kind(config, folder)
    if len(set(shape.attention_options)) > 1:  # layers with and without a window
        from nanovllm_extras.kv_groups.layer_groups import describe_tables

        runner.description = describe_tables(config, shape) + runner.description
    return runner, replace(config, max_num_seqs=runner.config.max_num_seqs)  # fewer, if there is memory for fewer


def choose_layout(config: Config, shape: Any) -> type[Layout]:
    """Return what the layers of a network keep for each sequence, and where. shape: a `NetworkConfig`, of all ranks"""
    if shape.state_shape is not None:
        if (config.speculative_config or {}).get("method") == "mtp":
            from nanovllm_extras.speculation.mtp_layout import MtpLayout

            return MtpLayout
        from nanovllm_extras.states.state_layout import StateLayout

        return StateLayout
    has_own_tables = False
    if len(set(shape.attention_options)) > 1:  # layers with and without a window
        from nanovllm_extras.kv_groups.layer_groups import has_groups

        has_own_tables = has_groups(config, shape)
    if has_own_tables and shape.kv_groups:
        from nanovllm_extras.kv_groups.equal_blocks_layout import EqualBlocksLayout

        return EqualBlocksLayout
    if has_own_tables:
        from nanovllm_extras.kv_groups.grouped_layout import GroupedLayout

        return GroupedLayout
    if shape.kv_groups:
        from nanovllm_extras.kv_groups.shapes_layout import ShapesLayout

        return ShapesLayout
    return Layout


def with_own_cache_dtype(config: Config, checkpoint_dtype: str) -> Config:
    """Return options whose `kv_cache_dtype` is `auto` if it names the dtype that K and V have anyway.

    Raises ValueError if it names another dtype that is not of 8 bits.
    """
    named = DTYPES.get(config.kv_cache_dtype)
    if named is None:
        return config
    dtype = resolve_dtype(config.dtype, checkpoint_dtype)
    if named != dtype:
        own = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"kv_cache_dtype must be auto, fp8, int8 or {own}, which the model computes in, got "
            f"{config.kv_cache_dtype!r}; set dtype={config.kv_cache_dtype!r} to change both"
        )
    return replace(config, kv_cache_dtype="auto")


def make_block_manager(parts: "Parts", observer: Observer) -> BlockManager:
    """Return the core's block manager, unless tokens may be unknown, or the model has states or windows."""
    arguments = (parts.num_kv_blocks, parts.block_size, parts.config.enable_prefix_caching, observer)
    if parts.model_config.state_shape is not None:
        from nanovllm_extras.states.slots import StateBlockManager as Blocks

        if parts.config.speculative_config is not None:
            from nanovllm_extras.states.drafted_slots import DraftedStateBlockManager as Blocks
        elif parts.enable_overlap:
            from nanovllm_extras.states.known_snapshots import KnownStateBlockManager as Blocks

        pool: Any = parts.runner.kv_cache
        return Blocks(
            *arguments,
            num_slots=pool.num_slots,
            bytes_per_slot=pool.bytes_per_slot,
            snapshot_interval=parts.config.state_snapshot_interval,
        )
    max_chunk_len = parts.config.long_prefill_token_threshold or parts.max_num_batched_tokens
    layout: Any = getattr(parts.runner, "layout", Layout)
    if (groups := layout.layer_groups) is not None:
        from nanovllm_extras.kv_groups.grouped_blocks import GroupedBlockManager

        sizes = {"num_groups": groups.num_groups, "window": groups.window, "max_chunk_len": max_chunk_len}
        return GroupedBlockManager(*arguments, **sizes)
    window = parts.model_config.widest_window
    if window is not None:
        from nanovllm_extras.window_blocks import WindowBlockManager

        return WindowBlockManager(*arguments, window=window, max_chunk_len=max_chunk_len)
    if parts.enable_overlap or parts.config.speculative_config is not None:
        from nanovllm_extras.known_tokens import KnownTokensBlockManager

        return KnownTokensBlockManager(*arguments)
    return BlockManager(*arguments)


def make_scheduler(
    parts: "Parts", blocks: BlockManager, launch: Callable[[Any], Any]
) -> tuple[Scheduler, Callable[[Any], Any]]:
    """Return an empty scheduler, and how the engine gets the step that it waits for next.

    That is the engine's own `launch`, or a function that wraps it.
    """
    config = parts.config
    sizes = (blocks, config.max_num_seqs, parts.max_num_batched_tokens, parts.max_model_len)
    is_plain = config.scheduling_policy == "fcfs" and not config.long_prefill_token_threshold
    is_plain = is_plain and config.preemption_mode == "recompute"
    has_states = parts.model_config.state_shape is not None
    if is_plain and config.speculative_config is None and not parts.enable_overlap and not has_states:
        return Scheduler(*sizes), launch
    from nanovllm_extras.extended_scheduler import ExtendedScheduler
    from nanovllm_extras.policies import POLICIES

    policy = config.scheduling_policy
    chosen = policy if callable(policy) else POLICIES[policy]
    arguments = (*sizes, chosen, config.long_prefill_token_threshold, make_preemption(parts, blocks))
    if config.speculative_config is not None:
        from nanovllm_extras.speculation.start_speculation import make_speculation

        return make_speculation(parts, arguments, launch)
    kind: Any = ExtendedScheduler
    if has_states:
        from nanovllm_extras.states.slots import StateScheduler as kind
    if not parts.enable_overlap:
        return kind(*arguments), launch
    from nanovllm_extras.overlap import Ahead
    from nanovllm_extras.overlap import OverlappedScheduler as kind

    if has_states:
        from nanovllm_extras.states.known_snapshots import OverlappedStateScheduler as kind
    overlapped = kind(*arguments)
    return overlapped, Ahead(launch, overlapped)


def make_observer(watcher: Observer | None, explains_misses: bool) -> SchedulingStats:
    """Return what counts and is notified of decisions: with the user's own observer `watcher`, with explanations."""
    if explains_misses:
        from nanovllm_extras.prefix_misses import ExplainingStats, ExplainingWatching

        return ExplainingStats() if watcher is None else ExplainingWatching(watcher)
    from nanovllm_extras.watching import Watching

    return SchedulingStats() if watcher is None else Watching(watcher)


def make_store(runner: Any) -> Any:
    """Return the K/V store of an engine, which has the tiers that the options name."""
    make: Callable[[Any], Any]
    if runner.shape.state_shape is not None:
        from nanovllm_extras.states.state_store import StateKVStore as make
    else:
        from nanovllm_extras.kv_store.store import KVStore as make
    store = runner.store = make(runner)
    return store


def attach_store(store: Any, blocks: BlockManager) -> None:
    """Let a `KVStore` load and save the blocks of a new scheduler."""
    connect: Callable[[Any, Any], object]
    if hasattr(blocks, "num_slots"):  # of states
        from nanovllm_extras.states import state_store

        connect = state_store.KnownStateStoreHooks if hasattr(blocks, "settle") else state_store.StateStoreHooks
    elif hasattr(blocks, "num_groups"):  # of layers
        from nanovllm_extras.kv_groups.grouped_store import GroupedStoreHooks as connect
    else:
        from nanovllm_extras.kv_store.store import StoreHooks as connect
    connect(store, blocks)


def make_preemption(parts: "Parts", blocks: BlockManager) -> Any:
    """Return what happens to the K and V of preempted sequences; None computes them again."""
    if parts.config.preemption_mode == "recompute":
        return None
    make: Callable[[Any, Any], Any]
    if parts.model_config.state_shape is not None:
        from nanovllm_extras.states.state_swap import make_swap as make
    elif hasattr(blocks, "num_groups"):  # of layers
        from nanovllm_extras.kv_groups.grouped_swap import make_swap as make
    else:
        from nanovllm_extras.swap.space import make_swap as make
    runner: Any = parts.runner
    return make(runner.transfers, blocks)
