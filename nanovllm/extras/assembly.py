"""The parts of an engine that options choose: scheduler, block manager, preemption, what launches steps.

Each extra is imported where its option asks for it. Called by `full_engine.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.extras.all_options import Config
from nanovllm.extras.full_observer import Observer, SchedulingStats
from nanovllm.extras.full_runner import ModelRunner
from nanovllm.extras.full_sequence import order_queues
from nanovllm.extras.request_params import SamplingParams
from nanovllm.scheduler import Scheduler


@dataclass(frozen=True)
class Parts:
    """What an engine has found out at its start. The config says what was asked for."""

    config: Config
    model_config: Any  # a `NetworkConfig`
    tokenizer: Any
    eos_token_ids: frozenset[int]
    default_sampling_params: SamplingParams
    max_model_len: int
    max_num_batched_tokens: int
    enable_overlap: bool
    runner: ModelRunner
    description: str  # what computes, and why that was chosen
    startup_seconds: dict[str, float]  # how long each part of the start took, in order

    @property
    def num_kv_blocks(self) -> int:
        return self.runner.kv_cache.num_blocks

    @property
    def block_size(self) -> int:
        return self.runner.backend.block_size


def make_block_manager(parts: Parts, observer: Observer) -> BlockManager:
    """Return the core's block manager, unless tokens may be unknown, or all layers have a window."""
    arguments = (parts.num_kv_blocks, parts.block_size, parts.config.enable_prefix_caching, observer)
    window = parts.model_config.widest_window
    if window is not None:
        from nanovllm.extras.window_blocks import WindowBlockManager

        max_chunk_len = parts.config.long_prefill_token_threshold or parts.max_num_batched_tokens
        return WindowBlockManager(*arguments, window=window, max_chunk_len=max_chunk_len)
    if parts.enable_overlap or parts.config.speculative_config is not None:
        from nanovllm.extras.known_tokens import KnownTokensBlockManager

        return KnownTokensBlockManager(*arguments)
    return BlockManager(*arguments)


def make_scheduler(
    parts: Parts, blocks: BlockManager, launch: Callable[[Any], Any]
) -> tuple[Scheduler, Callable[[Any], Any]]:
    """Return an empty scheduler, and how the engine gets the step that it waits for next.

    That is the engine's own `launch`, or a function that wraps it.
    """
    config = parts.config
    sizes = (blocks, config.max_num_seqs, parts.max_num_batched_tokens, parts.max_model_len)
    is_plain = config.scheduling_policy == "fcfs" and not config.long_prefill_token_threshold
    is_plain = is_plain and config.preemption_mode == "recompute"
    if is_plain and config.speculative_config is None and not parts.enable_overlap:
        scheduler = Scheduler(*sizes)
        order_queues(scheduler)
        return scheduler, launch
    from nanovllm.extras.extended_scheduler import ExtendedScheduler
    from nanovllm.extras.policies import POLICIES

    policy = config.scheduling_policy
    chosen = policy if callable(policy) else POLICIES[policy]
    arguments = (*sizes, chosen, config.long_prefill_token_threshold, make_preemption(parts, blocks))
    if config.speculative_config is not None:
        from nanovllm.extras.speculation.start_speculation import make_speculation

        return make_speculation(parts, arguments, launch)
    if not parts.enable_overlap:
        return ExtendedScheduler(*arguments), launch
    from nanovllm.extras.overlap import Ahead, OverlappedScheduler

    overlapped = OverlappedScheduler(*arguments)
    return overlapped, Ahead(launch, overlapped)


def make_preemption(parts: Parts, blocks: BlockManager) -> Any:
    """Return what happens to the K and V of preempted sequences; None computes them again."""
    if parts.config.preemption_mode == "recompute":
        return None
    from nanovllm.extras.swap.host_blocks import make_swap

    return make_swap(parts.runner.kv_cache, blocks)


def watched_by(observer: Observer) -> SchedulingStats:
    """Return the engine's statistics, which pass on to `observer` what they are notified of."""
    from nanovllm.extras.watching import Watching

    return Watching(observer)
