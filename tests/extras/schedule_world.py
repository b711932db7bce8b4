"""A scheduler and its block manager over a model that is a function of the tokens: what `schedule_search.py` searches.

The parts are the real ones. `FullFakeKVCache` keeps for each slot of a block the prefix on which its K and V depend,
`World.pool` for each slot of the state pool the tokens that the state has read, and `FakeStore` the contents of blocks
and states by name. With overlap, a step is computed when it is launched, and its tokens are given to the scheduler one
action later. A drafter guesses tokens, and is wrong now and then.
"""

import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanovllm import block_manager, scheduler
from nanovllm_extras.engine.invariants import check_invariants
from nanovllm_extras.engine.watching import Observers
from nanovllm_extras.kv_store.keys import names_of
from nanovllm_extras.kv_store.share import Loaded, name_in_group, name_of_state
from nanovllm_extras.kv_store.store import StoreStats
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.kinds import AllTokens, Window
from nanovllm_extras.memory.slots import Slots
from nanovllm_extras.memory.store_link import StoreLink
from nanovllm_extras.memory.swap_space import SwapSpace
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_observer import Observer, SchedulingStats
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.records.moves import Moves
from nanovllm_extras.scheduling.drafter import Drafter
from nanovllm_extras.scheduling.roll_back import roll_back
from nanovllm_extras.scheduling.scheduler import Scheduler, fork_anytime
from nanovllm_testing import run as core_run
from nanovllm_testing.fake_kv_cache import GARBAGE, WriterCheck, check_cached_blocks, table_of, tokens_of
from tests.extras.full_fake_kv_cache import FullFakeKVCache
from tests.extras.grouped_fake_kv_cache import (
    GroupedFakeKVCache,
    all_blocks,
    check_cached_windows,
    window_tables,
)

NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN = 5, 2, 3, 8
NUM_SLOTS = 3  # of states: none is left for a snapshot while three sequences run
NUM_HOST_BLOCKS, NUM_HOST_SLOTS = 3, 1  # the second sequence that is preempted is computed again
WINDOW = 3
NUM_GROUPS, NUM_BLOCKS_OF_GROUPS = 3, 12  # of layers: one sees all tokens, two see a window
WINDOW_OF_GROUPS = 4  # so that a hit may need two blocks of a window
MAX_STEPS_WITHOUT_TOKEN = 40  # more than all tokens of all sequences, computed one by one
MAX_DRAFTS = 2
BREAKS = ("on_preempt", "on_swap_out", "on_load_blocks", "on_admit", "on_wait", "on_schedule", "on_snapshot")
MAX_EVENTS = 4  # of these, of a step that fails half-way
NUM_STORED = 6  # of the store, in each group: it loses what was saved first
ROOT_KEY = bytes(32)

TEXT = (1, 2, 3, 4, 5)
OTHER_TEXT = (6, 7, 3, 4, 5)  # its second block holds the tokens of the second block of `TEXT`, after other tokens
END = 5  # ends a sequence, if some tokens are unknown for a while

Prompt = tuple[int, ...]
Action = tuple  # its name, and its arguments


def next_token(prefix: Prompt, sample_index: int) -> int:
    """Return the token that the model samples. The first sample of a part of `TEXT` goes on with `TEXT`.

    So a longer prompt finds blocks with tokens that a shorter one has generated.
    """
    if sample_index == 0 and len(prefix) < len(TEXT) and prefix == TEXT[: len(prefix)]:
        return TEXT[len(prefix)]
    return 10 + core_run.next_token(prefix, sample_index)


