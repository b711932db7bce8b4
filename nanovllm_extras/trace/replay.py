"""`Replay` applies the events of a recording one by one, which reconstructs the state of the pool at each step.

It has its own copy of blocks and sequences, and makes no decisions. It raises an error if an event contradicts the
state, for example if a block is taken that is not the first free one, or if a count differs from the engine's. The page
does the same in JavaScript (`viewer/replay.js`). Tests compare both with the block manager.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from nanovllm_extras.trace.recording import Header, Miss, NewSequence, State

NULL_BLOCK = 0  # replaces a block in a block table once the block is behind the window of all layers
EVENTS = {
    *(
        "start",
        "add",
        "fork",
        "tokens",
        "finish",
        "wait",
        "idle",
        "admit",
        "miss",
        "preempt",
        "draft",
        "schedule",
        "verify",
        "update",
        "roll_back",
    ),
    *("take", "share", "copy", "load", "give_back", "free", "register", "forget", "reset"),
    *("slot", "move", "snapshot", "drop"),
}


class ReplayError(ValueError):
    """The recording contradicts itself."""


@dataclass
class ReplayedSequence:
    """One sequence's state, as in `sequence.py`, without the tokens in flight."""

    number: int
    request: str
    sample: int
    tokens: list[int]
    num_prompt_tokens: int
    max_num_tokens: int
    status: str = "waiting"
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)  # of group 0, if layers form groups
    window_tables: list[list[int]] = field(default_factory=list)  # of the other groups; entries behind the end are null
    host_block_ids: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # draft tokens after `tokens`, while a step verifies them
    slot: int = 0  # of its recurrent state; 0 if it does not own one, negative if it is in host memory
    misses: list[Miss] = field(default_factory=list)  # why it computes tokens of its prompt
    num_final_tokens: int | None = None  # set when it finishes
    finish_reason: str | None = None
    # what the request asks for, so that it can be repeated with other options of the engine; older files lack it
    params: dict[str, object] = field(default_factory=dict)  # fields of its `SamplingParams` that are not the defaults
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None  # the name of its LoRA adapter
    arrived: int | None = None  # microseconds since the recording began

    @property
    def tables(self) -> list[list[int]]:
        """The block tables of all groups. Most models have one group."""
        return [self.block_table, *self.window_tables]

    @property
    def blocks(self) -> list[int]:
        """The blocks of all groups, and null blocks. They are freed in reverse order: those of group 0 first."""
        if not self.window_tables:
            return self.block_table
        places = range(max(map(len, self.tables)))
        by_place = [[table[i] for table in self.window_tables if i < len(table)] for i in places]
        return [*[block_id for blocks in by_place for block_id in blocks], *self.block_table]

    def clear_tables(self) -> None:
        self.block_table, self.window_tables = [], [[] for _ in self.window_tables]


