"""The prefix cache of the full engine: it registers known tokens only, and its parts keep more for a cached block.

The newest tokens of a sequence may not be known yet, because a step in flight samples them, or because they are drafts
(`scheduling/pending.py`). Their K and V are computed, but only blocks of known tokens are registered, here.

A *part* keeps something under the serial number of a cached block, which identifies the whole prefix: the blocks of
other groups of layers (`OtherGroups`), a snapshot of a recurrent state (`slots.py`). It limits a hit to prefixes for
which it has all that is needed. A part may also only take note (`store_link.py`).
"""

from typing import Protocol

from nanovllm import prefix_cache
from nanovllm.sequence import CachedBlock
from nanovllm_extras.memory.kinds import NULL_BLOCK, Kind
from nanovllm_extras.records.full_observer import Observer
from nanovllm_extras.records.full_sequence import Sequence


class Part(Protocol):
    """What is kept beside cached blocks."""

    def num_usable(self, hits: list[CachedBlock]) -> int:
        """Return how many of these blocks, the first of a prompt, a sequence can start with."""

    def registered(self, cache: "PrefixCache", seq: Sequence, i: int) -> None:
        """Take note that block `i` of `seq` is cached, under the serial number `seq.parent_serial`."""

    def forgotten(self, block_id: int, serial: int | None) -> None:
        """Take note that a block is handed out again. serial: under which it was cached as one of the first group"""

    def forget_all(self) -> None:
        """Forget what is kept, so that there are no hits until new blocks are registered."""


class PrefixCache(prefix_cache.PrefixCache):
    """The core's prefix cache, with parts."""

    parts: tuple[Part, ...] = ()
    others: "OtherGroups | None" = None

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_id or (self.others is not None and block_id in self.others.serial_of)

    def chain(self, seq: Sequence) -> list[CachedBlock]:
        """Return the cached blocks of the first group that `seq` begins with, whether it can use them or not."""
        return super().find(seq)

    def find(self, seq: Sequence) -> list[CachedBlock]:
        return self.usable(self.chain(seq))

    def usable(self, hits: list[CachedBlock]) -> list[CachedBlock]:
        """Return the first of these blocks that all parts can use."""
        num_hits = -1
        while num_hits != len(hits):
            num_hits = len(hits)
            for part in self.parts:
                hits = hits[: part.num_usable(hits)]
        return hits

    def register(self, seq: Sequence, num_tokens: int) -> None:
        if not self.is_enabled:
            return
        for i in range(seq.num_registered_blocks, min(num_tokens, len(seq.token_ids)) // self.block_size):
            # behind a window a block may have been given back, and evicted since
            if seq.block_table[i] == NULL_BLOCK and self.look_up(*self.key(seq, seq.cached_blocks)) is None:
                return
            super().register(seq, (i + 1) * self.block_size)
            for part in self.parts:
                part.registered(self, seq, i)

    def skip(self, seq: Sequence, num_blocks: int) -> None:
        """Go on after `num_blocks` blocks of `seq`, of which not all are cached.

        Their serial numbers are unknown, so they get new ones. Other sequences do not find the blocks that are
        registered after them, but parts take note of them.
        """
        while len(seq.cached_blocks) < num_blocks:
            block_hash, parent_serial, tokens = self.key(seq, seq.cached_blocks)
            unknown = CachedBlock(NULL_BLOCK, block_hash, next(self._serials), parent_serial, tokens)
            seq.cached_blocks.append(unknown)

    def forget(self, block_id: int) -> None:
        cached = self._by_id.get(block_id)
        super().forget(block_id)
        for part in self.parts:
            part.forgotten(block_id, None if cached is None else cached.serial)

    def last_block(self, seq: Sequence) -> CachedBlock | None:
        """Return the last registered block of `seq` if it can still be found: it may have been evicted again."""
        last = seq.cached_blocks[-1] if seq.cached_blocks else None
        return last if last is not None and self._by_hash.get(last.block_hash) == last else None


class OtherGroups:
    """The cached blocks of all groups but the first, by the serial number of the first group's block.

    A hit is the longest prefix with all of its blocks in the first group, and in every other group those that its next
    token sees. With a window of 5 and block_size 4:

        block             0      1      2      3
        group 0           7      2      5      9           all cached
        group 1           –      3      6      –           blocks 0 and 3 are evicted
        prefixes          4 tokens need block 0 of group 1, 8 tokens block 1, 12 tokens block 2, 16 tokens block 3:
                          the hit has 12 tokens

    If one group's block is evicted, those of the other groups in this list cannot be found either. They are free blocks
    without contents then.
    """

    def __init__(self, kind: Kind, block_size: int, observer: Observer) -> None:
        self.kind = kind
        self.block_size = block_size
        self.observer = observer
        self.blocks_of: dict[int, tuple[int, ...]] = {}  # serial -> blocks, one of each group
        self.serial_of: dict[int, int] = {}  # block -> the serial under which it is found

    def num_usable(self, hits: list[CachedBlock]) -> int:
        num_usable = num_last = 0  # `num_last`: blocks in succession, up to this one, that all groups have
        for i, hit in enumerate(hits, 1):
            num_last = num_last + 1 if hit.serial in self.blocks_of else 0
            if i - num_last <= self.kind.num_behind(i * self.block_size):
                num_usable = i
        return num_usable

    def missing(self, hits: list[CachedBlock], num_blocks: int) -> list[int]:
        """Return the serial numbers of blocks that a hit of the first `num_blocks` of `hits` needs and groups lack."""
        num_behind = self.kind.num_behind(num_blocks * self.block_size)
        return [hit.serial for hit in hits[num_behind:num_blocks] if hit.serial not in self.blocks_of]

    def registered(self, cache: PrefixCache, seq: Sequence, i: int) -> None:
        blocks = tuple([table[i] for table in seq.window_tables])
        if NULL_BLOCK not in blocks and seq.parent_serial not in self.blocks_of:
            self.blocks_of[seq.parent_serial] = blocks
            self.serial_of.update(dict.fromkeys(blocks, seq.parent_serial))
            for group, block_id in enumerate(blocks, 1):
                self.observer.on_register_in_group(
                    seq, group, block_id, seq.cached_blocks[i].block_hash, seq.parent_serial
                )

    def forgotten(self, block_id: int, serial: int | None) -> None:
        serial = self.serial_of.get(block_id) if serial is None else serial
        if serial is not None:
            for one in self.blocks_of.pop(serial, ()):
                del self.serial_of[one]
                self.observer.on_forget_in_group(one)

    def forget_all(self) -> None:
        for block_id in self.serial_of:
            self.observer.on_forget_in_group(block_id)
        self.blocks_of.clear()
        self.serial_of.clear()