class Guesser:
    """Proposes the right tokens, but for every third one."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self.guess(tuple(tokens_of(seq)), seq.sample_index, count) for seq, count in wanted]

    def guess(self, prefix: Prompt, sample_index: int, count: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(count):
            tokens = (*prefix, *drafts)
            drafts.append(next_token(tokens, sample_index) + (sum(tokens) % 3 == 0))
        return drafts


class FakeStore:
    """Keeps the contents of `limit` blocks and as many states. Its index also has those that it has lost."""

    def __init__(self, limit: int, has_states: bool) -> None:
        self.limit, self.has_states = limit, has_states
        self.kept: dict[Any, Any] = {}  # name -> contents, the oldest first
        self.lost: dict[Any, None] = {}
        self.can_load = self.can_save = True
        self.stats = StoreStats()

    @property
    def tiers(self) -> "FakeStore":
        return self

    def names(self, seq: Sequence, start: int, stop: int) -> list[Any]:
        return names_of(seq, start, stop, ROOT_KEY, BLOCK_SIZE)

    def match(self, names: list[Any]) -> int:
        return next((i for i, one in enumerate(names) if one not in self.kept and one not in self.lost), len(names))

    def num_usable(self, names: list[Any], tier: "FakeStore") -> int:
        if not self.has_states:
            return len(names)
        return next((i for i in range(len(names), 0, -1) if tier.match([name_of_state(names[i - 1])])), 0)

    def load(self, name: Any) -> Loaded | None:
        self.lost.pop(name, None)
        return Loaded(self.kept[name], "fake") if name in self.kept else None

    def load_state(self, name: Any) -> Loaded | None:
        return self.load(name_of_state(name))

    def save(self, name: Any, contents: Any) -> None:
        self.kept.setdefault(name, contents)
        self.lost.pop(name, None)
        while len(self.kept) > self.limit:
            first = next(iter(self.kept))
            del self.kept[first]
            self.lost[first] = None


# ---- what is searched


class Parts(NamedTuple):
    """What a scheduler and its block manager are made of, beside the core's parts."""

    has_window: bool = False  # of all layers
    has_groups: bool = False  # of layers with and without a window
    has_states: bool = False
    swaps: bool = False
    has_store: bool = False
    overlaps: bool = False
    drafts: bool = False


KINDS = {
    "core": Parts(),
    "windows": Parts(has_window=True),
    "groups": Parts(has_groups=True),
    "states": Parts(has_states=True),
    "swapped states": Parts(has_states=True, swaps=True),
    "overlap and drafts": Parts(overlaps=True, drafts=True),
    "all for windows": Parts(has_window=True, swaps=True, has_store=True, overlaps=True, drafts=True),
    "all for groups": Parts(has_groups=True, swaps=True, has_store=True, overlaps=True, drafts=True),
    "all for states": Parts(has_states=True, swaps=True, has_store=True, overlaps=True, drafts=True),
}


@dataclass(frozen=True)
class Setting:
    """Which parts run (`KINDS`; "core" has the core's own), and which requests may come."""

    kind: str
    budget: int
    requests: tuple[tuple[Prompt, int], ...]
    max_requests: int = 3
    max_forks: int = 0  # between two steps; not with "core", whose queues keep no order for such children
    max_failures: int = 0  # steps that fail
    snapshot_interval: int = 1
    num_blocks: int | None = None  # None for `NUM_BLOCKS`, or `NUM_BLOCKS_OF_GROUPS`

    @property
    def parts(self) -> Parts:
        return KINDS[self.kind]

    @property
    def end_tokens(self) -> frozenset[int]:
        return frozenset([END] if self.parts.overlaps else [])

    def make_scheduler(self, observer: Any) -> scheduler.Scheduler:
        """Return an empty scheduler, put together as in `nanovllm_extras/engine/assembly.py`."""
        parts, num_blocks = self.parts, NUM_BLOCKS_OF_GROUPS if self.parts.has_groups else NUM_BLOCKS
        arguments = (self.num_blocks or num_blocks, BLOCK_SIZE, True, observer)
        limits = (MAX_NUM_SEQS, self.budget, MAX_MODEL_LEN)
        if self.kind == "core":
            made = scheduler.Scheduler(block_manager.BlockManager(*arguments), *limits)
            made.block_manager.prefix_cache._serials = Numbers()
            return made
        held: dict[str, Any] = {"kind": AllTokens()}
        if parts.has_window:
            held["kind"] = Window(WINDOW, self.budget, BLOCK_SIZE)
        if parts.has_groups:
            held |= {"num_groups": NUM_GROUPS, "other_kind": Window(WINDOW_OF_GROUPS, self.budget, BLOCK_SIZE)}
        if parts.has_states:
            held["states"] = Slots(NUM_SLOTS, BLOCK_SIZE, observer, snapshot_interval=self.snapshot_interval)
        if parts.swaps:
            held["swap_space"] = SwapSpace(
                NUM_HOST_BLOCKS * (NUM_GROUPS if parts.has_groups else 1), NUM_HOST_SLOTS * parts.has_states
            )
        if parts.has_store:
            limit = NUM_STORED * (NUM_GROUPS if parts.has_groups else 1)
            held["store"] = StoreLink(FakeStore(limit, parts.has_states))  # type: ignore[arg-type]
        sizes = {"max_rows": self.budget, "max_seqs": MAX_NUM_SEQS, "vocab_size": 1000}
        most = min(MAX_DRAFTS, self.budget - 1)
        drafter = Drafter(Guesser(), max_drafts=most, **sizes) if parts.drafts else None
        manager = BlockManager(*arguments, **held)
        made = Scheduler(manager, *limits, overlaps=parts.overlaps, drafter=drafter)
        manager.prefix_cache._serials = Numbers()
        made.waiting._arrivals = Numbers()
        return made


