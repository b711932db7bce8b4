"""The block manager of the full engine: groups of layers, recurrent states, host memory and a K/V store.

The core's block manager has one pool of blocks and one block table for each sequence. This one adds what some models
and options need. The engine uses the core's own class if none of them is on.

**Groups.** All layers of a group keep the same of a sequence (`kinds.py`), and each group has block tables of its own
over the one pool. `seq.block_table` is that of group 0. The other groups have windows, all of the same length, so their
tables have null blocks at the same places. All groups are served together:

    admission       needs room for all tokens in a group that keeps all tokens, and for a window and a chunk in others
    allocation      a sequence gets blocks in all groups, or in none
    window          before a chunk, the blocks behind the window of its first token are given back. They keep their
                    contents, and can be hit, until they are handed out again
    fork, free      share and free the blocks of all groups; a shared block is copied in all of them
    prefix hits     the longest prefix that every part of the prefix cache can use (`prefix_cache.py`). A sequence only
                    owns the blocks that its next token sees

**States.** `states` gives each running sequence a slot (`slots.py`); None if the model has no recurrent states.

**Host memory.** `swap_space` keeps K, V and state of preempted sequences; None computes them again. `store` loads the
blocks that follow a prefix hit, and notes which blocks are saved (`store_link.py`).

**Unknown tokens.** The newest tokens of a sequence may be drafts, or in flight (`scheduling/pending.py`). `settle`
registers what has become known, and `rewind` gives up what was computed in vain.
"""

import sys
from array import array
from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile
from typing import Protocol

from nanovllm import block_manager
from nanovllm.scheduler import Step
from nanovllm.sequence import CachedBlock
from nanovllm_extras.memory.kinds import NULL_BLOCK, AllTokens, Kind
from nanovllm_extras.memory.prefix_cache import OtherGroups, Part, PrefixCache
from nanovllm_extras.memory.slots import Slots, StateStats
from nanovllm_extras.memory.swap_space import SwapSpace
from nanovllm_extras.records.full_observer import Observer
from nanovllm_extras.records.full_sequence import Sequence, own_chunks
from nanovllm_extras.records.moves import Moves, Pool, Table


class Store(Part, Protocol):
    """What loads blocks and states that the pool does not have, and has them saved: `store_link.StoreLink`."""

    def load_more(self, blocks: "BlockManager", seq: Sequence) -> None:
        """Load what follows the computed tokens of `seq`, which are those of a hit, and count it as computed."""

    def note_state(self, seq: Sequence, states: Slots, moves: Moves | None) -> None:
        """Note that the state of `seq`, for which a snapshot was due, is to be saved. moves: as in `_take_snapshot`"""

    def save_late(self, moves: Moves, states: Slots) -> None:
        """Save the snapshots that were taken since the step before this one."""

    def take_moves(self, moves: Moves) -> None:
        """Add what the step that is scheduled loads and saves."""

    def put_back(self, moves: Moves) -> None:
        """Save after a later step what this one, which has no chunks, was to save."""

    def forget_step(self) -> None:
        """Forget what is to be loaded and saved."""