class Replay:
    """The state after the events that were applied. `step` is the number of the newest step among these events."""

    def __init__(self, header: Header) -> None:
        self.block_size = header["block_size"]
        self.num_groups = header.get("num_groups", 1)  # of layers, each of which has block tables of its own
        self.has_own_blocks = header["config"].get("has_own_blocks", False)
        self.step = header["num_steps_before"]
        self.seqs: dict[int, ReplayedSequence] = {}
        self.in_flight: dict[int, list[int]] = dict(header["in_flight"])
        self.decodes: list[int] = []
        self.cached: dict[int, tuple[str, int]] = {}  # block id -> (hash, serial number)
        self.window_blocks: set[int] = set()  # the cached ones of groups with a window
        self.loaded: dict[int, str] = {}  # block whose contents came from the K/V store -> name of the tier
        self.slots: dict[int, int] = {}  # slot -> the sequence that owns it; negative slots are in host memory
        self.snapshots: dict[int, tuple[int, int]] = {}  # slot -> the block at whose end the state was, its tokens
        # copies of states that are decided and not done: the newest step at that moment, source, destination
        self.due_copies: list[tuple[int, int, int]] = []
        self._empty_pool(header["num_blocks"])
        if header["state"] is not None:
            self._load_state(header["state"])

    def apply(self, event: list) -> None:
        """Apply one event. Raises ReplayError if it is unknown or contradicts the events before it."""
        if event[0] not in EVENTS:
            raise ReplayError(f"step {self.step}: unknown event {event!r}")
        try:
            getattr(self, f"_{event[0]}")(*event[1:])
        except ReplayError:
            raise
        except (KeyError, IndexError, TypeError, ValueError) as error:  # it names a missing sequence or block
            raise ReplayError(f"step {self.step}: {event!r} does not fit: {error!r}") from error

    def _check(self, holds: bool, message: str) -> None:
        if not holds:
            raise ReplayError(f"step {self.step}: {message}")

    def _load_state(self, state: State) -> None:
        self.free = OrderedDict.fromkeys(state["free"])
        self.cached = {block_id: (block_hash, serial) for block_id, block_hash, serial, _ in state["cached"]}
        self.loaded = dict(state["loaded"])
        self.seqs = {about["number"]: ReplayedSequence(**about) for about in state["seqs"]}
        by_serial = {one[1]: one for one in self.cached.values()}
        for serial, block_ids in state.get("window_cached", []):
            self.cached |= dict.fromkeys(block_ids, by_serial[serial])
            self.window_blocks.update(block_ids)
        for seq in self.seqs.values():
            seq.window_tables = self._empty_tables()
        for number, tables in state.get("window_tables", []):
            self.seqs[number].window_tables = tables
        for seq in self.seqs.values():
            for block_id in seq.blocks:
                self._count_owner(block_id)
        for number, slot in state.get("slots", []):
            self._give_slot(number, slot)
        self.snapshots = {slot: (block_id, num_tokens) for slot, block_id, num_tokens in state.get("snapshots", [])}
        self.due_copies = [(self.step, source, slot) for source, slot in state.get("state_copies", [])]

    # ---- sequences

    def _start(self, num_blocks: int) -> None:
        self._empty_pool(num_blocks)
        self.in_flight.clear()
        for seq in self.seqs.values():
            seq.status, seq.host_block_ids, seq.num_computed_tokens = "finished", [], 0
            seq.clear_tables()
            seq.slot = 0
        self.slots.clear()
        self.snapshots.clear()
        self.due_copies.clear()

    def _empty_pool(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * (num_blocks + 1)
        self.free = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self.cached = {}
        self.window_blocks = set()
        self.loaded = {}

    def _empty_tables(self) -> list[list[int]]:
        """Return the block tables of a sequence without blocks, for the groups with a window."""
        return [[] for _ in range(self.num_groups - 1)]

    def _add(self, number: int, time: int, about: NewSequence) -> None:
        self.seqs[number] = ReplayedSequence(number, **about, arrived=time, window_tables=self._empty_tables())

    def _fork(self, parent: int, number: int, sample: int, num_known: int, num_computed: int, time: int) -> None:
        one = self.seqs[parent]
        self.seqs[number] = ReplayedSequence(
            number,
            one.request,
            sample,
            one.tokens[:num_known],
            one.num_prompt_tokens,
            one.max_num_tokens,
            num_computed_tokens=num_computed,
            window_tables=self._empty_tables(),
            params=one.params,
            priority=one.priority,
            cache_salt=one.cache_salt,
            adapter=one.adapter,
            arrived=one.arrived,
        )

    def _tokens(self, number: int, first: int, token_ids: list[int]) -> None:
        tokens = self.seqs[number].tokens
        self._check(first <= len(tokens), f"sequence {number} has a gap before token {first}")
        tokens[first:] = token_ids

    def _finish(self, number: int, reason: str, stop: int | str | None, num_tokens: int, time: int) -> None:
        seq = self.seqs[number]
        self._check(not any(seq.tables), f"sequence {number} has finished and owns blocks")
        seq.status, seq.finish_reason, seq.num_final_tokens, seq.host_block_ids = "finished", reason, num_tokens, []

    # ---- decisions

    def _wait(self, number: int, code: str, num_needed: int, num_free: int) -> None:
        self._check(not number or self.seqs[number].status == "waiting", f"sequence {number} waits and runs")

    def _idle(self, number: int, code: str) -> None:
        self._check(self.seqs[number].status == "running", f"sequence {number} is idle, and does not run")

    def _admit(self, number: int, code: str, num_computed: int) -> None:
        seq = self.seqs[number]
        seq.status, seq.num_computed_tokens, seq.host_block_ids = "running", num_computed, []

    def _miss(self, number: int, misses: list[Miss]) -> None:
        """Keep why tokens of the prompt are computed. Together with the hits, the spans are the whole prompt."""
        seq = self.seqs[number]
        starts, ends = [miss["start"] for miss in misses], [miss["end"] for miss in misses]
        self._check(
            starts == [seq.num_computed_tokens, *ends[:-1]] and ends[-1:] == [seq.num_prompt_tokens],
            f"the misses of sequence {number} are not the rest of its prompt",
        )
        seq.misses = misses

    def _preempt(self, number: int, needy: int, num_computed: int, host_block_ids: list[int]) -> None:
        seq = self.seqs[number]
        seq.status, seq.num_computed_tokens, seq.host_block_ids = "waiting", num_computed, host_block_ids

    def _schedule(
        self,
        step: int,
        time: int,
        decodes: list[int] | int,
        chunks: list[list],
        samples: list[int] | int,
        moves: list,
        num_free: int,
        num_stored: int,
    ) -> None:
        self._check(step == self.step + 1, f"step {step} comes next")
        self.step = step
        self.decodes = self.decodes if isinstance(decodes, int) else decodes
        for number, start, num_new in [*((number, None, 1) for number in self.decodes), *(c[:3] for c in chunks)]:
            seq = self.seqs[number]
            self._check(start in (None, seq.num_computed_tokens), f"the chunk of sequence {number} begins elsewhere")
            seq.num_computed_tokens += num_new
        self.in_flight[step] = self.decodes if isinstance(samples, int) else samples
        self._copy_states([] if len(moves) < 3 else moves[2])
        self._compare(num_free, num_stored)

    def _compare(self, num_free: int, num_stored: int) -> None:
        self._check(len(self.free) == num_free, f"{len(self.free)} blocks are free, the engine says {num_free}")
        self._check(self.num_stored == num_stored, f"{self.num_stored} tokens are stored, the engine says {num_stored}")

    def _draft(self, number: int, token_ids: list[int]) -> None:
        self.seqs[number].drafts = token_ids

    def _verify(self, number: int, num_drafts: int, num_accepted: int, block_ids: list[int]) -> None:
        """Apply the result of verification: the newest step samples one token more for each accepted draft."""
        seq = self.seqs[number]
        seq.drafts = []
        seq.num_computed_tokens -= num_drafts - num_accepted
        for block_id in block_ids:
            table = next((table for table in seq.tables if table[-1:] == [block_id]), seq.block_table)
            self._check(table.pop() == block_id, f"block {block_id} is not the last of sequence {number}")
            self._disown(block_id)
        if num_accepted:
            samples = self.in_flight[self.step]
            self.in_flight[self.step] = [i for i in samples for _ in range(num_accepted + 1 if i == number else 1)]

    def _update(self, step: int, time: int, token_ids: list[int]) -> None:
        for number, token_id in zip(self.in_flight.pop(step), token_ids, strict=True):
            if not number:  # it had finished before the recording began
                continue
            seq = self.seqs[number]
            if len(seq.tokens) != seq.num_final_tokens:
                seq.tokens.append(token_id)

    def _roll_back(self, time: int) -> None:
        self.in_flight.clear()
        self.due_copies.clear()

    # ---- blocks

    def _take(self, number: int, block_id: int, is_evicted: int, group: int = 0, place: int | None = None) -> None:
        first = next(iter(self.free), None)
        is_next = block_id in self.free if self.has_own_blocks else first == block_id
        self._check(is_next, f"block {block_id} is taken, and block {first} is the first free one")
        self._check((block_id in self.cached) == bool(is_evicted), f"block {block_id} is evicted: {bool(is_evicted)}")
        self.free.pop(block_id, None)
        self.loaded.pop(block_id, None)
        self._own(number, block_id, group, place)

    def _share(self, number: int, block_id: int, group: int = 0, place: int | None = None) -> None:
        self.free.pop(block_id, None)
        self._own(number, block_id, group, place)

    def _own(self, number: int, block_id: int, group: int, place: int | None) -> None:
        """Append a block to a block table. In a group with a window, null blocks fill the entries before `place`."""
        seq = self.seqs[number]
        table = seq.tables[group]
        if place is not None:
            self._check(len(table) <= place, f"sequence {number} has an entry {place} in group {group} already")
            table += [NULL_BLOCK] * (place - len(table))
        table.append(block_id)
        self._count_owner(block_id)
        if seq.status == "waiting":  # a fork; or a sequence whose `admit` comes next
            seq.status = "running"

    def _count_owner(self, block_id: int) -> None:
        """Add one to a block's reference count. The null block has no owners and is skipped."""
        if block_id != NULL_BLOCK:
            self.ref_counts[block_id] += 1

    def _copy(self, number: int, source: int, destination: int, group: int = 0) -> None:
        """Replace the source by the destination, which the `take` before has put at the end of the block table."""
        seq = self.seqs[number]
        table = seq.tables[group]
        self._check(table.pop() == destination, f"block {destination} is a copy, and was not taken")
        place = seq.num_computed_tokens // self.block_size
        self._check(table[place] == source, f"sequence {number} does not write to block {source}")
        table[place] = destination
        self._disown(source)

    def _load(self, number: int, num_tokens: int, by_tier: Mapping[str, list[int]]) -> None:
        """Note blocks that the K/V store fills before the step. `take` has put them in the block tables."""
        tables = self.seqs[number].tables
        for tier, block_ids in by_tier.items():
            for block_id in block_ids:
                owned = any(block_id in table for table in tables)
                self._check(owned, f"block {block_id} is loaded for sequence {number}, which does not own it")
                self.loaded[block_id] = tier

    def _give_back(self, number: int, block_ids: list[int]) -> None:
        seq = self.seqs[number]
        for block_id in block_ids:
            table = next((table for table in seq.tables if block_id in table), seq.block_table)
            self._check(block_id in table, f"sequence {number} gives back block {block_id}, and does not own it")
            table[table.index(block_id)] = NULL_BLOCK
            self._disown(block_id)

    def _free(self, number: int) -> None:
        seq = self.seqs[number]
        for block_id in reversed(seq.blocks):
            self._disown(block_id)
        if seq.slot > 0 or seq.status == "waiting":  # else `seq` is being preempted, and keeps its slot in host memory
            self._leave_slot(seq)
        seq.clear_tables()
        seq.num_computed_tokens, seq.status = 0, "waiting"
        seq.host_block_ids, seq.drafts = [], []

    def _disown(self, block_id: int) -> None:
        if block_id == NULL_BLOCK:
            return
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free[block_id] = None
            self.free.move_to_end(block_id, last=block_id in self.cached)

    def _register(self, number: int, block_id: int, block_hash: str, serial: int, group: int = 0) -> None:
        self._check(block_id in self.seqs[number].tables[group], f"sequence {number} does not own block {block_id}")
        self.cached[block_id] = block_hash, serial
        if group:
            self.window_blocks.add(block_id)

    def _forget(self, block_id: int) -> None:
        del self.cached[block_id]
        self.window_blocks.discard(block_id)

    def _reset(self) -> None:
        """Forget all blocks, except those of groups with a window: a `forget` for each of them follows."""
        self.cached = {block_id: one for block_id, one in self.cached.items() if block_id in self.window_blocks}

    # ---- slots of recurrent states

    def _slot(self, number: int, slot: int, source: int) -> None:
        self._check(not self._is_used(slot), f"sequence {number} takes slot {slot}, which is in use")
        seq = self.seqs[number]
        self._check(seq.slot == min(0, source), f"sequence {number} takes a slot and owns slot {seq.slot}")
        self._leave_slot(seq)  # in host memory
        self._give_slot(number, slot)
        if source:
            self.due_copies.append((self.step, source, slot))

    def _move(self, number: int, slot: int) -> None:
        """Replace the slot of a sequence by that of its last accepted draft, or by one in host memory."""
        seq = self.seqs[number]
        self._check(seq.slot > 0, f"sequence {number} moves to slot {slot}, and owns no slot of the pool")
        self._check(not self._is_used(slot), f"sequence {number} moves to slot {slot}, which is in use")
        if slot < 0:
            self.due_copies.append((self.step, seq.slot, slot))
        self._leave_slot(seq)
        self._give_slot(number, slot)

    def _snapshot(self, number: int, slot: int, block_id: int, num_tokens: int) -> None:
        self._check(not self._is_used(slot), f"a snapshot takes slot {slot}, which is in use")
        self._check(block_id in self.cached, f"a snapshot is at the end of block {block_id}, which is not cached")
        self.snapshots[slot] = block_id, num_tokens
        self.due_copies.append((self.step, self.seqs[number].slot, slot))

    def _drop(self, slot: int, why: str) -> None:
        del self.snapshots[slot]

    def _give_slot(self, number: int, slot: int) -> None:
        self.seqs[number].slot = slot
        self.slots[slot] = number

    def _leave_slot(self, seq: ReplayedSequence) -> None:
        self.slots.pop(seq.slot, None)
        seq.slot = 0

    def _is_used(self, slot: int) -> bool:
        return slot in self.slots or slot in self.snapshots

    def _copy_states(self, copies: list[list[int]]) -> None:
        """Do the copies of the newest step. Only copies that it has decided itself may wait for the next step."""
        for source, slot in copies:
            due = next((one for one in self.due_copies if one[1:] == (source, slot)), None)
            self._check(due is not None, f"the state in slot {source} is copied to slot {slot}, and nothing has asked")
            if due is not None:
                self.due_copies.remove(due)
        left = [one for one in self.due_copies if one[0] < self.step - 1]
        self._check(not left, f"copies of states that were due are not done: {left}")

    # ---- counts

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self.free)

    @property
    def num_shared(self) -> int:
        """Return the number of blocks with several owners."""
        return sum(count > 1 for count in self.ref_counts)

    @property
    def num_stored(self) -> int:
        """Return the number of tokens in owned blocks. A block that several sequences share counts once."""
        stored: Counter[int] = Counter()
        for seq in self.seqs.values():
            for place, block_id in [one for table in seq.tables for one in enumerate(table)]:
                if block_id == NULL_BLOCK:
                    continue
                num_tokens = min(self.block_size, seq.num_computed_tokens - place * self.block_size)
                stored[block_id] = max(stored[block_id], num_tokens)
        return sum(stored.values())

    @property
    def waste(self) -> float:
        """Return the fraction of the owned slots that hold no token."""
        return 1 - self.num_stored / (self.num_used * self.block_size) if self.num_used else 0.0