class Numbers:
    """Counts as `itertools.count(1)` does. It can be copied in every version of Python."""

    def __init__(self):
        self.last = 0

    def __next__(self):
        self.last += 1
        return self.last


class SharedParams(SamplingParams):
    """Sampling parameters that copies of a world share."""

    def __reduce__(self):
        return "PARAMS"


PARAMS = SharedParams(temperature=0, max_tokens=None)


@dataclass
class Flight:
    """A step that is computed, while the scheduler has not heard of its tokens."""

    step: Any
    tokens: list[int]
    samples: list[Sequence]
    drafts: dict[Sequence, list[int]]
    saved: list[tuple[Any, Any]]  # name and contents
    journal: list[tuple[bool, tuple[int, int], Any]]  # (whether in host memory, slot of a block, what it held before)
    changed_slots: set[int] = field(default_factory=set)  # of states


class BreakingOffError(Exception):
    """Scheduling breaks off, as if a line of it had failed."""


class Breaking(Observers):
    """Raises after `num_left` events of `BREAKS`. 0 raises nothing."""

    num_left = 0

    def _pass_on(self, event: str, *arguments: Any) -> None:
        super()._pass_on(event, *arguments)
        if self.num_left and event in BREAKS:
            self.num_left -= 1
            if not self.num_left:
                raise BreakingOffError


