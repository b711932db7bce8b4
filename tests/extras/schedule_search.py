"""A search over all schedules: bounded model checking of the real scheduler and the real block managers.

Random traffic finds what happens often. This search is exhaustive: from an empty pool it takes every sequence of
actions up to a given length, and checks what must hold after each action. The model is replaced by a function of the
tokens. `FullFakeKVCache` keeps for each slot of a block the prefix on which its K and V depend. `World.pool` keeps for
each slot of the state pool the tokens that the state has read.

    add i             queue a request of `Setting.requests`: a prompt, and the number of its samples
    step              schedule, compute, update; a request for two samples forks in the step of its last prompt token
    fork r i          fork sample i of request r between two steps, as a beam search does
    finish r i        end one sample of several, as a stop string does
    abort r           end a request

Equal states are searched once. `World.key` describes a state by what its future depends on: block ids, slots and serial
numbers are replaced by the order in which they occur, and the contents of blocks that nobody needs are left out. The
search is breadth-first, so the first counterexample has the fewest actions. From the deepest states it steps on until
all requests have ended. `record` writes a counterexample as a recording, which `nanovllm view` opens.
"""

import pickle
import traceback
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nanovllm_extras.states.state_swap import StateSwap, StateSwapSpace

from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler
from nanovllm_extras.full_observer import Observer
from nanovllm_extras.full_sequence import Sequence
from nanovllm_extras.invariants import check_invariants
from nanovllm_extras.memory.block_manager import GroupedBlockManager
from nanovllm_extras.memory.kinds import WindowBlockManager
from nanovllm_extras.memory.slots import StateBlockManager, StateScheduler
from nanovllm_extras.records import Moves
from nanovllm_extras.request_params import SamplingParams
from nanovllm_extras.scheduling.ordered_queues import order_queues
from nanovllm_extras.scheduling.scheduler import fork_anytime
from nanovllm_extras.trace.recorder import Recorder
from nanovllm_extras.trace.recording import TraceFile
from tests import scheduling_traffic
from tests.extras.full_fake_kv_cache import FullFakeKVCache
from tests.extras.grouped_fake_kv_cache import (
    GroupedFakeKVCache,
    all_blocks,
    check_cached_windows,
    window_tables,
)
from tests.fake_kv_cache import WriterCheck, check_cached_blocks, table_of, tokens_of

NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN = 5, 2, 3, 8
NUM_SLOTS = 3  # of states: none is left for a snapshot while three sequences run
NUM_HOST_BLOCKS, NUM_HOST_SLOTS = 3, 1  # the second sequence that is preempted is computed again
WINDOW = 3
NUM_GROUPS, NUM_BLOCKS_OF_GROUPS = 3, 12  # of layers: one sees all tokens, two see a window
WINDOW_OF_GROUPS = 4  # so that a hit may need two blocks of a window
MAX_STEPS_WITHOUT_TOKEN = 40  # more than all tokens of all sequences, computed one by one

TEXT = (1, 2, 3, 4, 5)
OTHER_TEXT = (6, 7, 3, 4, 5)  # its second block holds the tokens of the second block of `TEXT`, after other tokens

Prompt = tuple[int, ...]
Action = tuple  # its name, and its arguments


def next_token(prefix: Prompt, sample_index: int) -> int:
    """Return the token that the model samples. The first sample of a part of `TEXT` goes on with `TEXT`.

    So a longer prompt finds blocks with tokens that a shorter one has generated.
    """
    if sample_index == 0 and len(prefix) < len(TEXT) and prefix == TEXT[: len(prefix)]:
        return TEXT[len(prefix)]
    return 10 + scheduling_traffic.next_token(prefix, sample_index)


# ---- what is searched