class BlockManager(block_manager.BlockManager):
    """Blocks 1 … `num_blocks` for all groups.

    `kind` is what group 0 keeps. There are `num_groups - 1` other groups, which keep `other_kind`.
    """

    observer: Observer
    prefix_cache: PrefixCache

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        observer: Observer | None = None,
        prefix_cache_cls: type[PrefixCache] = PrefixCache,
        *,
        kind: Kind | None = None,
        num_groups: int = 1,
        other_kind: Kind | None = None,
        states: Slots | None = None,
        swap_space: SwapSpace | None = None,
        store: Store | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching, observer or Observer(), prefix_cache_cls)
        self.kind: Kind = kind or AllTokens()
        self.num_groups = num_groups
        self.other_kind: Kind = other_kind or AllTokens()
        self.states = states
        self.swap_space = swap_space
        self.store = store
        parts: list[Part] = []
        if num_groups > 1:
            self.prefix_cache.others = OtherGroups(self.other_kind, block_size, self.observer)
            parts.append(self.prefix_cache.others)
        parts += [part for part in (states, store) if part is not None]
        self.prefix_cache.parts = tuple(parts)
        self._has_windows = self.kind.max_held is not None or num_groups > 1

    # ---- how much room there is

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can have in the cache if it is the only one.

        There is no limit if all layers have windows, and the pool has room for one.
        """
        num_held = (self.num_groups - 1) * (self.other_kind.max_held or 0)
        if self.kind.max_held is None:
            return max(self.num_blocks - num_held, self.num_blocks // self.num_groups) * self.block_size
        is_unbounded = self.kind.max_held + num_held <= self.num_blocks
        return sys.maxsize - 1 if is_unbounded else self.num_blocks // self.num_groups * self.block_size

    def num_missing_blocks(self, seq: Sequence) -> int:
        """Return the most free blocks that `seq` still takes for its tokens, less those that it frees.

        In a group with a window, `seq` holds at most `max_held` at the same time. If it gives back a block, the block
        becomes free only if no other sequence owns it:

            max_held 5, block table [0, 7, 2, 5], block 7 is shared, `seq` lacks 4 blocks

            min(4, 5 - 2) = 3: blocks 2 and 5 may become free again, block 7 stays in use
        """
        num_missing = max(0, super().num_missing_blocks(seq))  # it has more than it needs if drafts were rejected
        if not num_missing or not self._has_windows:
            return num_missing
        num_missing_of_one, others = num_missing, self.num_groups - 1
        if (max_held := self.kind.max_held) is not None:
            num_missing = min(num_missing, max_held - self._count_unshared(seq.block_table))
        if others and (max_held := self.other_kind.max_held) is not None:
            # the blocks at one place of all other groups have the same owners
            num_unshared = sum(map(self._count_unshared, seq.window_tables[:1]))
            num_missing += others * min(num_missing_of_one, max_held - num_unshared)
        return num_missing

    def num_needed_for(self, seq: Sequence, hits: list[CachedBlock]) -> int:
        """Return the most free blocks that `seq` takes for all of its tokens, if it begins with `hits`."""
        num_hits, refs = len(hits), self._ref_counts
        num_missing = super().num_missing_blocks(seq) - num_hits  # in each group
        num_behind = self.kind.num_behind(num_hits * self.block_size)
        num_revived = sum([refs[hit.block_id] == 0 for hit in hits[num_behind:]])  # hits that are free until now
        num_needed = at_most(num_missing + num_revived, self.kind)
        if self.num_groups > 1:
            num_revived = sum([refs[blocks[0]] == 0 for blocks in self._hits_of_others(hits)])
            num_needed += (self.num_groups - 1) * at_most(num_missing + num_revived, self.other_kind)
        return num_needed

    def _count_unshared(self, table: "array[int]") -> int:
        """Count the blocks with one owner in a block table, in which no block comes before a null block."""
        held = takewhile(lambda block_id: block_id != NULL_BLOCK, reversed(table))
        return sum([self._ref_counts[block_id] == 1 for block_id in held])

    # ---- sequences come and go

    def try_admit(self, seq: Sequence, num_reserved: int = 0) -> bool:
        """Admit `seq` as the core does. It may get a slot, its blocks in host memory, or more blocks of the store."""
        num_free = len(self._free) - num_reserved
        if num_free <= 0 or (self.states is not None and not self.states.has_room_for(seq)):
            return False
        if self.swap_space is not None and seq in self.swap_space:
            return self._try_swap_in(seq, self.swap_space, num_free)
        chain = self.prefix_cache.chain(seq) if self.prefix_cache.is_enabled else []
        hits = self.prefix_cache.usable(chain)
        if self.num_needed_for(seq, hits) > num_free:
            return False
        num_behind = self.kind.num_behind(len(hits) * self.block_size)
        for i, hit in enumerate(hits):
            self._share(seq, NULL_BLOCK if i < num_behind else hit.block_id)
        if self.num_groups > 1:
            windows = self._hits_of_others(hits)
            for i, blocks in enumerate(windows, len(hits) - len(windows)):
                self._share_in_groups(seq, i, blocks)
        seq.num_computed_tokens = len(hits) * self.block_size
        seq.cached_blocks = hits
        if self.states is not None:
            self.states.admit(seq, len(chain) * self.block_size)
        if self.store is not None:
            self.store.load_more(self, seq)
        return True

    def try_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Extend the block tables of `seq` as the core does. Blocks behind a window are given back before."""
        if self._has_windows:
            self.give_back(seq, seq.num_computed_tokens)
        if self.num_groups > 1 and not self._try_allocate_in_groups(seq, num_tokens):
            return False
        return super().try_allocate(seq, num_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks of `parent`, and give it a copy of its state."""
        super().fork(parent, child)
        if self.num_groups > 1:
            for i, blocks in enumerate(zip(*parent.window_tables, strict=True)):
                if blocks[0] != NULL_BLOCK:
                    self._share_in_groups(child, i, blocks)
        if self.states is not None:
            self.states.fork(parent, child)

    def preempt(self, seq: Sequence) -> None:
        """Take all blocks of `seq`. K and V are copied to host memory if it has room, and computed again otherwise."""
        num_computed_tokens, space, states = seq.num_computed_tokens, self.swap_space, self.states
        is_swapped = space is not None and space.try_swap_out(seq, self.computed_blocks(seq), states is not None)
        if is_swapped and space is not None and states is not None:
            states.copy_out(seq, space.slot_of(seq))
        self._free_all(seq)
        if is_swapped and space is not None:
            seq.num_computed_tokens = num_computed_tokens
            self.observer.on_swap_out(seq, space.host_block_ids(seq))

    def free(self, seq: Sequence) -> None:
        """Free all that `seq` owns: blocks, slots, and host memory."""
        if self.swap_space is not None:
            self.swap_space.drop(seq)
        self._free_all(seq)

    def computed_blocks(self, seq: Sequence) -> list[list[int]]:
        """Return the blocks of the computed tokens of `seq`, for each group."""
        num_blocks = -(-seq.num_computed_tokens // self.block_size)
        return [table[:num_blocks].tolist() for table in (seq.block_table, *seq.window_tables)]

    def _try_swap_in(self, seq: Sequence, space: SwapSpace, num_free: int) -> bool:
        if self.num_missing_blocks(seq) > num_free:
            return False
        has_room = self.try_allocate(seq, seq.num_computed_tokens)  # blocks of its own
        assert has_room, "there is room for all tokens of the sequence"
        if self.states is not None:
            self.states.copy_in(seq, space.slot_of(seq))
        space.swap_in(seq, self.computed_blocks(seq))
        return True

    def append_loaded(self, seq: Sequence, shared: list[CachedBlock], num_loaded: int) -> list[tuple[int, int, int]]:
        """Append the cached blocks `shared`, and `num_loaded` free ones, to the tables of `seq`, as computed.

        Returns (index, group, block id) for each free block that was taken, whose contents the caller loads. `index`
        counts from the first appended block. In groups with a window, cached blocks are not shared, but loaded.
        """
        first, taken = len(seq.block_table), []
        stop = first + len(shared) + num_loaded
        num_tokens = stop * self.block_size
        self.give_back(seq, num_tokens)  # what the pool has found and the next token does not see
        for i in range(len(seq.block_table), stop):
            if i - first < len(shared):
                self._share(seq, shared[i - first].block_id)
            else:
                block_id = self.take(seq)
                self._append(seq, block_id)
                taken.append((i - first, 0, block_id))
            if self.num_groups > 1 and i >= self.other_kind.num_behind(num_tokens):
                blocks = self._take_in_groups(seq, i)
                self._set_in_groups(seq, i, blocks)
                taken += [(i - first, group, block_id) for group, block_id in enumerate(blocks, 1)]
        if (num_behind := self.kind.num_behind(num_tokens)) > first:
            self.prefix_cache.skip(seq, num_behind)
        seq.num_computed_tokens = num_tokens
        self.prefix_cache.register(seq, num_tokens)
        return taken

    def _free_all(self, seq: Sequence) -> None:
        owned: list[int] = []
        if seq.block_table:
            self.prefix_cache.register(seq, seq.num_computed_tokens)  # what has become known
            owned, seq.window_tables = last_first(seq.window_tables), []
        super().free(seq)
        for block_id in owned:
            self.release(block_id)
        if self.states is not None:
            self.states.free(seq)

    # ---- tokens that were not known

    def settle(self, seq: Sequence) -> None:
        """Register blocks of `seq` whose tokens have become known, and take a snapshot if one is due.

        Called between two steps, for models with recurrent states: the next step changes the state.
        """
        self.prefix_cache.register(seq, seq.num_computed_tokens)
        self._take_snapshot(seq, None)

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Extend the block table of `seq` to cover `num_tokens` tokens. There must be free blocks.

        Unlike `try_allocate` it registers no block that these tokens fill: `schedule()` has not begun the step yet.
        """
        assert not seq.has_shared_tail
        assert not self._has_windows
        while len(seq.block_table) * self.block_size < num_tokens:
            self._append(seq, self.take(seq))

    def rewind(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Shrink the block tables of `seq` to `num_tokens` tokens. Return the other blocks, the last one first.

        No other sequence owns them, and the prefix cache does not know them: they were for drafts.
        """
        table, num_blocks = seq.block_table, -(-num_tokens // self.block_size)
        given_back = last_first([table[num_blocks:]])
        given_back += last_first([table[num_blocks:] for table in seq.window_tables])
        for block_id in given_back:
            self.release(block_id)
        for table in (seq.block_table, *seq.window_tables):
            del table[num_blocks:]
        return given_back

    def has_room_for_drafts(self, running: Iterable[Sequence], counts: dict[Sequence, int]) -> bool:
        """Return whether the running sequences get blocks for a step with these drafts, without a preemption."""
        num_needed = 0
        for seq in running:
            num_blocks = -(-(seq.num_known_tokens + counts.get(seq, 0)) // self.block_size)
            num_needed += max(0, num_blocks - len(seq.block_table)) + seq.has_shared_tail
        return self.num_groups * num_needed <= self.num_free_blocks

    # ---- a step

    def take_copies(self) -> Moves:
        """Return all that this step copies. `complete` adds what depends on its chunks.

        `schedule` calls this method before it forks, because a fork copies the state that this step computes.
        """
        moves = Moves(super().take_copies())
        if self.swap_space is not None:
            moves.swap_outs, moves.swap_ins = self.swap_space.take_moves()
        if self.states is not None:
            moves.state_copies = self.states.take_copies()
        if self.store is not None:
            self.store.take_moves(moves)
        return moves

    def complete(self, step: Step, moves: Moves) -> None:
        """Add the slots that the chunks of a step read and write, and the states that are saved after it."""
        if not step.chunks:  # it will not be launched
            self._put_back(moves)
        elif self.states is not None:
            seqs = [seq for seq, _, _ in own_chunks(step.chunks)]
            if self.store is not None:
                self.store.save_late(moves, self.states)
            for seq in seqs:
                self._take_snapshot(seq, moves)
            moves.slots, moves.sources = self.states.rows_of(seqs)

    def _put_back(self, moves: Moves) -> None:
        """Let the next step do what a step without chunks was to do.

        Only forks and ends of sequences come without a chunk, so there are no blocks to fill. A step that preempts has
        chunks: it is not launched ahead, and its first running sequence has room when all others have none. Blocks that
        are to be saved may still be evicted, and then they must not be saved.
        """
        assert not any([moves, moves.swap_outs, moves.swap_ins, moves.loads, moves.state_loads])
        if self.states is not None:
            self.states.put_back(moves.state_copies)
        if self.store is not None:
            self.store.put_back(moves)

    def forget_step(self, preempted: Collection[Sequence]) -> None:
        """Forget all copies that are to be done. preempted: by the steps that have failed"""
        super().take_copies()
        if self.swap_space is not None:  # what was to be copied out may not have been
            for seq in [*self.swap_space.forget_step(), *preempted]:
                if seq in self.swap_space:
                    self.free(seq)
        if self.states is not None:
            self.states.forget_step()
        if self.store is not None:
            self.store.forget_step()

    def _take_snapshot(self, seq: Sequence, moves: Moves | None) -> None:
        """Take a snapshot of `seq`, and have it saved, if one is due. moves: of the step that computes it, or None"""
        states = self.states
        if states is None or not states.ends_at_snapshot(seq):
            return
        is_new = seq.parent_serial not in states.snapshots
        states.take_snapshot(seq, self.prefix_cache.last_block(seq))
        if is_new and self.store is not None:
            self.store.note_state(seq, states, moves)

    # ---- groups

    def give_back(self, seq: Sequence, position: int) -> None:
        """Replace the blocks behind the window of the token at `position` by the null block, in all groups."""
        table, given_back = seq.block_table, []
        num_behind = self.kind.num_behind(position)
        num_held = min(num_behind, len(table))
        if num_held and table[num_held - 1] != NULL_BLOCK:
            self.prefix_cache.register(seq, num_held * self.block_size)  # while they are known
            given_back = take_before([table], num_held)
        num_held = min(self.other_kind.num_behind(position), len(table))
        if self.num_groups > 1 and num_held and seq.window_tables[0][num_held - 1] != NULL_BLOCK:
            self.prefix_cache.register(seq, num_held * self.block_size)
            given_back += take_before(seq.window_tables, num_held)
        if given_back:
            for block_id in given_back:
                self.release(block_id)
            self.observer.on_give_back(seq, given_back)
        while len(table) < num_behind:  # it comes back from host memory, where there are no blocks for these entries
            self._share(seq, NULL_BLOCK)

    def _take_in_groups(self, seq: Sequence, i: int) -> tuple[int, ...]:
        """Take a free block of each other group for place `i` of `seq`, which does not own them yet."""
        taken = []
        for group in range(1, self.num_groups):
            block_id, _ = self._free.popitem(last=False)
            self.observer.on_take_in_group(seq, group, i, block_id, block_id in self.prefix_cache)
            self.prefix_cache.forget(block_id)
            taken.append(block_id)
        return tuple(taken)

    def _try_allocate_in_groups(self, seq: Sequence, num_tokens: int) -> bool:
        table, num_blocks = seq.block_table, -(-num_tokens // self.block_size)
        num_behind = self.other_kind.num_behind(seq.num_computed_tokens)
        needs_copy = seq.has_shared_tail and self._ref_counts[self._tail(seq)] > 1
        num_new = max(0, num_blocks - len(table))
        num_new_windows = max(0, num_blocks - max(len(table), num_behind))
        num_of_windows = (self.num_groups - 1) * (num_new_windows + needs_copy)
        if num_new + needs_copy + num_of_windows > len(self._free):
            return False
        if needs_copy:
            self._copy_tail(seq)
        seq.has_shared_tail = False
        for i in range(len(table), num_blocks):
            self._append(seq, self.take(seq))
            if i >= num_behind:
                self._set_in_groups(seq, i, self._take_in_groups(seq, i))
        return True

    def _hits_of_others(self, hits: list[CachedBlock]) -> list[tuple[int, ...]]:
        """Return the blocks of the other groups that a sequence shares after `hits`, for each place: one per group."""
        others, num_behind = self.prefix_cache.others, self.other_kind.num_behind(len(hits) * self.block_size)
        assert others is not None
        return [others.blocks_of[hit.serial] for hit in hits[num_behind:]]

    def _share_in_groups(self, seq: Sequence, i: int, blocks: tuple[int, ...]) -> None:
        """Let `seq` own blocks with contents as block `i` of the other groups."""
        self._set_in_groups(seq, i, blocks)
        for group, block_id in enumerate(blocks, 1):
            self.observer.on_share_in_group(seq, group, i, block_id)

    def _set_in_groups(self, seq: Sequence, i: int, blocks: tuple[int, ...]) -> None:
        """Let `seq` own `blocks` as block `i` of the other groups, one for each. They may be free until now."""
        for table, block_id in zip(seq.window_tables, blocks, strict=True):
            table[i] = block_id
            self._free.pop(block_id, None)
            self._ref_counts[block_id] += 1

    def _copy_tail(self, seq: Sequence) -> None:
        super()._copy_tail(seq)
        if self.num_groups == 1:
            return
        i = seq.num_computed_tokens // self.block_size
        sources = [table[i] for table in seq.window_tables]
        destinations = self._take_in_groups(seq, len(seq.block_table))
        self._set_in_groups(seq, i, destinations)
        self._copies += zip(sources, destinations, strict=True)
        for group, (source, destination) in enumerate(zip(sources, destinations, strict=True), 1):
            self.release(source)
            self.observer.on_copy_in_group(seq, group, source, destination)

    def _share(self, seq: Sequence, block_id: int) -> None:
        if block_id != NULL_BLOCK:
            super()._share(seq, block_id)
            return
        seq.block_table.append(NULL_BLOCK)
        self._append_null_in_groups(seq)
        self.observer.on_share_block(seq, NULL_BLOCK)

    def _append(self, seq: Sequence, block_id: int) -> None:
        super()._append(seq, block_id)
        self._append_null_in_groups(seq)

    def _append_null_in_groups(self, seq: Sequence) -> None:
        """Let the tables of the other groups be as long as the first. With its first block a sequence gets tables."""
        if self.num_groups > 1:
            seq.window_tables = seq.window_tables or [array("i") for _ in range(self.num_groups - 1)]
            for table in seq.window_tables:
                table.append(NULL_BLOCK)

    def release(self, block_id: int) -> None:
        if block_id != NULL_BLOCK:
            super().release(block_id)

    @property
    def state_stats(self) -> StateStats | None:
        return None if self.states is None else self.states.stats

    # ---- for `check_invariants`

    def tables_of(self, seq: Sequence) -> list[Table]:
        """Return the block tables of `seq`, one of each group."""
        position, windows = seq.num_computed_tokens, seq.window_tables or [array("i")] * (self.num_groups - 1)
        kinds = [self.kind] + [self.other_kind] * (self.num_groups - 1)
        return [
            Table(table.tolist(), kind.num_behind(position), kind.max_held)
            for table, kind in zip([seq.block_table, *windows], kinds, strict=True)
        ]

    def slot_pools(self) -> list[Pool]:
        """Return the pool of slots, if the model has states: sequences own some, and snapshots own some."""
        if (states := self.states) is None:
            return []
        snapshots = [(f"the snapshot after serial {serial}", [slot]) for serial, slot in states.snapshots.items()]
        owned = [(seq, states.slots_of(seq)) for seq in states.owned]
        return [Pool("slot", range(1, states.num_slots + 1), states.free_slots, [*owned, *snapshots])]

    def host_pools(self) -> list[Pool]:
        """Return the pools of host memory; the owners of the first are swapped out."""
        return [] if self.swap_space is None else self.swap_space.pools()

    def blocks_beside(self) -> Mapping[int, int]:
        """Return for each cached block of other groups the serial under which it is found."""
        return {} if self.prefix_cache.others is None else self.prefix_cache.others.serial_of

    def serials_beside(self) -> list[int]:
        """Return the serials under which blocks of other groups, or snapshots, are found."""
        others, states = self.prefix_cache.others, self.states
        return [*(() if others is None else others.blocks_of), *(() if states is None else states.snapshots)]


def at_most(num_blocks: int, kind: Kind) -> int:
    """Return how many of `num_blocks` blocks a sequence holds at the same time in a group of this kind."""
    return num_blocks if kind.max_held is None else min(num_blocks, kind.max_held)


def last_first(tables: Collection["array[int]"]) -> list[int]:
    """Return the blocks of tables, one of each group, without null blocks, the last ones first."""
    by_place = zip(*tables, strict=False)  # an interrupt may have left one longer than another
    return [block_id for blocks in by_place for block_id in blocks if block_id != NULL_BLOCK][::-1]


def take_before(tables: list["array[int]"], stop: int) -> list[int]:
    """Replace the blocks before place `stop` by the null block, and return them, the last ones first."""
    first = stop
    while first and tables[0][first - 1] != NULL_BLOCK:  # only null blocks come before a null block
        first -= 1
    taken = last_first([table[first:stop] for table in tables])
    for table in tables:
        table[first:stop] = array("i", [NULL_BLOCK] * (stop - first))
    return taken
