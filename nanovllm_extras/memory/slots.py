"""Which sequence owns which state? One slot of the pool for each running sequence, beside its blocks.

A layer with a recurrent state keeps one matrix for each sequence, whatever the sequence's length. So a sequence needs
blocks, whose number grows, and one slot, which it owns from its admission on. Blocks and slot come and go together:

    admission     needs a slot, and blocks for all tokens. A request for n samples needs n slots
    fork          the child gets a slot of its own, and the parent's state is copied to it. K and V are shared: a state
                  is overwritten by each token, so it cannot be
    preemption    frees both. The sequence is computed again, from a prefix hit or from a state of zeros. With swap, its
                  K, V and state are copied to host memory and back (`swap_space.py`)
    end, abort    free both

A and its child B, with blocks of 4. The chunk with the last token of A's prompt is scheduled in step 1. Step 1 computes
the state after the prompt, so the copy is the first thing that step 2 does:

    step 1    A prefills positions 4 … 5    A: blocks [7, 2], slot 1      then B: blocks [7, 2], slot 2
    step 2    copy of slot 1 to slot 2      A decodes position 6          B decodes position 6

**Snapshots.** Prefix hits need the state at the end of the prefix, which later tokens overwrite. So the state is copied
to a slot of its own, a *snapshot*, where prefixes are likely to end:

    end of a prompt    at its last full block: the same prompt may come again, or be continued
    branch             where a prompt leaves the cached blocks of earlier prompts: others may leave them there too
    interval           after every `snapshot_interval` blocks of a sequence (the option `state_snapshot_interval`). It
                       replaces the sequence's last one of this kind, so that a long sequence does not evict all others

Chunks and drafts end at these points. A hit is the longest prefix that has both cached blocks and a snapshot. The
snapshot is copied to the slot of the new sequence. With blocks of 4:

    A, 10 tokens             chunks [0, 8) and [8, 10)       after the first, slot 1 is copied to slot 2
    B, A's first 9           finds 8 tokens: 2 blocks, and the snapshot
    C, A's first 4 and 2     finds none: 4 tokens have a cached block, but no snapshot. C takes one there
    D, A's first 4 and 3     finds 4 tokens

Snapshots use slots that no sequence needs. If none is free, the least recently used snapshot is dropped. A snapshot is
also dropped when its block is evicted. The prefix cache learns only known tokens, so a block of outputs may be
registered later than the step that fills it is scheduled. Its snapshot is taken then, before another step changes the
state (`BlockManager.settle`).

**Drafts.** The K and V of a rejected draft are overwritten later. A state is changed by each token, so a state that has
seen a rejected draft cannot be used. So each draft reads the state after the token before it, and writes to a slot of
its own:

    position                6     7     8     9       the sequence owns slot 2; its drafts d1 d2 d3 get 5, 6 and 7
    the step computes       t6    d1    d2    d3
    reads the state in      2     2     5     6
    writes the state to     2     5     6     7

If d1 is right and d2 is wrong, slot 5 has the state after the accepted tokens. The sequence owns slot 5 from then on,
and 2, 6 and 7 are free. No state is copied and no token is computed again. The inputs that a layer's short convolution
keeps are in the same slots, so they are rolled back too.

The alternative is one copy of the state before the step, from which the accepted tokens are computed again. It needs
one more slot instead of one for each draft. But it copies a state in every step with drafts (18.6 MiB in
Qwen3.5-0.8B), and a rejected draft costs another forward pass. The slots of drafts cost little: drafts are made when
few sequences run, in slots that no sequence needs, and the least recently used snapshots are dropped for them. A
sequence gets only as many drafts as there are slots.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.prefix_cache import ROOT_SERIAL, PrefixCache
from nanovllm.sequence import CachedBlock
from nanovllm_extras.records.full_observer import Observer
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.moves import Pair

NULL_SLOT = 0  # no sequence owns it


@dataclass(frozen=True)
class StateStats:
    """How the slots of the pool are used at this moment."""

    num_slots: int
    num_running: int
    """Slots that sequences own."""
    num_snapshots: int
    """Slots that hold snapshots. The others are free."""
    bytes_per_slot: int


class Slots:
    """Slots 1 … `num_slots` for sequences and snapshots. No sequence owns slot 0, the null slot.

    A part of the prefix cache (`prefix_cache.py`): `snapshots` are found by the serial number of the block before them.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        observer: Observer,
        takes_snapshots: bool = True,
        snapshot_interval: int = 0,
        bytes_per_slot: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.observer = observer
        self.takes_snapshots = takes_snapshots
        self.snapshot_interval = snapshot_interval  # blocks; 0 takes no snapshots at intervals
        self.bytes_per_slot = bytes_per_slot  # for the statistics
        self.free_slots = list(range(num_slots, 0, -1))
        self.snapshots: OrderedDict[int, int] = OrderedDict()  # serial of a block -> slot, least recently used first
        self.owned: dict[Sequence, int] = {}  # of each running sequence: the slot with its state
        self.drafts: dict[Sequence, list[int]] = {}  # of sequences with drafts in a step: a slot for each
        self.copies_for_next: list[Pair] = []  # (source, destination): what the next step copies before all else
        self._copies_for_this: list[Pair] = []
        self._branches: dict[Sequence, int] = {}  # of each: the tokens whose blocks were cached at admission
        self._regular: dict[Sequence, int] = {}  # the serial of the last snapshot that each has taken at an interval

    @property
    def stats(self) -> StateStats:
        return StateStats(self.num_slots, len(self.owned), len(self.snapshots), self.bytes_per_slot)

    @property
    def num_free_slots(self) -> int:
        """The number of slots that sequences can take. Some may hold snapshots."""
        return self.num_slots - len(self.owned) - sum(map(len, self.drafts.values()))

    # ---- sequences come and go

    def has_room_for(self, seq: Sequence) -> bool:
        """Return whether there are slots for `seq` and its children.

        The children of running sequences that have not started yet will need slots too.
        """
        num_promised = sum([len(other.children) for other in self.owned])
        return 1 + len(seq.children) + num_promised <= self.num_free_slots

    def admit(self, seq: Sequence, num_found: int) -> None:
        """Give `seq` a slot, with the snapshot after its computed tokens if it has some.

        num_found: its first tokens that have cached blocks, with or without a snapshot
        """
        self.note_branch(seq, num_found)
        if not seq.num_computed_tokens:
            self._take(seq, NULL_SLOT)
            return
        self.snapshots.move_to_end(seq.parent_serial)
        source = self.snapshots[seq.parent_serial]
        # if this drops the last snapshot, which is the one that was hit, its slot already holds the right state
        self._copies_for_this.append((source, self._take(seq, source)))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give `child` a slot, and copy the state of `parent` before the next step."""
        source = self.owned[parent]
        self.copies_for_next.append((source, self._take(child, source)))

    def copy_out(self, seq: Sequence, host_slot: int) -> None:
        """Copy the state of `seq`, which is about to be preempted, to host memory before this step computes."""
        self._copies_for_this.append((self.owned[seq], host_slot))
        self.observer.on_move_slot(seq, host_slot)

    def copy_in(self, seq: Sequence, host_slot: int) -> None:
        """Give `seq` a slot, and copy its state back from host memory before this step computes."""
        self._copies_for_this.append((host_slot, self._take(seq, host_slot)))

    def free(self, seq: Sequence) -> None:
        """Free the slots of `seq`, if it has any."""
        self.free_slots += self.drafts.pop(seq, ())
        if seq in self.owned:  # a waiting sequence has none
            self.free_slots.append(self.owned.pop(seq))
        self._branches.pop(seq, None)
        self._regular.pop(seq, None)

    def _take(self, seq: Sequence, source: int) -> int:
        """Give `seq` a slot, to which the state in the slot `source` will be copied. Returns the slot."""
        self.owned[seq] = slot = self._take_free()
        self.observer.on_take_slot(seq, slot, source)
        return slot

    def _take_free(self) -> int:
        """Return a free slot, if necessary by dropping the least recently used snapshot."""
        if not self.free_slots:
            self._drop(next(iter(self.snapshots)), "slot")
        return self.free_slots.pop()

    # ---- snapshots

    def note_branch(self, seq: Sequence, num_tokens: int) -> None:
        """Let a snapshot be due after these tokens of `seq`, whose blocks others have computed before."""
        self._branches[seq] = max(num_tokens, self._branches.get(seq, 0))

    def next_cut(self, seq: Sequence) -> int:
        """Return how many tokens of `seq` are computed when its next snapshot is due, or the most that it may have."""
        if not self.takes_snapshots:
            return seq.max_num_tokens
        num_computed, due = seq.num_computed_tokens, [self._end_of(seq), self._branches.get(seq, 0)]
        if span := self.snapshot_interval * self.block_size:
            due.append((num_computed // span + 1) * span)
        return min([one for one in due if one > num_computed], default=seq.max_num_tokens)

    def is_due(self, seq: Sequence) -> bool:
        """Return whether a snapshot is due after the computed tokens of `seq`."""
        num_computed, span = seq.num_computed_tokens, self.snapshot_interval * self.block_size
        is_regular = span and num_computed % span == 0
        return self.takes_snapshots and bool(is_regular or self._is_special(seq))

    def ends_at_snapshot(self, seq: Sequence) -> bool:
        """Return whether a snapshot is due after the computed tokens of `seq`, and their blocks are registered."""
        return seq.num_computed_tokens == seq.num_registered_blocks * self.block_size and self.is_due(seq)

    def take_snapshot(self, seq: Sequence, block: CachedBlock | None) -> None:
        """Copy the state of `seq`, which ends at a snapshot, before the next step. block: its last, if it is cached"""
        serial = seq.parent_serial
        if serial in self.snapshots:
            self.snapshots.move_to_end(serial)
        elif self.num_free_slots and block is not None:
            if not self._is_special(seq):
                self._drop(self._regular.get(seq, ROOT_SERIAL), "interval")
                self._regular[seq] = serial
            self.snapshots[serial] = slot = self._take_free()
            self.copies_for_next.append((self.owned[seq], slot))
            self.observer.on_snapshot(seq, slot, block.block_id)

    def _end_of(self, seq: Sequence) -> int:
        """Return how many tokens of the prompt of `seq` the same prompt could find in the cache."""
        return (seq.num_prompt_tokens - 1) // self.block_size * self.block_size

    def _is_special(self, seq: Sequence) -> bool:
        return seq.num_computed_tokens in (self._end_of(seq), self._branches.get(seq))

    def _drop(self, serial: int, why: str) -> None:
        """Drop the snapshot at the end of a block, if there is one. `why` is for the observer."""
        if serial in self.snapshots:
            self.free_slots.append(self.snapshots.pop(serial))
            self.observer.on_drop_snapshot(self.free_slots[-1], why)

    # ---- the part of the prefix cache

    def num_usable(self, hits: list[CachedBlock]) -> int:
        return next((i for i in range(len(hits), 0, -1) if hits[i - 1].serial in self.snapshots), 0)

    def registered(self, cache: PrefixCache, seq: Sequence, i: int) -> None:
        """Do nothing: `take_snapshot` is called when the state is known."""

    def forgotten(self, block_id: int, serial: int | None) -> None:
        if serial is not None:
            self._drop(serial, "evicted")

    def forget_all(self) -> None:
        for serial in list(self.snapshots):
            self._drop(serial, "forgotten")

    # ---- drafts

    def take_for_drafts(self, seq: Sequence, count: int) -> None:
        """Take a slot for each draft of `seq`. There must be `count` free slots."""
        self.drafts[seq] = [self._take_free() for _ in range(count)]

    def slots_of(self, seq: Sequence) -> list[int]:
        """Return the slots that the newest token of `seq` and its drafts write to. A draft reads the slot before."""
        return [self.owned[seq], *self.drafts.get(seq, ())]

    def slot_to_read(self, seq: Sequence) -> int:
        """Return the slot that has the state of `seq` between two steps: its own, or one that the next step copies."""
        slot = self.owned[seq]
        for source, destination in reversed(self.copies_for_next):
            if destination == slot:
                slot = source
        return slot

    def rewind(self, seq: Sequence, num_accepted: int) -> None:
        """Let `seq` own the slot with the state after its last accepted draft, and free the others."""
        slots = self.slots_of(seq)
        self.owned[seq] = slots.pop(num_accepted)
        self.free_slots += slots
        del self.drafts[seq]
        if num_accepted:
            self.observer.on_move_slot(seq, self.owned[seq])

    # ---- a step

    def rows_of(self, seqs: Iterable[Sequence]) -> tuple[list[int], list[int]]:
        """Return the slots that the rows of a step write, and those that they read. A draft is a row of its own."""
        if not self.drafts:
            own = [self.owned[seq] for seq in seqs]
            return own, own
        slots: list[int] = []
        sources: list[int] = []
        for seq in seqs:
            rows = self.slots_of(seq)
            slots += rows
            sources += rows[:1] + rows[:-1]
        return slots, sources

    def take_copies(self) -> list[Pair]:
        """Return (source, destination) of all states to be copied before this step computes.

        First come those that were noted before it: forks and snapshots. Then preemptions and admissions, in the order
        of these decisions, because a slot that one sequence gives up may be the next one's.
        """
        copies = self.copies_for_next + self._copies_for_this
        self.copies_for_next, self._copies_for_this = [], []
        return copies

    def put_back(self, copies: list[Pair]) -> None:
        """Let the next step do the copies of a step that is not launched."""
        self.copies_for_next = copies + self.copies_for_next

    def forget_step(self) -> None:
        """Forget all copies, snapshots and owners of slots. An interrupt may have left a slot without either."""
        self.copies_for_next, self._copies_for_this = [], []
        self.forget_all()
        self.owned.clear()
        self.drafts.clear()
        self.free_slots[:] = range(self.num_slots, 0, -1)