@dataclass(frozen=True)
class Setting:
    """Which parts run, and which requests may come.

    kind: "core" has the core's parts, "windows" a block manager for windows, "groups" one for groups of layers with and
    without a window, "states" one with slots for states, "swapped states" also a swap space.
    """

    kind: str
    budget: int
    requests: tuple[tuple[Prompt, int], ...]
    max_requests: int = 3
    max_forks: int = 0  # between two steps; not with "core", whose queues keep no order for such children
    snapshot_interval: int = 1

    @property
    def has_states(self) -> bool:
        return self.kind in ("states", "swapped states")

    def make_scheduler(self, observer: Observer) -> Scheduler:
        """Return an empty scheduler, put together as in `nanovllm_extras/assembly.py`."""
        arguments = (NUM_BLOCKS, BLOCK_SIZE, True, observer)
        limits = (MAX_NUM_SEQS, self.budget, MAX_MODEL_LEN)
        if self.has_states:
            manager = StateBlockManager(*arguments, num_slots=NUM_SLOTS)
            manager.snapshot_interval = self.snapshot_interval
            swap = StateSwap(manager, StateSwapSpace(NUM_HOST_BLOCKS, NUM_HOST_SLOTS, manager))
            scheduler = StateScheduler(manager, *limits, preemption=swap if self.kind == "swapped states" else None)
        elif self.kind in ("windows", "groups"):
            if self.kind == "windows":
                manager = WindowBlockManager(*arguments, window=WINDOW, max_chunk_len=self.budget)
            else:
                sizes = {"num_groups": NUM_GROUPS, "window": WINDOW_OF_GROUPS, "max_chunk_len": self.budget}
                manager = GroupedBlockManager(NUM_BLOCKS_OF_GROUPS, *arguments[1:], **sizes)
            scheduler = Scheduler(manager, *limits)
            order_queues(scheduler)
        else:
            manager = BlockManager(*arguments)
            scheduler = Scheduler(manager, *limits)
        manager.prefix_cache._serials = Numbers()
        if self.kind != "core":
            scheduler.waiting._arrivals = Numbers()
        return scheduler


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


PARAMS = SharedParams(temperature=0, max_tokens=None, ignore_eos=True)