class World:
    """A scheduler, its block manager, what the model would have stored, and the sequences that have not ended."""

    def __init__(self, setting: Setting, *watchers: Any) -> None:
        observer = Breaking(SchedulingStats(), watchers) if watchers or setting.max_failures else Observer()
        self.setting = setting
        self.scheduler: Any = setting.make_scheduler(observer)
        self.manager: Any = self.scheduler.block_manager
        observer.on_start(self.manager)
        if setting.parts.has_groups:
            self.cache: FullFakeKVCache = GroupedFakeKVCache(BLOCK_SIZE, WINDOW_OF_GROUPS, self.manager.num_groups - 1)
        else:
            self.cache = FullFakeKVCache(BLOCK_SIZE, WINDOW if setting.parts.has_window else None)
        self.pool: dict[int, Any] = {}  # slot -> the tokens that its state has read
        self.flights: list[Flight] = []
        self.seqs: list[Sequence] = []
        self.num_added = self.num_forks = self.num_failures = self.num_steps_without_token = 0

    @property
    def space(self) -> SwapSpace | None:
        return getattr(self.manager, "swap_space", None)

    @property
    def states(self) -> Slots | None:
        return getattr(self.manager, "states", None)

    @property
    def link(self) -> StoreLink | None:
        return getattr(self.manager, "store", None)

    # ---- copies

    def freeze(self) -> bytes:
        """Return a copy that takes less memory, and can be thawed any number of times."""
        return pickle.dumps({name: value for name, value in vars(self).items() if name != "setting"}, protocol=5)

    @classmethod
    def thaw(cls, frozen: bytes, setting: Setting) -> "World":
        world = cls.__new__(cls)
        vars(world).update(pickle.loads(frozen), setting=setting)
        return world

    # ---- actions

    def actions(self) -> Iterator[Action]:
        yield ("step",)
        running, waiting = self.scheduler.running, self.scheduler.waiting
        if self.num_failures < self.setting.max_failures:
            yield from [("fail", i) for i in range(1 + MAX_EVENTS)]
        if self.num_added < self.setting.max_requests:
            yield from [("add", i) for i in range(len(self.setting.requests))]
        names = [seq.request_id for seq in self.seqs]
        yield from [("abort", name) for name in dict.fromkeys(names)]
        for seq in [*running, *waiting]:  # the only sample of a request ends as if the request were aborted
            if names.count(seq.request_id) > 1 and not seq.children:
                yield "finish", seq.request_id, seq.sample_index
        if self.num_forks < self.setting.max_forks and not self.flights:
            for seq in running:
                if seq.num_computed_tokens == seq.num_tokens - 1 and not seq.children:
                    yield "fork", seq.request_id, seq.sample_index

    def apply(self, action: Action) -> None:
        """Take an action and check the state after it. Raises whatever fails."""
        name, *arguments = action
        getattr(self, name)(*arguments)
        for seq in self.seqs:
            assert not seq.finish_reason or seq.num_tokens == len(seq.token_ids), "it counts tokens that never come"
        self.seqs = [seq for seq in self.seqs if seq.finish_reason is None]
        self.drop_unused()
        self.check()

    def add(self, i: int) -> None:
        prompt, n = self.setting.requests[i]
        seqs = [self.make_seq(str(self.num_added), list(prompt), j) for j in range(n)]
        seqs[0].children = seqs[1:]
        self.num_added += 1
        self.seqs += seqs
        self.scheduler.add(seqs[0])

    def make_seq(self, name: str, tokens: list[int], sample_index: int) -> Sequence:
        return Sequence(name, tokens, PARAMS, self.setting.end_tokens, sample_index=sample_index)

    def abort(self, name: str) -> None:
        for seq in self.seqs:
            if seq.request_id == name:
                self.scheduler.finish(seq, "abort")
        self.num_steps_without_token = 0

    def finish(self, name: str, sample_index: int) -> None:
        self.scheduler.finish(self.find(name, sample_index), "stop", "a stop string")
        self.num_steps_without_token = 0

    def fork(self, name: str, sample_index: int) -> None:
        """Fork a sequence that has caught up. The child has another newest token."""
        parent = self.find(name, sample_index)
        taken = [seq.sample_index for seq in self.seqs if seq.request_id == name]
        tokens = [*tokens_of(parent)[:-1], 9]
        child = self.make_seq(name, tokens, next(i for i in range(9) if i not in taken))
        child.num_prompt_tokens, child.max_num_tokens = parent.num_prompt_tokens, parent.max_num_tokens
        child.arrival, child.order = parent.arrival, (*parent.order[:-1], child.sample_index)
        self.num_forks += 1
        self.seqs.append(child)
        fork_anytime(self.scheduler, parent, child)

    def find(self, name: str, sample_index: int) -> Sequence:
        return next(seq for seq in self.seqs if (seq.request_id, seq.sample_index) == (name, sample_index))

    def step(self) -> None:
        """Compute a step, and with overlap the one after it, as `LLMEngine.launch` does. Update after the first."""
        self.launch_steps()
        if self.flights:
            self.update(self.flights.pop(0))

    def fail(self, num_events: int) -> None:
        """Lose all steps that are not updated. Scheduling breaks off after `num_events` events, unless they are 0."""
        self.num_failures += 1
        self.manager.observer.num_left = num_events
        with suppress(BreakingOffError):
            self.launch_steps()
        self.manager.observer.num_left = 0
        for flight in reversed(self.flights):
            for is_host, slot, before in reversed(flight.journal):
                memory = self.cache.host_slots if is_host else self.cache.slots
                if memory.get(slot) != before:
                    memory[slot] = GARBAGE
            self.pool.update(dict.fromkeys(flight.changed_slots, GARBAGE))
        self.flights = []
        roll_back(self.scheduler)
        assert not self.manager.observer.blocks_in_flight()
        self.num_steps_without_token = 0

    def launch_steps(self) -> None:
        if not self.flights:
            self.launch()
        if self.flights and self.setting.parts.overlaps and self.scheduler.can_schedule_ahead():
            self.launch()

    def launch(self) -> None:
        """Schedule a step and compute it. Each sequence must read what it has written."""
        num_tokens = {seq: seq.num_tokens for seq in self.seqs}
        children = {seq: list(seq.children) for seq in self.seqs}
        writers = WriterCheck(self.scheduler.running)
        step = self.scheduler.schedule()
        assert step.chunks or self.flights or not self.seqs, "a deadlock: there are requests, and none is computed"
        assert step.chunks or not step.preempted, "a step preempts a sequence, and computes nothing"
        if not step.chunks:
            return
        assert not (self.flights and step.preempted), "a sequence loses blocks that a step in flight writes to"
        planned, drafts = self.planned(step)
        self.check_chunks(step, planned, drafts)
        writes = [(seq, start, start + num_new) for seq, start, num_new in planned.chunks]
        writers.check(writes, BLOCK_SIZE)
        moves = Moves.of(step.copies)
        journal = self.cache.move(moves.swap_outs, moves.swap_ins, moves)
        journal += self.load(moves)
        for write in writes:
            journal += self.cache.write(*write)
        for seq, _, stop in writes:
            self.cache.check(seq, stop)
        if self.states is not None:
            self.compute_states(step, moves)
        ends = {seq: num_tokens[seq] + len(drafts.get(seq, ())) for seq in num_tokens}
        due = [one for seq, _, stop in writes if stop == ends[seq] for one in (seq, *children[seq])]
        assert due == planned.samples, "exactly those that have caught up get a token"
        tokens = []
        for seq, i in zip(step.samples, step.sampled_chunks, strict=True):
            owner, start, num_new = step.chunks[i]
            tokens.append(next_token(self.cache.slots[self.cache.slot(owner, start + num_new - 1)], seq.sample_index))
        self.cache.newest = tokens
        where = [(memory is self.cache.host_slots, slot, before) for memory, slot, before in journal]
        flight = Flight(step, tokens, planned.samples, drafts, self.read_saved(moves), where)
        flight.changed_slots = {*moves.slots, *(to for _, to in [*moves.state_copies, *moves.state_loads])}
        self.flights.append(flight)
        self.num_steps_without_token = 0 if due else self.num_steps_without_token + 1
        assert self.num_steps_without_token < MAX_STEPS_WITHOUT_TOKEN, "requests are computed, but get no tokens"

    def planned(self, step) -> tuple[Any, dict[Sequence, list[int]]]:
        """Return the step in which a sequence and its drafts are one chunk, and the drafts."""
        verification = None if self.setting.kind == "core" else self.scheduler.pending.verification
        if verification is None:
            return step, {}
        assert not self.flights, "drafts after a token that nobody knows"
        return verification.planned, verification.drafts

    def load(self, moves: Moves) -> list[tuple[Any, tuple[int, int], Any]]:
        journal = []
        for name, block_id in moves.loads:
            for i, held in enumerate(moves.loaded[name]):
                journal.append((self.cache.slots, (block_id, i), self.cache.slots.get((block_id, i))))
                self.cache.slots[block_id, i] = held
        return journal

    def read_saved(self, moves: Moves) -> list[tuple[Any, Any]]:
        """Return the names and contents that are saved. A name must be that of the contents."""
        saved: list[tuple[Any, Any]] = []
        for name, block_id in moves.saves:
            held = tuple(self.cache.slots.get((block_id, i), GARBAGE) for i in range(BLOCK_SIZE))
            assert GARBAGE not in held, "a half-filled block is saved"
            group, tokens = (0, held[-1]) if held[-1][0] >= 0 else (-held[-1][0], held[-1][1:])
            assert name == name_in_group(self.name_of_tokens(tokens), group), "a block is saved under a wrong name"
            prefixes = [tokens[: len(tokens) - i] for i in reversed(range(BLOCK_SIZE))]
            assert held == tuple((-group, *one) if group else one for one in prefixes), "a half-filled block is saved"
            saved.append((name, held))
        for name, slot in moves.state_saves:
            assert name == name_of_state(self.name_of_tokens(self.pool[slot])), "a state is saved under a wrong name"
            saved.append((name, self.pool[slot]))
        return saved

    def name_of_tokens(self, tokens: Prompt) -> Any:
        num_blocks = len(tokens) // BLOCK_SIZE
        return names_of(Sequence("", list(tokens), PARAMS), num_blocks - 1, num_blocks, ROOT_KEY, BLOCK_SIZE)[0]

    def update(self, flight: Flight) -> None:
        """Give the scheduler the tokens of a step. Each sequence must get its own, and no draft that is wrong."""
        before = {seq: tokens_of(seq) for seq in self.seqs}
        sampled = {seq for seq in flight.samples if seq.finish_reason is None}
        self.scheduler.update(flight.step, flight.tokens)
        if self.link is not None:
            for name, contents in flight.saved:
                self.link._store.save(name, contents)  # type: ignore[arg-type]
        for seq, tokens in before.items():
            self.check_tokens(seq, tokens, seq in sampled, flight.drafts.get(seq, []))

    def check_chunks(self, step, planned, drafts) -> None:
        lens = [num_new for _, _, num_new in planned.chunks]
        assert sum(lens) == step.num_scheduled_tokens <= self.setting.budget, "more than the budget"
        assert len({seq for seq, _, _ in planned.chunks}) == len(lens), "a sequence has two chunks"
        assert all(start + num < seq.max_num_tokens for seq, start, num in planned.chunks), "a step computes in vain"
        lens = [num_new for _, _, num_new in step.chunks]
        assert all(num_new == 1 for num_new in lens[: step.num_decodes])
        assert all(num_new > 1 for num_new in lens[step.num_decodes :])
        if drafts:
            assert len(lens) == step.num_decodes == sum(lens), "a draft is a decode of its own"
            assert planned.preempted == [], "drafts cost no other sequence anything"
            assert not any(END in token_ids for token_ids in drafts.values()), "a draft ends its sequence"

    def check_tokens(self, seq: Sequence, before: list[int], is_sampled: bool, drafts: list[int]) -> None:
        """Each sampled token is the function of exactly its prefix, and a sequence ends at its limit."""
        tokens, reason, limit = list(before), None, min(MAX_MODEL_LEN, self.manager.capacity + 1)
        for draft in [*drafts, None] if is_sampled else ():
            tokens.append(next_token(tuple(tokens), seq.sample_index))
            if tokens[-1] in self.setting.end_tokens or len(tokens) == limit:
                reason = "stop" if tokens[-1] in self.setting.end_tokens else "length"
                break
            if draft != tokens[-1]:
                break
        assert tokens_of(seq) == tokens, f"{name_of(seq)} has a token of another prefix, or too many"
        assert seq.finish_reason == reason

    def compute_states(self, step, moves: Moves) -> None:
        """Copy and load states, then let each chunk read the state in its source, and write that after its tokens."""
        for source, destination in moves.state_copies:
            self.move_state(self.pool, source, destination)
        for name, slot in moves.state_loads:
            self.pool[slot] = moves.loaded[name]
        assert len(set(moves.slots)) == len(step.chunks), "two sequences compute in one slot"
        for (seq, start, num_new), slot, source in zip(step.chunks, moves.slots, moves.sources, strict=True):
            assert slot > 0, "a sequence computes in the null slot"
            tokens = tuple(self.cache.tokens_of(seq, start + num_new))
            state = self.pool.get(source, ()) if start else ()  # the first chunk of a sequence starts from zeros
            assert state == tokens[:start], f"{name_of(seq)} reads the state after {state}, not after {tokens[:start]}"
            self.pool[slot] = tokens

    @staticmethod
    def move_state(pool: dict[int, Any], source: int, destination: int) -> None:
        if source in pool:
            pool[destination] = pool[source]
        else:
            pool.pop(destination, None)

    # ---- what holds after each action

    def drop_unused(self) -> None:
        """Forget what no sequence and no cached block needs, so that reading it is noticed."""
        running, size = self.scheduler.running, BLOCK_SIZE
        blocks = {*self.manager.prefix_cache._by_id}
        kept: set[tuple[int, int]] = set()
        for seq in running:
            table = table_of(seq)
            kept.update((table[i // size], i % size) for i in range(min(seq.num_computed_tokens, len(table) * size)))
        if self.setting.parts.has_groups:
            cached = self.manager.prefix_cache.others.serial_of
            blocks = blocks.union(cached, *[all_blocks(seq) for seq in running])
        if self.space is not None:
            blocks.update(source for source, _ in self.space._outs)
            held = {block_id for seq in self.space._held for block_id in self.space.host_block_ids(seq)}
            self.cache.host_slots = {slot: one for slot, one in self.cache.host_slots.items() if slot[0] in held}
        if self.link is not None:
            blocks.update(self.link._saves)
        kept.update((block_id, i) for block_id in blocks for i in range(size))
        self.cache.slots = {slot: held for slot, held in self.cache.slots.items() if slot in kept}
        self.cache.starts = {seq: start for seq, start in self.cache.starts.items() if seq in running}
        if (states := self.states) is not None:
            needed = {*states.snapshots.values(), *(slot for seq in states.owned for slot in states.slots_of(seq))}
            needed.update(source for source, _ in states.copies_for_next)
            if self.space is not None:
                needed.update(self.space._slots.values())
            self.pool = {slot: tokens for slot, tokens in self.pool.items() if slot in needed}

    def check(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        unborn = [child for seq in (*running, *waiting) for child in seq.children]
        living = sorted(map(id, (*running, *waiting, *unborn)))
        assert living == sorted(map(id, self.seqs)), "a sequence is lost, or lives on"
        check_invariants(self.scheduler)
        if self.setting.parts.has_groups:
            check_cached_windows(self.manager, self.cache)
        check_cached_blocks(self.manager, self.cache)
        for seq in running:
            self.cache.check(seq, seq.num_computed_tokens)
            self.check_given_back(seq)
        expecting = {seq for flight in self.flights for seq in flight.samples}
        for seq in self.seqs:
            ids = seq.token_ids + seq.unknown_token_ids
            assert -min(ids) <= len(self.cache.newest), "a placeholder of a row that is not there"
            assert seq in expecting or seq.num_tokens == len(seq.token_ids), "a token that no step brings"
        if self.states is not None:
            self.check_states(self.states)
        if self.space is not None:
            self.check_space(self.space)

    def check_given_back(self, seq: Sequence) -> None:
        """A sequence owns no block that was behind the window when its newest chunk began."""
        if self.setting.kind == "core" or seq not in self.cache.starts:
            return
        kinds = [self.manager.kind] + [self.manager.other_kind] * (self.manager.num_groups - 1)
        for kind, (entries, *_) in zip(kinds, self.manager.tables_of(seq), strict=True):
            num_behind = min(kind.num_behind(self.cache.starts[seq]), len(entries))
            assert not any(entries[:num_behind]), f"{name_of(seq)} owns blocks behind the window"

    def check_space(self, space: SwapSpace) -> None:
        """Host memory holds what its sequences have computed, as soon as the copies that are due are done."""
        held = dict(self.cache.host_slots)
        for source, destination in space._outs:
            for i in range(BLOCK_SIZE):
                self.cache.host_slots[destination, i] = self.cache.slots.get((source, i), GARBAGE)
        for seq in space._held:
            self.cache.check_host(seq, seq.num_computed_tokens, space.host_block_ids(seq))
        self.cache.host_slots = held
        pool = self.pool_when_copied()
        for seq, slot in space._slots.items():
            computed = tuple(tokens_of(seq)[: seq.num_computed_tokens])
            assert pool.get(slot) == computed, f"{name_of(seq)} has another state in host memory"

    def pool_when_copied(self) -> dict[int, Any]:
        """Return the pool as soon as the copies that are due are done."""
        pool = dict(self.pool)
        for source, destination in () if self.states is None else self.states.copies_for_next:
            self.move_state(pool, source, destination)
        return pool

    def check_states(self, states: Slots) -> None:
        """Each slot holds the right state as soon as the copies that are due are done."""
        assert not states._copies_for_this, "states are still to be copied"
        pool = self.pool_when_copied()
        for seq, slot in states.owned.items():
            computed = tuple(self.cache.tokens_of(seq, seq.num_computed_tokens))
            assert not computed or pool.get(slot) == computed, f"{name_of(seq)} has the state of other tokens"
        blocks = {cached.serial: block_id for block_id, cached in self.manager.prefix_cache._by_id.items()}
        for serial, slot in states.snapshots.items():
            assert pool.get(slot) == self.cache.slots[blocks[serial], BLOCK_SIZE - 1], "a snapshot of another prefix"

    # ---- equal states

    def key(self) -> tuple:
        """Return what the future depends on: equal for two states that differ only in names.

        Contents are left out where `check` has just compared them with something that is in the key.
        """
        cache, names = self.manager.prefix_cache, Names()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        order = sorted({int(seq.request_id) for seq in self.seqs})  # that of arrival
        request = {str(number): i for i, number in enumerate(order)}
        queues = tuple(
            tuple(self.describe(seq, request[seq.request_id], names) for seq in queue) for queue in (running, waiting)
        )
        free = tuple(map(names.block, self.manager._free))
        cached = sorted(
            (names.block(block_id), one, self.cache.slots[block_id, BLOCK_SIZE - 1])
            for block_id, one in cache._by_id.items()
        )
        windows = cache.others.blocks_of if self.setting.parts.has_groups else {}
        known = tuple((block, names.serial(one.serial), names.serial(one.parent_serial), held,
                       *map(names.block, windows.get(one.serial, ()))) for block, one, held in cached)  # fmt: skip
        flights = tuple(self.describe_flight(flight, request) for flight in self.flights)
        counts = self.num_added, self.num_forks, self.num_failures, self.num_steps_without_token
        return (
            counts, queues, free, known, flights, self.describe_states(names), self.describe_space(names),
            self.describe_store(names), self.describe_blocks_in_flight(names),
        )  # fmt: skip

    def describe(self, seq: Sequence, request: int, names: "Names") -> tuple:
        return (
            request, seq.sample_index, len(seq.children), tuple(self.cache.tokens_of(seq, seq.num_tokens)),
            len(seq.token_ids), seq.num_computed_tokens,
            seq.num_prompt_tokens if self.setting.parts.has_states else 0, seq.has_shared_tail,
            tuple(map(names.block, table_of(seq))), seq.num_registered_blocks, names.serial(seq.parent_serial),
            self.describe_swapped(seq, names), self.describe_patience(seq), self.describe_snapshots(seq, names),
            *(tuple(map(names.block, table)) for table in self.tables_of_windows(seq)),
        )  # fmt: skip

    def describe_swapped(self, seq: Sequence, names: "Names") -> tuple:
        """Return the place of a sequence in host memory. What is there, `check` has compared with its tokens."""
        if self.space is None or seq not in self.space:
            return ()
        return names.slot(self.space._slots.get(seq, 0)), tuple(map(names.host_block, self.space.host_block_ids(seq)))

    def describe_patience(self, seq: Sequence) -> tuple:
        patience = self.scheduler.drafter._patience.get(seq) if self.setting.parts.drafts else None
        return () if patience is None else tuple(vars(patience).values())

    def describe_snapshots(self, seq: Sequence, names: "Names") -> tuple:
        if (states := self.states) is None:
            return ()
        return states._branches.get(seq, 0), names.serial(states._regular.get(seq, 0))

    def tables_of_windows(self, seq: Sequence) -> list[list[int]]:
        return window_tables(seq) if self.setting.parts.has_groups else []

    def describe_flight(self, flight: Flight, request: dict[str, int]) -> tuple:
        samples = [(request[seq.request_id], seq.sample_index) if seq.finish_reason is None else ()
                   for seq in flight.samples]  # fmt: skip
        return tuple(samples), tuple(name for name, _ in flight.saved)

    def describe_blocks_in_flight(self, names: "Names") -> tuple:
        if self.num_failures >= self.setting.max_failures:
            return ()
        flights = self.manager.observer.stats._in_flight
        return tuple(tuple(sorted(map(names.block, blocks))) for *_, blocks in flights)

    def describe_states(self, names: "Names") -> tuple:
        if (states := self.states) is None:
            return ()
        slot = names.slot
        return (
            tuple(slot(states.owned[seq]) for seq in self.scheduler.running),
            tuple((names.serial(serial), slot(one)) for serial, one in states.snapshots.items()),
            tuple(map(slot, states.free_slots)),
            tuple((slot(source), slot(destination)) for source, destination in states.copies_for_next),
        )

    def describe_space(self, names: "Names") -> tuple:
        if (space := self.space) is None:
            return ()
        outs = tuple((names.block(source), names.host_block(destination)) for source, destination in space._outs)
        return outs, tuple(map(names.slot, space._free_slots)), tuple(map(names.host_block, space._free))

    def describe_store(self, names: "Names") -> tuple:
        if (link := self.link) is None:
            return ()
        store: Any = link._store
        saves = tuple((names.block(block_id), name) for block_id, name in link._saves.items())
        return tuple(store.kept), tuple(store.lost), saves, tuple((name, names.serial(one)) for name, one in link._late)


class Names:
    """Numbers blocks, serial numbers and slots in the order in which they occur. 0 stays 0."""

    def __init__(self):
        self._blocks, self._serials, self._slots = {0: 0}, {0: 0}, {0: 0}
        self._host_blocks: dict[int, int] = {}

    def block(self, block_id):
        return self._blocks.setdefault(block_id, len(self._blocks))

    def host_block(self, block_id):
        return self._host_blocks.setdefault(block_id, len(self._host_blocks))

    def serial(self, serial):
        return self._serials.setdefault(serial, len(self._serials))

    def slot(self, slot):
        return self._slots.setdefault(slot, len(self._slots))


def name_of(seq: Sequence) -> str:
    return f"sample {seq.sample_index} of request {seq.request_id}"
