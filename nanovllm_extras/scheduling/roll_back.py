"""A step has failed or was interrupted: running sequences keep their tokens, lose their blocks, and wait.

The step may have failed half-way, even in `schedule()`. So no block that it was to fill may be found in the prefix
cache, and no copy that it has requested is done. Tokens that it would have sampled are sampled again, with the same
random numbers.
"""

from typing import Any

from nanovllm.prefix_cache import PrefixCache
from nanovllm.scheduler import Scheduler
from nanovllm_extras.records.full_sequence import own_sequences
from nanovllm_extras.scheduling.pending import forget_unknown


def roll_back(scheduler: Scheduler) -> None:
    """Put all sequences of `scheduler` back into the queue, and forget all steps in flight."""
    observer: Any = scheduler.observer
    blocks = scheduler.block_manager
    forget_steps = getattr(scheduler, "forget_steps", blocks.take_copies)  # the core's has no steps in flight
    forget_steps()
    for block_id in observer.blocks_in_flight():
        blocks.prefix_cache.forget(block_id)
    forget_beside(blocks.prefix_cache)
    for seq in [*scheduler.running, *scheduler.waiting]:
        if seq.block_table:
            seq.num_computed_tokens = 0  # so that `free` registers no block that may not have been filled
            blocks.free(seq)
    # if scheduling was interrupted, a sequence may be in two places, or may have ended and still be in a queue
    started = {*scheduler.running, *scheduler.waiting}
    for seq in reversed(scheduler.running):
        if seq not in scheduler.waiting:
            scheduler.waiting.insert(0, seq)
    scheduler.running.clear()
    for seq in own_sequences([*scheduler.waiting]):
        seq.children = [child for child in seq.children if child not in started]
        forget_unknown(seq)
        if seq.finish_reason is not None:
            scheduler.waiting.remove(seq)
    observer.on_roll_back()


def reset_prefix_cache(scheduler: Scheduler) -> None:
    """Forget all cached prefixes, as before a fair measurement. Running sequences keep their blocks."""
    cache, observer = scheduler.block_manager.prefix_cache, scheduler.observer
    cache._by_hash.clear()
    cache._by_id.clear()
    reset = getattr(observer, "on_reset_prefix_cache", None)
    if reset is not None:
        reset()
    forget_beside(cache)


def forget_beside(cache: PrefixCache) -> None:
    """Forget what the parts of a prefix cache keep beside its blocks: snapshots, the blocks of other groups."""
    for part in getattr(cache, "parts", ()):
        part.forget_all()
