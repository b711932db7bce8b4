"""Why was this prompt token computed, and not found in the prefix cache? `explain_prefix_misses=True` answers for each.

The option adds `PrefixMisses` to the engine's observers (`watching.py`). It follows which blocks the prefix cache has,
remembers which ones were evicted, and explains each sequence when it is admitted for the first time. Without the option
none of this runs. An example with block_size 4; the prompt finds one block:

    cached      [ a b c d | e f g h ]
    prompt      [ a b c d | e f x h | i j k l | m n ]
                  hit       part      differs   part     of a block

    PrefixMiss(4, 6, "partial_block")      e f are cached, but only whole blocks can be found
    PrefixMiss(6, 12, "differs", (g,), (x,))
    PrefixMiss(12, 14, "partial_block")    the last block is never looked up

Memory is bounded: the followed blocks are those of the pool, and as many evictions are remembered, the newest ones.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanovllm.prefix_cache import PrefixCache, hash_block
from nanovllm.scheduler import Step
from nanovllm.sequence import CachedBlock
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.prefix_miss import PrefixMiss

if TYPE_CHECKING:
    from nanovllm.block_manager import BlockManager

CAUSES = ("differs", "evicted", "partial_block", "cache_off", "no_snapshot", "no_window", "never_seen")
MAX_SHOWN_TOKENS = 4


class Eviction(NamedTuple):
    """The step in which a block was evicted, and the request that needed it."""

    step: int
    request_id: str


class PrefixMisses:
    """Writes `seq.prefix_misses` of each sequence that is admitted for the first time, and notifies of `on_miss`.

    Nothing else writes it. `PrefixMisses` knows the blocks of the prefix cache by the block that they follow, and the
    newest `max_evictions` evictions. By default these are as many as the pool has blocks.
    """

    def __init__(self, max_evictions: int | None = None) -> None:
        self.max_evictions = max_evictions
        self._num_scheduled = 0  # steps
        self._cached: dict[int, CachedBlock] = {}  # by block id
        # by the serial number of the block before: the tokens of the cached blocks, sorted. Prompts with different
        # salts have different roots (`Sequence.root_serial`), so they are never compared
        self._next: defaultdict[int, list[bytes]] = defaultdict(list)
        self._evictions: OrderedDict[int, Eviction] = OrderedDict()  # by the hash of the evicted block, oldest first
        # by the serial number of a cached block of group 0: what evicted the other groups' blocks with the same tokens
        self._window_evictions: dict[int, Eviction] = {}

    # ---- events

    def on_start(self, blocks: "BlockManager") -> None:
        self._observer: Any = blocks.observer
        self.cache: Any = blocks.prefix_cache
        self._num_remembered = blocks.num_blocks if self.max_evictions is None else self.max_evictions
        self.on_reset_prefix_cache()

    def on_schedule(self, step: Step, running: list[Sequence], blocks: "BlockManager") -> None:
        self._num_scheduled += 1

    def on_admit(self, seq: Sequence) -> None:
        if seq.num_cached_tokens is None:  # else it resumes after preemption
            seq.prefix_misses = self.explain(seq)
            self._observer.on_miss(seq, seq.prefix_misses)

    def on_register_block(self, seq: Sequence, block_id: int, block_hash: int, serial: int) -> None:
        one = self._cached[block_id] = self.cache._by_id[block_id]
        insort(self._next[one.parent_serial], one.tokens)

    def on_register_in_group(self, seq: Sequence, group: int, block_id: int, block_hash: int, serial: int) -> None:
        """Note that all groups with a window have blocks with the tokens of the cached block `serial`."""
        self._window_evictions.pop(serial, None)

    def on_forget_block(self, block_id: int) -> None:
        one = self._cached.pop(block_id)
        self._window_evictions.pop(one.serial, None)
        tokens = self._next[one.parent_serial]
        del tokens[bisect_left(tokens, one.tokens)]
        if not tokens:
            del self._next[one.parent_serial]

    def on_take_block(self, seq: Sequence, block_id: int, is_evicted: bool) -> None:
        """Remember the eviction of a block, which the prefix cache is about to forget."""
        if not is_evicted:
            return
        eviction = Eviction(self._num_scheduled + 1, seq.request_id)
        if block_id not in self._cached:  # it is of a group of layers with a window
            self._window_evictions[self.cache.others.serial_of[block_id]] = eviction
            return
        block_hash = self._cached[block_id].block_hash
        self._evictions[block_hash] = eviction
        self._evictions.move_to_end(block_hash)
        if len(self._evictions) > self._num_remembered:
            self._evictions.popitem(last=False)

    def on_take_in_group(self, seq: Sequence, group: int, place: int, block_id: int, is_evicted: bool) -> None:
        self.on_take_block(seq, block_id, is_evicted)

    def on_reset_prefix_cache(self) -> None:
        self._cached.clear()
        self._next.clear()
        self._evictions.clear()
        self._window_evictions.clear()

    # ---- explanations

    def explain(self, seq: Sequence) -> list[PrefixMiss]:
        """Return why `seq`, which has just been admitted, does not find its prompt tokens after the computed ones."""
        num_tokens, size = seq.num_prompt_tokens, self.cache.block_size
        if not self.cache.is_enabled or seq.reads_prompt:
            return [PrefixMiss(0, num_tokens, "cache_off")]
        first, stop = seq.num_computed_tokens // size, (num_tokens - 1) // size  # blocks that could have been found
        parent_serial = seq.parent_serial
        cached = PrefixCache.find(self.cache, seq)  # the core's `find`: others drop hits without a state or a window
        unusable = [self._why_unusable(cached, i) for i in range(first + 1, len(cached) + 1)]
        if unusable:
            first, parent_serial = len(cached), cached[-1].serial
        evicted = list(self._find_evicted(seq, first, stop))
        misses = merge_blocks([*unusable, *evicted], first - len(unusable), size)
        if first + len(evicted) < stop:
            misses += self._compare(seq, first, stop, parent_serial) if not evicted else []
            start = misses[-1].end if misses else first * size
            if start < stop * size:
                misses.append(PrefixMiss(start, stop * size, "never_seen"))
        return [*misses, PrefixMiss(stop * size, num_tokens, "partial_block")]

    def _why_unusable(self, cached: list[CachedBlock], num_blocks: int) -> str | Eviction:
        """Return why the first `num_blocks` of the `cached` blocks are not a hit: a cause, or an eviction.

        Groups of layers with a window lack blocks that the next token sees. The newest eviction of these is the cause
        if evictions are the only one.
        """
        others = getattr(self.cache, "others", None)
        if others is None:
            return "no_snapshot"
        lost = [self._window_evictions.get(serial) for serial in others.missing(cached, num_blocks)]
        evictions = [one for one in lost if one is not None]
        return max(evictions) if len(evictions) == len(lost) else "no_window"

    def _find_evicted(self, seq: Sequence, first: int, stop: int) -> Iterator[Eviction]:
        """Yield the evictions to which the blocks of `seq` from `first` on are lost, up to the first that is not.

        A block may still be cached, and not be found: if the block before it was evicted and computed again, it has a
        new serial number, which the block does not follow. So the newest eviction before it is the cause.
        """
        newest, block_hash = None, seq.root_serial
        for i in range(stop):
            tokens = self._tokens_of(seq, i)
            block_hash = hash_block(block_hash, tokens)
            known, own = self.cache._by_hash.get(block_hash), self._evictions.get(block_hash)
            if i >= first:
                eviction = newest if known is not None and known.tokens == tokens else own
                if eviction is None:
                    return
                yield eviction
            newest = max((one for one in (newest, own) if one is not None), default=None)

    def _tokens_of(self, seq: Sequence, i: int) -> bytes:
        """Return the tokens of full block `i`."""
        return seq.token_ids[i * self.cache.block_size : (i + 1) * self.cache.block_size].tobytes()

    def _compare(self, seq: Sequence, i: int, stop: int, parent_serial: int) -> list[PrefixMiss]:
        """Compare block `i` of `seq` with the cached block that has the most first tokens in common with it.

        `parent_serial` is the serial number of the block before it. Returns nothing if the cached prefix ends before
        block `i`.
        """
        size = self.cache.block_size
        siblings = self._next.get(parent_serial, [])
        tokens = self._tokens_of(seq, i)
        place = bisect_left(siblings, tokens)
        near = [pair_up(one, tokens) for one in siblings[max(0, place - 1) : place + 1]]  # neighbours in sorted order
        if not near:
            return []
        pairs = max(near, key=count_equal)
        num_equal = count_equal(pairs)
        if num_equal == i == 0:  # no cached prompt begins like this one
            return []
        if num_equal == size:  # the block is cached, and was not found: no snapshot of a state, or hashes that collide
            return []
        start, middle = i * size, i * size + num_equal
        other = list(takewhile(lambda pair: pair[0] != pair[1], pairs[num_equal : num_equal + MAX_SHOWN_TOKENS]))
        cached, own = zip(*other, strict=True)
        part = [PrefixMiss(start, middle, "partial_block")] if num_equal else []
        return [*part, PrefixMiss(middle, stop * size, "differs", cached, own)]


def merge_blocks(reasons: list[str | Eviction], first: int, size: int) -> list[PrefixMiss]:
    """Return the misses of the blocks from block `first` on. Consecutive blocks with the same reason are one record."""
    misses: list[PrefixMiss] = []
    for i, reason in enumerate(reasons, first):
        start = misses.pop().start if i > first and reasons[i - first - 1] == reason else i * size
        if isinstance(reason, str):
            misses.append(PrefixMiss(start, (i + 1) * size, reason))
        else:
            misses.append(PrefixMiss(start, (i + 1) * size, "evicted", step=reason.step, request_id=reason.request_id))
    return misses


def pair_up(cached: bytes, tokens: bytes) -> list[tuple[int, int]]:
    """Return the pairs of token ids at the same places of two blocks."""
    return list(zip(*(np.frombuffer(one, dtype=np.int32).tolist() for one in (cached, tokens)), strict=True))


def count_equal(pairs: list[tuple[int, int]]) -> int:
    """Return the number of equal pairs before the first different one."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
