"""Which sequence owns which state? One slot of the pool for each running sequence, beside its blocks.

A layer with a recurrent state keeps one matrix for each sequence, whatever the sequence's length. So a sequence needs
blocks, whose number grows, and one slot, which it owns from its admission on. Blocks and slot come and go together:

    admission     needs a slot, and blocks for all tokens. A request for n samples needs n slots
    fork          the child gets a slot of its own, and the parent's state is copied to it. K and V are shared: a state
                  is overwritten by each token, so it cannot be
    preemption    frees both. The sequence is computed again, from a prefix hit or from a state of zeros. With swap, its
                  K, V and state are copied to host memory and back (`state_swap.py`)
    end, abort    free both

A and its child B, with blocks of 4. The chunk with the last token of A's prompt is scheduled in step 1. Step 1 computes
the state after the prompt, so the copy is the first thing that step 2 does:

    step 1    A prefills positions 4 … 5    A: blocks [7, 2], slot 1      then B: blocks [7, 2], slot 2
    step 2    copy of slot 1 to slot 2      A decodes position 6          B decodes position 6

Prefix hits need the state at the end of the prefix, which later tokens overwrite. So the state is copied to a slot of
its own, a *snapshot*, where prefixes are likely to end:

    end of a prompt    at its last full block: the same prompt may come again, or be continued
    branch             where a prompt leaves the cached blocks of earlier prompts: others may leave them there too
    interval           after every `snapshot_interval` blocks of a sequence (the option `state_snapshot_interval`). It
                       replaces the sequence's last one of this kind, so that a long sequence does not evict all others

Chunks end at these points. A hit is the longest prefix that has both cached blocks and a snapshot. The snapshot is
copied to the slot of the new sequence. With blocks of 4:

    A, 10 tokens             chunks [0, 8) and [8, 10)       after the first, slot 1 is copied to slot 2
    B, A's first 9           finds 8 tokens: 2 blocks, and the snapshot
    C, A's first 4 and 2     finds none: 4 tokens have a cached block, but no snapshot. C takes one there
    D, A's first 4 and 3     finds 4 tokens

Snapshots use slots that no sequence needs. If none is free, the least recently used snapshot is dropped. A snapshot is
also dropped when its block is evicted.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.prefix_cache import ROOT_SERIAL, CachedBlock, PrefixCache
from nanovllm.scheduler import Step
from nanovllm_extras.extended_scheduler import ExtendedScheduler
from nanovllm_extras.full_observer import Observer
from nanovllm_extras.invariants import Pool
from nanovllm_extras.records import Moves

NULL_SLOT = 0  # no sequence owns it
BlockCopies = list[tuple[int, int]]
SlotCopies = list[tuple[int, int]]


@dataclass(frozen=True)
class StateStats:
    """How the slots of the pool are used at this moment."""

    num_slots: int
    num_running: int
    """Slots that sequences own."""
    num_snapshots: int
    """Slots that hold snapshots. The others are free."""
    bytes_per_slot: int


class SnapshotCache(PrefixCache):
    """Finds a prefix only as far as there is a snapshot of the state at its end."""

    observer: Observer

    def __init__(self, block_size: int, observer: Observer, is_enabled: bool, free_slots: list[int]) -> None:
        super().__init__(block_size, observer, is_enabled)
        self.free_slots = free_slots  # of the pool, which sequences take from too
        self.snapshots: OrderedDict[int, int] = OrderedDict()  # serial of a block -> slot, least recently used first
        self.num_found = 0  # blocks that the newest call of `find` has found, with or without a snapshot

    def find(self, seq: Any) -> list[CachedBlock]:
        hits = super().find(seq)
        self.num_found = len(hits)
        while hits and hits[-1].serial not in self.snapshots:
            hits.pop()
        return hits

    def forget(self, block_id: int) -> None:
        cached = self._by_id.get(block_id)
        super().forget(block_id)
        if cached is not None:
            self.drop(cached.serial, "evicted")

    def drop(self, serial: int, why: str) -> None:
        """Drop the snapshot at the end of a block, if there is one. `why` is for the observer."""
        if serial in self.snapshots:
            self.free_slots.append(self.snapshots.pop(serial))
            self.observer.on_drop_snapshot(self.free_slots[-1], why)

    def last_block(self, seq: Any) -> CachedBlock | None:
        """Return the last full block of `seq` if it can still be found: this step may have evicted it again."""
        cached = self._by_hash.get(seq.block_hashes[seq.num_registered_blocks - 1])
        return cached if cached is not None and cached.serial == seq.parent_serial else None

    def take_slot(self) -> int:
        """Return a free slot, if necessary by dropping the least recently used snapshot."""
        if not self.free_slots:
            self.drop(next(iter(self.snapshots)), "slot")
        return self.free_slots.pop()

    def serials_beside(self) -> Iterable[int]:
        """Return the serials of the blocks that have a snapshot."""
        return self.snapshots

    def forget_beside(self) -> None:
        for serial in list(self.snapshots):
            self.drop(serial, "forgotten")


class StateBlockManager(BlockManager):
    """The core's block manager with slots 1 … `num_slots`. No sequence owns slot 0, the null slot."""

    observer: Observer
    prefix_cache: SnapshotCache

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        observer: Observer | None = None,
        *,
        num_slots: int,
        bytes_per_slot: int = 0,
        snapshot_interval: int = 0,
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching, observer or Observer())
        self.num_slots = num_slots
        self.bytes_per_slot = bytes_per_slot  # for the statistics
        self.snapshot_interval = snapshot_interval  # blocks; 0 takes no snapshots at intervals
        free_slots = list(range(num_slots, 0, -1))
        self.prefix_cache = SnapshotCache(block_size, self.observer, enable_prefix_caching, free_slots)
        self._slots: dict[Any, int] = {}  # of each sequence that owns blocks
        self._branches: dict[Any, int] = {}  # of these sequences: the tokens whose blocks were cached at admission
        self._regular: dict[Any, int] = {}  # the serial of the last snapshot that each has taken at an interval
        self._copies_for_this: SlotCopies = []
        self._copies_for_next: SlotCopies = []

    @property
    def num_snapshots(self) -> int:
        return len(self.prefix_cache.snapshots)

    @property
    def state_stats(self) -> StateStats:
        return StateStats(self.num_slots, len(self._slots), self.num_snapshots, self.bytes_per_slot)

    @property
    def num_free_slots(self) -> int:
        """The number of slots that sequences can take. Some may hold snapshots."""
        return self.num_slots - len(self._slots)

    def slot_pools(self) -> list[Pool]:
        """Return what `check_invariants` needs to know of the slots: sequences own some, and snapshots own some."""
        cache = self.prefix_cache
        snapshots = [(f"the snapshot after serial {serial}", [slot]) for serial, slot in cache.snapshots.items()]
        owned = [(seq, self.slots_of(seq)) for seq in self._slots]
        return [Pool("slot", range(1, self.num_slots + 1), cache.free_slots, owned + snapshots)]

    def slots_of(self, seq: Any) -> list[int]:
        """Return all slots of `seq`, which must be running."""
        return [self._slots[seq]]

    def slot_of(self, seq: Any) -> int:
        """Return the slot with the state of `seq`, which must be running."""
        return self._slots[seq]

    def try_admit(self, seq: Any, num_reserved: int = 0) -> bool:
        """Give `seq` a slot if there is one, and room for all of its tokens. False, and no change, otherwise."""
        if not self.has_slots_for(seq) or not super().try_admit(seq, num_reserved):
            return False
        self._branches[seq] = self.prefix_cache.num_found * self.block_size
        if not seq.num_computed_tokens:
            self._take_slot(seq, NULL_SLOT)
            return True
        self.prefix_cache.snapshots.move_to_end(seq.parent_serial)
        source = self.prefix_cache.snapshots[seq.parent_serial]
        # if this drops the last snapshot, which is the one that was hit, its slot already holds the right state
        self._copies_for_this.append((source, self._take_slot(seq, source)))
        return True

    def has_slots_for(self, seq: Any) -> bool:
        """Return whether there are slots for `seq` and its children.

        The children of running sequences that have not started yet will need slots too.
        """
        num_promised = sum([len(other.children) for other in self._slots])
        return 1 + len(seq.children) + num_promised <= self.num_free_slots

    def copy_out(self, seq: Any, host_slot: int) -> None:
        """Copy the state of `seq`, which is about to be preempted, to host memory before this step computes."""
        self._copies_for_this.append((self._slots[seq], host_slot))
        self.observer.on_move_slot(seq, host_slot)

    def copy_in(self, seq: Any, host_slot: int) -> None:
        """Give `seq` a slot, and copy its state back from host memory before this step computes."""
        self._copies_for_this.append((host_slot, self._take_slot(seq, host_slot)))

    def fork(self, parent: Any, child: Any) -> None:
        """Let `child` share the blocks of `parent`, and copy the state before the next step."""
        super().fork(parent, child)
        source = self._slots[parent]
        self._copies_for_next.append((source, self._take_slot(child, source)))

    def _take_slot(self, seq: Any, source: int) -> int:
        """Give `seq` a slot, to which the state in the slot `source` will be copied. Returns the slot."""
        self._slots[seq] = slot = self.prefix_cache.take_slot()
        self.observer.on_take_slot(seq, slot, source)
        return slot

    def free(self, seq: Any) -> None:
        super().free(seq)
        if seq in self._slots:  # a waiting sequence has none
            self.prefix_cache.free_slots.append(self._slots.pop(seq))
        self._branches.pop(seq, None)
        self._regular.pop(seq, None)

    def next_snapshot(self, seq: Any) -> int:
        """Return how many tokens of `seq` are computed when its next snapshot is due, or the most that it may have."""
        num_computed, due = seq.num_computed_tokens, [self.end_of(seq), self._branches.get(seq, 0)]
        if span := self.snapshot_interval * self.block_size:
            due.append((num_computed // span + 1) * span)
        return min([one for one in due if one > num_computed], default=seq.max_num_tokens)

    def end_of(self, seq: Any) -> int:
        """Return how many tokens of the prompt of `seq` the same prompt could find in the cache."""
        return (seq.num_prompt_tokens - 1) // self.block_size * self.block_size

    def is_due(self, seq: Any) -> bool:
        """Return whether a snapshot is due after the computed tokens of `seq`."""
        num_computed, span = seq.num_computed_tokens, self.snapshot_interval * self.block_size
        is_regular = span and num_computed % span == 0
        return self.prefix_cache.is_enabled and bool(is_regular or self._is_special(seq))

    def _is_special(self, seq: Any) -> bool:
        return seq.num_computed_tokens in (self.end_of(seq), self._branches.get(seq))

    def ends_at_snapshot(self, seq: Any) -> bool:
        """Return whether a snapshot is due after the computed tokens of `seq`, and their blocks are registered."""
        return self.is_due(seq) and seq.num_computed_tokens == seq.num_registered_blocks * self.block_size

    def take_snapshot(self, seq: Any) -> None:
        """Copy the state of `seq` before the next step, if this step's chunk ends where a snapshot is due."""
        if not self.ends_at_snapshot(seq):
            return
        snapshots, serial = self.prefix_cache.snapshots, seq.parent_serial
        if serial in snapshots:
            snapshots.move_to_end(serial)
        elif self.num_free_slots and (block := self.prefix_cache.last_block(seq)):
            if not self._is_special(seq):
                self.prefix_cache.drop(self._regular.get(seq, ROOT_SERIAL), "interval")
                self._regular[seq] = serial
            snapshots[serial] = slot = self.prefix_cache.take_slot()
            self._copies_for_next.append((self._slots[seq], slot))
            self.observer.on_snapshot(seq, slot, block.block_id)

    def take_copies(self) -> Moves:
        """Return what this step copies before it computes: blocks, and states.

        `schedule` calls this method before it forks, because a fork copies the state that this step computes.
        """
        copies = super().take_copies()
        return Moves(copies, state_copies=self.take_state_copies() + self.take_copies_for_this())

    def take_state_copies(self) -> SlotCopies:
        """Return (source, destination) of states to be copied before the step that is scheduled next."""
        copies, self._copies_for_next = self._copies_for_next, []
        return copies

    def take_copies_for_this(self) -> SlotCopies:
        """Return (source, destination) of states to be copied before this step computes: preemptions, then admissions.

        A slot that one sequence gives up may be the next one's, so the copies are in the order of these decisions.
        """
        copies, self._copies_for_this = self._copies_for_this, []
        return copies

    def forget_slots(self) -> None:
        """Forget all copies, snapshots and owners of slots. An interrupt may have left a slot without either."""
        self._copies_for_next, self._copies_for_this = [], []
        self.prefix_cache.forget_beside()
        self._slots.clear()
        self.prefix_cache.free_slots[:] = range(self.num_slots, 0, -1)

    def put_back(self, copies: SlotCopies) -> None:
        """Keep copies that no step has done for the next step."""
        self._copies_for_next = copies + self._copies_for_next


class StateScheduler(ExtendedScheduler):
    """Adds the slots of the step's sequences to the step. Its block manager is a `StateBlockManager`."""

    block_manager: StateBlockManager

    def share_of(self, seq: Any, budget: int) -> int:
        """Return the number of tokens of `seq` that the step computes: a chunk ends where a snapshot is due."""
        num_tokens = super().share_of(seq, budget)
        if not self.block_manager.prefix_cache.is_enabled:
            return num_tokens
        return min(num_tokens, self.block_manager.next_snapshot(seq) - seq.num_computed_tokens)

    def schedule(self) -> Step:
        step, blocks = super().schedule(), self.block_manager
        moves: Any = step.copies
        if not step.chunks:
            blocks.put_back(moves.state_copies)
            return step
        seqs: list[Any] = [seq for seq, _, _ in step.chunks]
        for seq in seqs:
            blocks.take_snapshot(seq)
        moves.slots = moves.sources = [blocks.slot_of(seq) for seq in seqs]
        return step

    def forget_steps(self) -> None:
        """Forget all slots, before all sequences are freed: the failed step may not have copied their states."""
        super().forget_steps()
        self.block_manager.forget_slots()