class World:
    """A scheduler, its block manager, what the model would have stored, and the sequences that have not ended."""

    def __init__(self, setting: Setting, observer: Observer | None = None) -> None:
        observer = observer or Observer()
        self.setting = setting
        self.scheduler = setting.make_scheduler(observer)
        self.manager = self.scheduler.block_manager
        observer.on_start(self.manager)
        if setting.kind == "groups":
            self.cache: FullFakeKVCache = GroupedFakeKVCache(BLOCK_SIZE, WINDOW_OF_GROUPS, self.manager.block_tables)
        else:
            self.cache = FullFakeKVCache(BLOCK_SIZE, WINDOW if setting.kind == "windows" else None)
        self.pool: dict[int, Prompt] = {}  # slot -> the tokens that its state has read
        self.space: StateSwapSpace | None = getattr(getattr(self.scheduler, "preemption", None), "space", None)
        self.seqs: list[Sequence] = []
        self.num_added = self.num_forks = self.num_steps_without_token = 0

    # ---- copies

    def freeze(self) -> bytes:
        """Return a copy that takes less memory, and can be thawed any number of times."""
        return pickle.dumps({name: value for name, value in vars(self).items() if name != "setting"}, protocol=5)

    @classmethod
    def thaw(cls, frozen: bytes, setting: Setting) -> "World":
        world = cls.__new__(cls)
        vars(world).update(pickle.loads(frozen), setting=setting)
        tables = world.manager.block_tables
        tables._replace(tables.rows)  # so that each block table is a view of its row again
        return world

    # ---- actions

    def actions(self) -> Iterator[Action]:
        yield ("step",)
        running, waiting = self.scheduler.running, self.scheduler.waiting
        if self.num_added < self.setting.max_requests:
            yield from [("add", i) for i in range(len(self.setting.requests))]
        names = [seq.request_id for seq in self.seqs]
        yield from [("abort", name) for name in dict.fromkeys(names)]
        for seq in [*running, *waiting]:  # the only sample of a request ends as if the request were aborted
            if names.count(seq.request_id) > 1 and not seq.children:
                yield "finish", seq.request_id, seq.sample_index
        if self.num_forks < self.setting.max_forks:
            for seq in running:
                if seq.num_computed_tokens == seq.num_tokens - 1 and not seq.children:
                    yield "fork", seq.request_id, seq.sample_index

    def apply(self, action: Action) -> None:
        """Take an action and check the state after it. Raises whatever fails."""
        name, *arguments = action
        getattr(self, name)(*arguments)
        self.seqs = [seq for seq in self.seqs if seq.finish_reason is None]
        self.drop_unused()
        self.check()

    def add(self, i: int) -> None:
        prompt, n = self.setting.requests[i]
        seqs = [Sequence(str(self.num_added), list(prompt), PARAMS, sample_index=j) for j in range(n)]
        seqs[0].children = seqs[1:]
        self.num_added += 1
        self.seqs += seqs
        self.scheduler.add(seqs[0])

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
        child = Sequence(name, tokens, PARAMS, sample_index=next(i for i in range(9) if i not in taken))
        child.num_prompt_tokens, child.max_num_tokens = parent.num_prompt_tokens, parent.max_num_tokens
        child.arrival, child.order = parent.arrival, (*parent.order[:-1], child.sample_index)
        self.num_forks += 1
        self.seqs.append(child)
        fork_anytime(self.scheduler, parent, child)

    def find(self, name: str, sample_index: int) -> Sequence:
        return next(seq for seq in self.seqs if (seq.request_id, seq.sample_index) == (name, sample_index))

    def step(self) -> None:
        """Schedule, compute and update. Each sequence must read what it has written, and get its own next token."""
        before = {seq: (tokens_of(seq), list(seq.children)) for seq in self.seqs}
        writers = WriterCheck(self.scheduler.running)
        step = self.scheduler.schedule()
        assert step.chunks or not self.seqs, "a deadlock: there are requests, and none is computed"
        if not step.chunks:
            return
        self.check_chunks(step)
        writes = [(seq, start, start + num_new) for seq, start, num_new in step.chunks]
        writers.check(writes, BLOCK_SIZE)
        moves = Moves.of(step.copies)
        self.cache.move(moves.swap_outs, moves.swap_ins, moves)
        for write in writes:
            self.cache.write(*write)
        for seq, _, stop in writes:
            self.cache.check(seq, stop)
        if self.setting.has_states:
            self.compute_states(step)
        due = [(one, self.cache.slot(seq, stop - 1)) for seq, _, stop in writes if stop == len(before[seq][0])
               for one in (seq, *before[seq][1])]  # fmt: skip
        assert [seq for seq, _ in due] == step.samples, "exactly those that have caught up get a token"
        self.scheduler.update(step, [next_token(self.cache.slots[slot], seq.sample_index) for seq, slot in due])
        for seq in before:
            self.check_tokens(seq, before[seq][0], seq in step.samples)
        self.num_steps_without_token = 0 if due else self.num_steps_without_token + 1
        assert self.num_steps_without_token < MAX_STEPS_WITHOUT_TOKEN, "requests are computed, but get no tokens"

    def check_chunks(self, step) -> None:
        lens = [num_new for _, _, num_new in step.chunks]
        assert sum(lens) == step.num_scheduled_tokens <= self.setting.budget, "more than the budget"
        assert len({seq for seq, _, _ in step.chunks}) == len(lens), "a sequence has two chunks"
        assert all(num_new == 1 for num_new in lens[: step.num_decodes])
        assert all(num_new > 1 for num_new in lens[step.num_decodes :])

    def check_tokens(self, seq: Sequence, before: list[int], is_sampled: bool) -> None:
        """Each sampled token is the function of exactly its prefix, and a sequence ends at its limit."""
        new = [next_token(tuple(before), seq.sample_index)] if is_sampled else []
        assert tokens_of(seq) == before + new, f"{name_of(seq)} has a token of another prefix"
        is_full = seq.num_tokens == min(MAX_MODEL_LEN, self.manager.capacity + 1)
        assert seq.finish_reason == ("length" if is_full else None)

    def compute_states(self, step) -> None:
        """Copy states, then let each chunk read the state in its slot, and write the state after its tokens."""
        moves = step.copies
        for source, destination in moves.state_copies:
            self.move_state(self.pool, source, destination)
        assert len(set(moves.slots)) == len(step.chunks), "two sequences compute in one slot"
        for (seq, start, num_new), slot in zip(step.chunks, moves.slots, strict=True):
            assert slot > 0, "a sequence computes in the null slot"
            tokens = tuple(tokens_of(seq)[: start + num_new])
            state = self.pool.get(slot, ()) if start else ()  # the first chunk of a sequence starts from zeros
            assert state == tokens[:start], f"{name_of(seq)} reads the state after {state}, not after {tokens[:start]}"
            self.pool[slot] = tokens

    @staticmethod
    def move_state(pool: dict[int, Prompt], source: int, destination: int) -> None:
        if source in pool:
            pool[destination] = pool[source]
        else:
            pool.pop(destination, None)

    # ---- what holds after each action

    def drop_unused(self) -> None:
        """Forget what no sequence and no cached block needs, so that reading it is noticed."""
        running, size = self.scheduler.running, BLOCK_SIZE
        kept = {(block_id, i) for block_id in self.manager.prefix_cache._by_id for i in range(size)}
        for seq in running:
            table = table_of(seq)
            kept.update((table[i // size], i % size) for i in range(min(seq.num_computed_tokens, len(table) * size)))
        if self.setting.kind == "groups":
            tables, cached = self.manager.block_tables, self.manager.prefix_cache._serials_of
            blocks = set(cached).union(*[all_blocks(tables, seq) for seq in running])
            kept.update((block_id, i) for block_id in blocks for i in range(size))
        self.cache.slots = {slot: held for slot, held in self.cache.slots.items() if slot in kept}
        self.cache.starts = {seq: start for seq, start in self.cache.starts.items() if seq in running}
        if self.setting.has_states:
            needed = {*self.manager._slots.values(), *self.manager.prefix_cache.snapshots.values()}
            needed.update(source for source, _ in self.manager._copies_for_next)
            if self.space is not None:
                needed.update(self.space._slots.values())
                held = {block_id for block_ids in self.space._held.values() for block_id in block_ids}
                self.cache.host_slots = {slot: one for slot, one in self.cache.host_slots.items() if slot[0] in held}
            self.pool = {slot: tokens for slot, tokens in self.pool.items() if slot in needed}

    def check(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        unborn = [child for seq in (*running, *waiting) for child in seq.children]
        living = sorted(map(id, (*running, *waiting, *unborn)))
        assert living == sorted(map(id, self.seqs)), "a sequence is lost, or lives on"
        check_invariants(self.scheduler)
        if self.setting.kind == "groups":
            check_cached_windows(self.manager, self.cache)
        check_cached_blocks(self.manager, self.cache)
        for seq in running:
            self.cache.check(seq, seq.num_computed_tokens)
        if self.setting.has_states:
            self.check_states()
        if self.space is not None:
            self.check_space(self.space)

    def check_space(self, space: StateSwapSpace) -> None:
        """Host blocks and host slots hold what their sequences have computed."""
        for seq, slot in space._slots.items():
            self.cache.check_host(seq, seq.num_computed_tokens, space.host_block_ids(seq))
            computed = tuple(tokens_of(seq)[: seq.num_computed_tokens])
            assert self.pool.get(slot) == computed, f"{name_of(seq)} has another state in host memory"

    def check_states(self) -> None:
        """Each slot holds the right state as soon as the copies that are due are done."""
        manager, cache = self.manager, self.manager.prefix_cache
        assert not manager._copies_for_this, "states are still to be copied"
        pool = dict(self.pool)
        for source, destination in manager._copies_for_next:
            self.move_state(pool, source, destination)
        for seq, slot in manager._slots.items():
            computed = tuple(tokens_of(seq)[: seq.num_computed_tokens])
            assert not computed or pool.get(slot) == computed, f"{name_of(seq)} has the state of other tokens"
        blocks = {cached.serial: block_id for block_id, cached in cache._by_id.items()}
        for serial, slot in cache.snapshots.items():
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
        windows = cache.windows if self.setting.kind == "groups" else {}
        known = tuple((block, names.serial(one.serial), names.serial(one.parent_serial), held,
                       *map(names.block, windows.get(one.serial, ()))) for block, one, held in cached)  # fmt: skip
        states = self.describe_states(names) if self.setting.has_states else ()
        return self.num_added, self.num_forks, self.num_steps_without_token, queues, free, known, states

    def describe(self, seq: Sequence, request: int, names: "Names") -> tuple:
        return (
            request, seq.sample_index, len(seq.children), tuple(tokens_of(seq)), seq.num_computed_tokens,
            seq.num_prompt_tokens if self.setting.has_states else 0, seq.has_shared_tail,
            tuple(map(names.block, table_of(seq))), seq.num_registered_blocks, names.serial(seq.parent_serial),
            self.describe_swapped(seq, names),
            *(tuple(map(names.block, table)) for table in self.tables_of_windows(seq)),
        )  # fmt: skip

    def describe_swapped(self, seq: Sequence, names: "Names") -> tuple:
        """Return the place of a sequence in host memory. What is there, `check` has compared with its tokens."""
        if self.space is None or seq not in self.space:
            return ()
        return names.slot(self.space._slots[seq]), tuple(map(names.host_block, self.space.host_block_ids(seq)))

    def tables_of_windows(self, seq: Sequence) -> list[list[int]]:
        return window_tables(self.manager.block_tables, seq) if self.setting.kind == "groups" else []

    def describe_states(self, names: "Names") -> tuple:
        cache, slot = self.manager.prefix_cache, names.slot
        return (
            tuple(slot(self.manager._slots[seq]) for seq in self.scheduler.running),
            tuple((names.serial(serial), slot(one)) for serial, one in cache.snapshots.items()),
            tuple(map(slot, cache.free_slots)),
            tuple((slot(source), slot(destination)) for source, destination in self.manager._copies_for_next),
            () if self.space is None else tuple(map(slot, self.space._free_slots)),
            () if self.space is None else tuple(map(names.host_block, self.space._free)),
        )


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


# ---- the search


class Counterexample(Exception):
    """The fewest actions after which something does not hold."""

    def __init__(self, setting: Setting, actions: list[Action], error: BaseException) -> None:
        parts = f"{setting.kind}, budget {setting.budget}, snapshots every {setting.snapshot_interval} blocks"
        lines = [f"{i:3}. {describe_action(setting, action)}" for i, action in enumerate(actions, 1)]
        what = str(error).partition("\n")[0] or traceback.extract_tb(error.__traceback__)[-1].line
        super().__init__("\n".join([parts, *lines, f"{type(error).__name__}: {what}"]))
        self.setting, self.actions = setting, actions


def describe_action(setting: Setting, action: Action) -> str:
    name, *arguments = action
    if name == "add":
        prompt, n = setting.requests[arguments[0]]
        return f"add a request: prompt {list(prompt)}" + f", {n} samples" * (n > 1)
    if name == "abort":
        return f"abort request {arguments[0]}"
    return name if name == "step" else f"{name} sample {arguments[1]} of request {arguments[0]}"


@dataclass
class Searched:
    """How much a search without a counterexample has seen."""

    num_states: int
    num_actions: int
    num_states_at_the_end: int
    """States beyond the depth, on the way from the deepest states to the end of all requests."""


def search(setting: Setting, depth: int) -> Searched:
    """Take all sequences of at most `depth` actions. Raises Counterexample for the shortest one that fails."""
    first = World(setting)
    reached = {first.key(): (None, None)}  # key -> the key before, and the action
    level, num_actions = [(first.key(), first.freeze(), list(first.actions()))], 0
    for _ in range(depth):
        next_level = []
        for key, frozen, actions in level:
            for action in actions:
                num_actions += 1
                world = World.thaw(frozen, setting)
                try:
                    world.apply(action)
                except Exception as error:
                    raise Counterexample(setting, [*path_to(reached, key), action], error) from error
                if (new := world.key()) not in reached:
                    reached[new] = key, action
                    next_level.append((new, world.freeze(), list(world.actions())))
        level = next_level
    ending: set[tuple] = set()
    for key, frozen, _ in level:
        run_to_the_end(World.thaw(frozen, setting), ending, path_to(reached, key))
    return Searched(len(reached), num_actions, len(ending))


def run_to_the_end(world: World, seen: set[tuple], actions: list[Action]) -> None:
    """Step until all requests have ended, or until a state that has been `seen`. Adds the steps to `actions`."""
    while world.seqs:
        actions.append(("step",))
        try:
            world.apply(("step",))
        except Exception as error:
            raise Counterexample(world.setting, actions, error) from error
        key = world.key()
        if key in seen:
            return
        seen.add(key)


def path_to(reached: dict[tuple, tuple], key: tuple) -> list[Action]:
    actions = []
    while True:
        key, action = reached[key]
        if action is None:
            return actions[::-1]
        actions.append(action)


def record(counterexample: Counterexample, path: Path) -> None:
    """Write the run of a counterexample, up to what fails, as a recording."""
    setting = counterexample.setting
    recorder = Recorder()
    world = World(setting, recorder)
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": setting.budget, "max_model_len": MAX_MODEL_LEN}
    recorder.begin(TraceFile(path), limits | {"description": str(counterexample)})
    with closing(recorder):
        for action in counterexample.actions:
            try:
                world.apply(action)
            except Exception:
                return
            recorder.flush()
