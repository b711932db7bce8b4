"""`check_recording` checks that the page can replay a recording. `nanovllm view` calls it before it makes a page.

It refuses a recording that would stop the page, and names the line: an unknown event, a field of the wrong type, a
sequence that was not added, a block outside the pool. It does not compare with the engine's counts: the page opens a
recording that contradicts them, and shows the failed check.
"""

import reprlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard, cast

from nanovllm_extras.trace.recording import Header, NewSequence, State
from nanovllm_extras.trace.replay import Replay, ReplayError

MAX_BLOCKS = 10_000_000  # each state in the page's memory has 32 bytes per block, and there are several states
MAX_BLOCK_SIZE = 2**20
MAX_SLOTS = 1_000_000  # of recurrent states
MAX_GROUPS = 256  # of layers
MAX_DRAFTS = 64  # of one sequence in one step
MAX_INT = 2**53  # a browser's numbers cannot represent all integers above this


def is_int(value: object) -> TypeGuard[int]:
    return type(value) is int and abs(value) < MAX_INT  # not a bool


def is_count(value: object) -> TypeGuard[int]:
    return is_int(value) and value >= 0


def is_time(value: object) -> bool:
    return type(value) in (int, float)


def is_list(value: object, holds: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(map(holds, value))


def is_mapping(value: object, holds: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(holds, value.values()))


def is_text(value: object) -> bool:
    return isinstance(value, str)


KINDS: dict[str, Callable[["Checker", object], bool]] = {  # kind of a field, in words -> its check
    "an integer": lambda _, value: is_int(value),
    "an integer >= 0": lambda _, value: is_count(value),
    "0 or 1": lambda _, value: is_int(value) and value in (0, 1),
    "a number": lambda _, value: is_time(value),
    "a string": lambda _, value: is_text(value),
    "a token id, a string or null": lambda _, value: value is None or is_int(value) or is_text(value),
    "a list": lambda _, value: isinstance(value, list),
    "an object": lambda _, value: isinstance(value, dict),
    "an object or null": lambda _, value: value is None or isinstance(value, dict),
    "an object of strings": lambda _, value: is_mapping(value, is_text),
    "an object of numbers": lambda _, value: is_mapping(value, is_time),
    "a list of integers >= 0": lambda _, value: is_list(value, is_count),
    f"a block size from 1 to {MAX_BLOCK_SIZE}": lambda _, value: is_int(value) and 1 <= value <= MAX_BLOCK_SIZE,
    f"a number of blocks from 1 to {MAX_BLOCKS}": lambda _, value: is_int(value) and 1 <= value <= MAX_BLOCKS,
    f"a number of slots from 1 to {MAX_SLOTS}": lambda _, value: is_int(value) and 1 <= value <= MAX_SLOTS,
    f"a number of groups from 1 to {MAX_GROUPS}": lambda _, value: is_int(value) and 1 <= value <= MAX_GROUPS,
    "a new sequence": lambda replay, value: is_count(value) and value > 0 and value not in replay.seqs,
    "a known sequence": lambda replay, value: replay.knows(value),
    "a known sequence or 0": lambda replay, value: value == 0 or replay.knows(value),
    "0 or a list of known sequences": lambda replay, value: value == 0 or is_list(value, replay.knows),
    "a block of the pool": lambda replay, value: is_int(value) and 1 <= value <= replay.num_blocks,
    "a block of the pool or 0": lambda replay, value: is_int(value) and 0 <= value <= replay.num_blocks,
    "a list of blocks of the pool": lambda replay, value: replay.are_blocks(value),
    "an object of lists of blocks of the pool": lambda replay, value: is_mapping(value, replay.are_blocks),
    "a block table": lambda replay, value: is_list(value, replay.has),
    "a group with a window": lambda replay, value: is_int(value) and 1 <= value < replay.num_groups,
    "a list of [sequence, block tables]": lambda replay, value: is_list(value, replay.are_window_tables),
    "a list of [serial, blocks]": lambda replay, value: is_list(value, replay.are_window_blocks),
    "a slot": lambda replay, value: replay.is_slot(value),
    "a slot, a host slot or 0": lambda replay, value: is_int(value) and (value == 0 or replay.is_any_slot(value)),
    "a slot or a host slot": lambda replay, value: replay.is_any_slot(value),
    "a reason to drop a snapshot": lambda _, value: value in ("evicted", "slot", "interval", "forgotten"),
    "a list of moves": lambda replay, value: isinstance(value, list) and all(map(replay.are_copies, value[2:])),
    "a list of [slot, slot]": lambda replay, value: replay.are_copies(value),
    "a list of [sequence, slot]": lambda replay, value: is_list(value, replay.is_owner),
    "a list of [slot, block, tokens]": lambda replay, value: is_list(value, replay.is_snapshot),
    "a reason to finish": lambda _, value: value in ("stop", "length", "abort"),
    "a reason to wait": lambda _, value: value in ("blocks", "max_num_seqs", "budget", "preemption"),
    "a reason to be idle": lambda _, value: value in ("budget", "caught_up"),
    "new or again": lambda _, value: value in ("new", "again"),
    "a status": lambda _, value: value in ("waiting", "running", "finished"),
    "a list of misses": lambda _, value: is_list(value, is_miss),
    "a list of chunks": lambda replay, value: is_list(value, replay.is_chunk),
    "a list of [step, sequences]": lambda _, value: is_list(value, is_flight),
    "a list of [block, hash, serial, tokens]": lambda replay, value: is_list(value, replay.is_cached),
    "a list of [block, tier]": lambda replay, value: is_list(value, replay.is_loaded),
}
BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, NUM_GROUPS = [kind for kind in KINDS if " from 1 to " in kind]

HEADER = {
    "num_blocks": NUM_BLOCKS,
    "block_size": BLOCK_SIZE,
    "num_slots": NUM_SLOTS,
    "num_groups": NUM_GROUPS,
    "group_window": "an integer >= 0",
    "num_steps_before": "an integer >= 0",
    "t": "a number",
    "config": "an object",
    "in_flight": "a list of [step, sequences]",
    "state": "an object or null",
}
LINE = {"t": "a number", "events": "a list", "texts": "an object of strings", "times": "an object of numbers"}
STATE = {
    "free": "a list of blocks of the pool",
    "cached": "a list of [block, hash, serial, tokens]",
    "loaded": "a list of [block, tier]",
    "seqs": "a list",
}
SLOTS = {  # in the state of a model with recurrent states
    "slots": "a list of [sequence, slot]",
    "snapshots": "a list of [slot, block, tokens]",
    "state_copies": "a list of [slot, slot]",
}
WINDOWS = {  # in the state of a model whose layers form groups
    "window_tables": "a list of [sequence, block tables]",
    "window_cached": "a list of [serial, blocks]",
}
NEW_SEQUENCE = {
    "request": "a string",
    "sample": "an integer >= 0",
    "tokens": "a list of integers >= 0",
    "num_prompt_tokens": "an integer >= 0",
    "max_num_tokens": "an integer >= 0",
}
ASKED = {  # older files lack these
    "params": "an object",
    "priority": "an integer",
    "cache_salt": "a string",
    "adapter": "a string",
}
SEQUENCE = NEW_SEQUENCE | {
    "number": "a new sequence",
    "status": "a status",
    "num_computed_tokens": "an integer >= 0",
    "block_table": "a block table",
    "host_block_ids": "a list of integers >= 0",
    "misses": "a list of misses",
    "arrived": "a number",
}
IN_GROUP = {"group": "a group with a window", "place": "an integer >= 0"}  # left out in group 0, with all after it
EVENTS = {  # code -> field -> kind, in the order of docs/trace.md
    "add": {"seq": "a new sequence", "t": "a number", "about": "an object"},
    "fork": {
        "parent": "a known sequence",
        "seq": "a new sequence",
        "sample": "an integer >= 0",
        "num_tokens": "an integer >= 0",
        "num_computed": "an integer >= 0",
        "t": "a number",
    },
    "wait": {
        "seq": "a known sequence or 0",
        "code": "a reason to wait",
        "needed": "an integer",
        "free": "an integer",
    },
    "idle": {"seq": "a known sequence", "code": "a reason to be idle"},
    "admit": {"seq": "a known sequence", "code": "new or again", "num_computed": "an integer >= 0"},
    "miss": {"seq": "a known sequence", "misses": "a list of misses"},
    "preempt": {
        "seq": "a known sequence",
        "needy": "a known sequence",
        "num_computed": "an integer >= 0",
        "host_blocks": "a list of integers >= 0",
    },
    "schedule": {
        "step": "an integer >= 0",
        "t": "a number",
        "decodes": "0 or a list of known sequences",
        "chunks": "a list of chunks",
        "samples": "0 or a list of known sequences",
        "moves": "a list of moves",
        "num_free": "an integer",
        "num_stored": "an integer",
    },
    "draft": {"seq": "a known sequence", "token_ids": "a list of integers >= 0"},
    "verify": {
        "seq": "a known sequence",
        "num_drafts": "an integer >= 0",
        "num_accepted": "an integer >= 0",
        "blocks": "a list of blocks of the pool",
    },
    "update": {"step": "an integer >= 0", "t": "a number", "token_ids": "a list of integers >= 0"},
    "tokens": {"seq": "a known sequence", "first": "an integer >= 0", "token_ids": "a list of integers >= 0"},
    "finish": {
        "seq": "a known sequence",
        "reason": "a reason to finish",
        "stop_reason": "a token id, a string or null",
        "num_tokens": "an integer >= 0",
        "t": "a number",
    },
    "roll_back": {"t": "a number"},
    "start": {"num_blocks": NUM_BLOCKS},
    "take": {"seq": "a known sequence", "block": "a block of the pool", "evicted": "0 or 1"} | IN_GROUP,
    "share": {"seq": "a known sequence", "block": "a block of the pool or 0"} | IN_GROUP,
    "copy": {
        "seq": "a known sequence",
        "source": "a block of the pool",
        "destination": "a block of the pool",
        "group": "a group with a window",
    },
    "load": {
        "seq": "a known sequence",
        "num_tokens": "an integer >= 0",
        "blocks": "an object of lists of blocks of the pool",
    },
    "give_back": {"seq": "a known sequence", "blocks": "a list of blocks of the pool"},
    "free": {"seq": "a known sequence"},
    "register": {
        "seq": "a known sequence",
        "block": "a block of the pool",
        "hash": "a string",
        "serial": "an integer >= 0",
        "group": "a group with a window",
    },
    "forget": {"block": "a block of the pool"},
    "reset": {},
    "slot": {"seq": "a known sequence", "slot": "a slot", "source": "a slot, a host slot or 0"},
    "move": {"seq": "a known sequence", "slot": "a slot or a host slot"},
    "snapshot": {
        "seq": "a known sequence",
        "slot": "a slot",
        "block": "a block of the pool",
        "num_tokens": "an integer >= 0",
    },
    "drop": {"slot": "a slot", "why": "a reason to drop a snapshot"},
}


def is_flight(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and is_count(value[0]) and is_list(value[1], is_count)


def is_miss(value: object) -> bool:
    """Return whether `value` has start, end and cause. Causes that the page does not know are shown by their names."""
    if not (isinstance(value, dict) and is_count(value.get("start")) and is_count(value.get("end"))):
        return False
    has_tokens = all(is_list(value.get(name, []), is_count) for name in ("cached", "prompt"))
    has_eviction = is_count(value.get("step", 0)) and is_text(value.get("request", ""))
    return is_text(value.get("cause")) and has_tokens and has_eviction


class Checker(Replay):
    """A replay that checks each field before applying it. It keeps no list of free blocks: the pool may be large."""

    def __init__(self, header: Mapping[str, object]) -> None:
        self.num_blocks, self.seqs = 0, {}
        self.check_fields(header, HEADER, optional=("num_slots", "num_groups", "group_window"))
        checked = cast(Header, header)
        self.num_slots = checked.get("num_slots", 0)
        super().__init__(checked)

    def check_line(self, line: object) -> None:
        self.check_field("the line", "an object", line)
        assert isinstance(line, dict)
        self.check_fields(line, LINE, optional=("texts", "times"))
        for event in line["events"]:
            self.apply(event)

    def apply(self, event: object) -> None:
        if not isinstance(event, list) or not event or not is_text(event[0]) or event[0] not in EVENTS:
            raise ReplayError(f"unknown event {reprlib.repr(event)}")
        code = event[0]
        fields, num_fields = EVENTS[code], len(event) - 1
        counts = {len(fields), list(fields).index("group")} if "group" in fields else {len(fields)}
        if num_fields not in counts:
            raise ReplayError(f"{code} must have {' or '.join(map(str, sorted(counts)))} fields, got {num_fields}")
        for (name, kind), value in zip(fields.items(), event[1:], strict=False):
            self.check_field(f"{name} of {code}", kind, value)
        super().apply(event)

    def check_fields(
        self, about: Mapping[str, object], fields: Mapping[str, str], optional: tuple[str, ...] = ()
    ) -> None:
        for name, kind in fields.items():
            if name in about:
                self.check_field(name, kind, about[name])
            elif name not in optional:
                raise ReplayError(f"{name} is missing")

    def check_field(self, name: str, kind: str, value: object) -> None:
        if not KINDS[kind](self, value):
            raise ReplayError(f"{name} must be {kind}, got {reprlib.repr(value)}")

    def _check_bound(self, name: str, count: int, bound: int) -> None:
        """Raise ReplayError if `count` exceeds `bound`. The page has a loop up to `count`, which must stay short."""
        if count > bound:
            raise ReplayError(f"{name} must be <= {bound}, got {count}")

    # ---- kinds

    def knows(self, number: object) -> bool:
        return type(number) is int and number in self.seqs

    def has(self, block_id: object) -> TypeGuard[int]:
        """Return whether `block_id` is a block of the pool or the null block."""
        return type(block_id) is int and 0 <= block_id <= self.num_blocks

    def are_blocks(self, value: object) -> bool:
        return is_list(value, lambda block_id: self.has(block_id) and block_id > 0)

    def is_loaded(self, value: object) -> bool:
        return isinstance(value, list) and len(value) == 2 and self.are_blocks(value[:1]) and is_text(value[1])

    def is_chunk(self, value: object) -> bool:
        if not isinstance(value, list) or len(value) != 4:
            return False
        number, start, num_new_tokens, code = value
        is_known = self.knows(number) and code in ("all", "budget", "threshold", "drafts", "snapshot")
        return is_known and is_count(start) and is_count(num_new_tokens)

    def is_cached(self, value: object) -> bool:
        if not isinstance(value, list) or len(value) != 4:
            return False
        block_id, block_hash, serial, token_ids = value
        return self.has(block_id) and is_text(block_hash) and is_count(serial) and is_list(token_ids, is_count)

    def are_window_tables(self, value: object) -> bool:
        """Return whether `value` is [sequence, its block table in each group with a window]."""
        if not isinstance(value, list) or len(value) != 2:
            return False
        number, tables = value
        is_complete = isinstance(tables, list) and len(tables) == self.num_groups - 1
        return is_count(number) and is_complete and all(is_list(table, self.has) for table in tables)

    def are_window_blocks(self, value: object) -> bool:
        return isinstance(value, list) and len(value) == 2 and is_count(value[0]) and self.are_blocks(value[1])

    def is_slot(self, value: object) -> bool:
        return is_int(value) and 1 <= value <= self.num_slots

    def is_any_slot(self, value: object) -> bool:
        """Return whether `value` is a slot of the pool, or a slot in host memory, which has a negative number."""
        return self.is_slot(value) or (is_int(value) and -MAX_SLOTS <= value < 0)

    def are_copies(self, value: object) -> bool:
        """Return whether `value` is a list of [source, destination]. At most one of the two is in host memory."""
        return is_list(value, self.is_copy)

    def is_copy(self, value: object) -> bool:
        return isinstance(value, list) and is_list(value, self.is_any_slot) and len(value) == 2 and max(value) > 0

    def is_owner(self, value: object) -> bool:
        return isinstance(value, list) and len(value) == 2 and is_count(value[0]) and self.is_any_slot(value[1])

    def is_snapshot(self, value: object) -> bool:
        if not isinstance(value, list) or len(value) != 3:
            return False
        return self.is_slot(value[0]) and self.are_blocks(value[1:2]) and is_count(value[2])

    # ---- counts, which the page compares itself

    def _check(self, holds: bool, message: str) -> None:
        pass

    def _compare(self, num_free: int, num_stored: int) -> None:
        pass

    def _empty_pool(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts, self.free, self.cached, self.loaded = [0] * (num_blocks + 1), OrderedDict(), {}, {}
        self.window_blocks = set()

    # ---- bounds of the page's loops

    def _load_state(self, state: State) -> None:
        self.check_fields(state, STATE)
        for about in state["seqs"]:
            self.check_field("seqs", "an object", about)
            self.check_fields(about, SEQUENCE | ASKED, optional=("misses", "arrived", *ASKED))
        self.check_fields(state, SLOTS | WINDOWS, optional=(*SLOTS, *WINDOWS))
        numbers, serials = {about["number"] for about in state["seqs"]}, {one[2] for one in state["cached"]}
        for number, slot in state.get("slots", []):
            if number not in numbers:
                raise ReplayError(f"slot {slot} must belong to a sequence of the state, got {number}")
        for number, _ in state.get("window_tables", []):
            if number not in numbers:
                raise ReplayError(f"window_tables must belong to sequences of the state, got {number}")
        for serial, _ in state.get("window_cached", []):
            if serial not in serials:
                raise ReplayError(f"window_cached must have serial numbers of cached blocks, got {serial}")
        super()._load_state(state)

    def _add(self, number: int, time: int, about: NewSequence) -> None:
        self.check_fields(about, NEW_SEQUENCE | ASKED, optional=tuple(ASKED))
        super()._add(number, time, about)

    def _fork(self, parent: int, number: int, sample: int, num_known: int, num_computed: int, time: int) -> None:
        self._check_bound("num_tokens of fork", num_known, len(self.seqs[parent].tokens))
        super()._fork(parent, number, sample, num_known, num_computed, time)

    def _admit(self, number: int, code: str, num_computed: int) -> None:
        self._check_bound("num_computed of admit", num_computed, len(self.seqs[number].tokens) + len(self.in_flight))
        super()._admit(number, code, num_computed)

    def _own(self, number: int, block_id: int, group: int, place: int | None) -> None:
        if place is not None:
            self._check_bound("place", place, len(self.seqs[number].block_table))
        super()._own(number, block_id, group, place)

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
        if step != self.step + 1:
            raise ReplayError(f"step {self.step + 1} comes next, got {step}")
        for number, start, num_new_tokens, _ in chunks:  # each step in flight samples a token
            bound = len(self.seqs[number].tokens) + len(self.seqs[number].drafts) + len(self.in_flight)
            self._check_bound(f"the end of the chunk of sequence {number}", start + num_new_tokens, bound)
        super()._schedule(step, time, decodes, chunks, samples, moves, num_free, num_stored)

    def _verify(self, number: int, num_drafts: int, num_accepted: int, block_ids: list[int]) -> None:
        self._check_bound("num_drafts of verify", num_drafts, min(MAX_DRAFTS, self.seqs[number].num_computed_tokens))
        self._check_bound("num_accepted of verify", num_accepted, num_drafts)
        if num_accepted and self.step not in self.in_flight:
            raise ReplayError(f"no step is in flight whose drafts sequence {number} could accept")
        super()._verify(number, num_drafts, num_accepted, block_ids)

    def _update(self, step: int, time: int, token_ids: list[int]) -> None:
        if step not in self.in_flight:
            raise ReplayError(f"step {step} of update is not in flight")
        if len(token_ids) != len(self.in_flight[step]):
            raise ReplayError(f"step {step} samples {len(self.in_flight[step])} tokens, got {len(token_ids)}")
        super()._update(step, time, token_ids)


def check_recording(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    """Check the `lines` of `read_recording`. Raises ValueError with a line number if the page cannot replay them."""
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            if number == 1:
                checker = Checker(line)
            else:
                checker.check_line(line)
    except (ReplayError, TypeError) as error:
        raise ValueError(f"{path}, line {number} cannot be replayed: {error}") from error
