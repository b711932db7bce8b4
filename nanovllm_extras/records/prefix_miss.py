"""`PrefixMiss`: which prompt tokens were not in the prefix cache, and why. `prefix_misses.py` finds it out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixMiss:
    """The prompt tokens [start, end) were not found in the prefix cache. `cause` says why, in one of these words:

    differs        the prompt differs from the cached prefix at token `start`
    evicted        their blocks were cached, and evicted (or the block before them was, so that they are not found; or,
                   if layers form groups, all blocks that a group lacks inside its window)
    partial_block  they do not fill a block that can be found. The last block of a prompt is never looked up: it is not
                   full, or its last token must be computed for its logits
    cache_off      the prefix cache is off, or the request needs the hidden states of all prompt tokens
    no_snapshot    their blocks are cached, but the model keeps a recurrent state and has no snapshot of it
                   (`memory/slots.py`)
    no_window      their blocks are cached in the group of layers that sees all tokens, but another group lacks blocks
                   inside its window, and no eviction of these is remembered (`memory/prefix_cache.py`)
    never_seen     no cached prefix continues with them, and no eviction of their blocks is remembered
    """

    start: int
    end: int
    cause: str
    cached_token_ids: tuple[int, ...] = ()
    """For `differs`: the cached tokens from `start` on that the prompt has replaced, at most 4, to be shown."""
    prompt_token_ids: tuple[int, ...] = ()
    """For `differs`: the prompt's tokens there."""
    step: int | None = None
    """For `evicted`: the number of the step, counted from 1, that evicted the block."""
    request_id: str | None = None
    """For `evicted`: the request that needed the block."""
