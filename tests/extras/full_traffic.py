"""Runs as in `nanovllm_testing/run.py`, with all that extras add to scheduling.

Policies, limits for chunks, failed steps, swap, overlap, beams and windows. The parts are put together as in
`nanovllm_extras/engine/assembly.py`. Counts of the engine's statistics are checked against naive ones over the fake
cache's slots.
"""

import random
from collections import Counter
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from nanovllm import block_manager, scheduler
from nanovllm.scheduler import Step
from nanovllm_extras.engine.invariants import check_invariants
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.kinds import Window
from nanovllm_extras.memory.swap_space import SwapSpace
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_observer import SchedulingStats
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.scheduling.ordered_queues import order_queues
from nanovllm_extras.scheduling.policies import POLICIES, fcfs
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache, roll_back
from nanovllm_extras.scheduling.scheduler import Scheduler, fork_anytime
from nanovllm_testing import first_come, machine, run
from nanovllm_testing.fake_kv_cache import check_cached_blocks, stored_slots, table_of, tokens_of
from nanovllm_testing.run import VOCAB_SIZE, expected_output
from tests.extras.full_fake_kv_cache import FullFakeKVCache, check_stored


def choose(beams, width):
    """Which beams go on, made up from their tokens: for each of them, the tokens that follow it (maybe none)."""
    rng = random.Random(repr(beams))
    going_on = [[] for _ in beams]
    for token in rng.sample(range(VOCAB_SIZE), width):
        rng.choice(going_on).append(token)
    return going_on


def expected_beams(prompt, width, num_tokens):
    beams = [prompt]
    while len(beams[0]) < num_tokens:
        beams = extend(beams, choose(beams, width))
    return beams


def extend(beams, going_on):
    return [[*beam, token] for beam, tokens in zip(beams, going_on, strict=True) for token in tokens]


class Asks:
    """A processor of a sequence whose next step needs to know its newest token."""

    place, reads_output = 0, True


class Search:
    """Several sequences whose tokens are chosen together, as in beam search: when all have caught up, some fork.

    The scheduler samples a token for each beam, and the search replaces it. A beam that has caught up before the others
    gives up its blocks.
    """

    def __init__(self, run, request_id, prompt, width, max_tokens):
        self.run, self.scheduler = run, run.scheduler
        self.prompt, self.width, self.max_tokens = prompt, width, max_tokens
        self.params = SamplingParams(temperature=0, max_tokens=max_tokens)
        self.all_seqs = []
        first, *self.spare = [self.new_beam(request_id, prompt) for _ in range(width)]
        first.children = list(self.spare)
        self.beams = [first]
        self.ready = set()
        self.is_aborted = False

    def new_beam(self, request_id, tokens):
        seq = Sequence(request_id, tokens, self.params, sample_index=len(self.all_seqs), processors=(Asks(),))
        self.all_seqs.append(seq)
        return seq

    def end_step(self, advanced):
        self.ready.update(seq for seq in advanced if seq in self.beams)
        if not self.beams or not self.ready.issuperset(self.beams):
            self.give_up(self.ready)
            return
        beams = [tokens_of(beam)[:-1] for beam in self.beams]
        going_on = choose(beams, self.width)
        if len(beams[0]) + 1 == self.beams[0].max_num_tokens:
            self.result = extend(beams, going_on)
            self.end("stop")
            return
        self.ready.clear()
        self.give_up([*self.spare, *[beam for beam, tokens in zip(self.beams, going_on, strict=True) if not tokens]])
        self.spare, old, self.beams = [], self.beams, []
        for beam, before, tokens in zip(old, beams, going_on, strict=True):
            for i, token in enumerate(tokens):
                if i == 0 and self.run.is_running(beam):
                    beam.token_ids[len(before)] = token
                    self.beams.append(beam)
                else:
                    self.beams.append(self.fork(beam, [*before, token]))

    def fork(self, parent, tokens):
        child = self.new_beam(parent.request_id, tokens)
        child.num_prompt_tokens = parent.num_prompt_tokens
        child.max_num_tokens, child.arrival = parent.max_num_tokens, parent.arrival
        child.order = (*parent.order[:-1], child.sample_index)
        fork_anytime(self.scheduler, parent, child)
        return child

    def give_up(self, seqs):
        for seq in seqs:
            if seq.finish_reason is None:
                self.scheduler.finish(seq, "abort")

    def end(self, reason):
        for beam in [*self.spare, *self.beams]:
            if beam.finish_reason is None:
                self.scheduler.finish(beam, reason)
        self.beams, self.spare = [], []
        self.is_aborted = reason == "abort"


class RecordingStats(run.RecordingStats, SchedulingStats):
    """Keeps for each step what the engine's statistics count: the tokens that are stored, the slots reserved."""

    def on_schedule(self, step, running, blocks):
        super().on_schedule(step, running, blocks)
        self.uses[id(step)] = self._in_flight[-1][:2]


class Run(first_come.FirstComeRun):
    """`step(is_done=False)` loses a step; with `overlap`, one step is always in flight, as far as it can be."""

    params_class, sequence_class = SamplingParams, Sequence

    def __init__(self, policy=fcfs, threshold=0, num_swap_blocks=None, overlap=False, window=None, **options):
        self.policy = policy
        self.threshold = threshold
        self.num_swap_blocks = num_swap_blocks
        self.overlap = overlap
        self.window = window  # of all layers; see test_windows.py
        self.swap_space = None
        self.flights = []
        self.searches = []
        super().__init__(**options)
        if threshold:
            self.max_chunk_len = threshold
        self.manager.observer.on_start(self.manager)

    def make_stats(self):
        return RecordingStats()

    def make_manager(self, *arguments):
        if self.is_plain:
            return block_manager.BlockManager(*arguments)
        if self.num_swap_blocks is not None:
            self.swap_space = SwapSpace(self.num_swap_blocks)
        _, block_size, *_ = arguments
        return BlockManager(*arguments, **self.held(block_size), swap_space=self.swap_space)

    @property
    def is_plain(self):
        """Whether the core's parts suffice."""
        has_order = self.policy is not fcfs or self.threshold
        return not (has_order or self.overlap) and self.window is self.num_swap_blocks is None

    def held(self, block_size):
        """What the block manager has beside blocks: arguments of its class, without the swap space."""
        return {} if self.window is None else {"kind": self.window_of(self.window, block_size)}

    def window_of(self, window, block_size):
        return Window(window, self.threshold or self.max_chunk_len, block_size)

    @property
    def keeps_all_blocks(self):
        """Whether a block table has a block for each of its sequence's tokens, and there is no other table."""
        return self.window is None

    def make_scheduler(self, *arguments):
        if self.is_plain:
            plain = scheduler.Scheduler(*arguments)
            order_queues(plain)
            return plain
        options = {"overlaps": self.overlap, "drafter": self.make_drafter()}
        return Scheduler(*arguments, self.policy, self.threshold, **options)

    def make_drafter(self):
        return None

    def make_cache(self, block_size):
        return FullFakeKVCache(block_size, self.window)

    def make_seq(self, name, prompt, params, sample_index):
        seq = super().make_seq(name, prompt, params, sample_index)
        if params.frequency_penalty:
            seq.processors = (Asks(),)
        seq.priority = self.priority
        return seq

    def add(self, prompt, n=1, priority=0, **params):
        self.priority = priority
        return super().add(prompt, n, **params)

    def add_search(self, prompt, width, max_tokens):
        search = Search(self, f"seq-{len(self.requests)}", prompt, width, max_tokens)
        self.searches.append(search)
        self.requests.append(search.all_seqs)
        self.scheduler.add(search.beams[0])
        return search

    def place_of(self, seq):
        return seq.order

    @property
    def has_unfinished(self):
        return bool(super().has_unfinished or self.flights)

    @property
    def may_pause(self):
        return bool(self.flights or not super().has_unfinished)

    def is_beam(self, seq):
        return any(seq in search.all_seqs for search in self.searches)

    def host_block_ids(self, seq):
        return [] if self.swap_space is None else self.swap_space.host_block_ids(seq)

    def step(self, is_done=True):
        """Schedule, compute, update; what `schedule()` said. Or lose the forward pass, and all that is in flight.

        With overlap one more step is scheduled and computed before the update.
        """
        self.num_steps += 1
        if not self.flights:
            self.launch()
        if self.overlap and self.flights:
            self.launch()
        if not self.flights:
            return Step()
        if is_done:
            flight = self.flights.pop(0)
            self.update(flight)
        else:
            flight = self.flights[0]
            for lost in reversed(self.flights):
                self.cache.spoil(lost.journal)
            self.flights.clear()
            roll_back(self.scheduler)
            assert self.stats.blocks_in_flight() == set()
        self.check_state()
        return flight.out

    def launch(self):
        before = Before(self)
        must_wait = self.flights and not self.scheduler.can_schedule_ahead()
        out = Step() if must_wait else self.scheduler.schedule()
        if before.must_wait(out):
            return
        planned = self.planned(out, before)
        before.check(planned)
        self.check_scheduled(planned)
        if not out.chunks:
            return
        writes = [(seq, start, start + num_new) for seq, start, num_new in planned.chunks]
        before.writers.check(writes, self.manager.block_size)
        written = {table_of(seq)[i // self.manager.block_size]: seq for seq, *span in writes for i in range(*span)}
        moved_to = {block_id for _, block_id in swap_ins(out) + out.copies}
        for flight in self.flights:
            for block_id, seq in flight.written.items():
                # (blocks behind a window may be given away while a step in flight writes to them, like these)
                if (
                    seq.finish_reason is None and self.window is None
                ):  # else the new owner's writes come after those in flight
                    owners = [seq, *flight.children.get(seq, [])]
                    assert written.get(block_id, seq) in owners, "a block that a step in flight writes for another"
                    assert block_id not in moved_to, "a block that a step in flight writes for another"
            assert not out.preempted, "nobody loses blocks that a step in flight writes to"
        journal = self.write(out, writes)
        samples, self.cache.newest = self.draw_rows(out, writes, before)
        self.flights.append(Flight(out, samples, self.cache.newest, written, journal, before.children))

    def planned(self, out, before):
        """The step in which a sequence and its drafts are one chunk."""
        return out

    def draw_rows(self, out, writes, before):
        return self.draw(writes, before)

    def has_reason_to_wait(self):
        """Whether drafts may keep the next step from being scheduled before the step in flight has landed."""
        return False

    def write(self, out, writes):
        """Computes a step; what `spoil` needs."""
        journal = self.cache.move(swap_outs(out), swap_ins(out), out.copies)
        for write in writes:
            journal += self.cache.write(*write)
        for seq, _, stop in writes:
            self.cache.check(seq, stop)
        return journal

    def update(self, flight):
        samples = [seq for seq in flight.samples if seq.finish_reason is None]
        super().update(flight)
        for search in self.searches:
            search.end_step(samples)

    def abort(self, seqs):
        for search in self.searches:
            if search.all_seqs is seqs:
                search.end("abort")
        super().abort(seqs)

    def lens_at_the_end(self):
        lens = [seq.num_prompt_tokens + len(self.expected(seq)[0]) for seq in self.seqs if not self.is_beam(seq)]
        for search in self.searches:  # each token of each beam may be computed in steps of its own, from the beginning
            most = min(len(search.prompt) + search.max_tokens, self.manager.capacity + 1)
            lens += [most * most] * search.width
        return lens

    # ---- what always holds

    def check_scheduled(self, out):
        super().check_scheduled(out)
        slots, blocks = self.in_use()
        num_slots = len(blocks) * self.manager.block_size
        assert self.stats.uses.get(id(out), (0, 0)) == (len(slots), num_slots) or not out.chunks

    def in_use(self):
        """The slots that hold a token of a running sequence, and its blocks."""
        owners = self.scheduler.running
        slots = {slot for slot in stored_slots(owners, self.manager.block_size) if slot[0]}
        return slots, {block_id for seq in owners for block_id in table_of(seq)} - {0}  # null blocks behind a window

    def num_needed(self, seq):
        """The blocks that `seq` may still need."""
        num_missing = -(-seq.num_tokens // self.manager.block_size) - len(table_of(seq))
        if self.window is not None:
            num_missing = min(num_missing, self.manager.kind.max_held - self.num_unshared(table_of(seq)))
        return max(0, num_missing) + seq.has_shared_tail

    def owned_blocks(self, seq):
        """The blocks that `seq` owns, in all groups of layers."""
        return set(table_of(seq)) - {0}

    def num_unshared(self, table):
        """The blocks of a table that become free if their only owner gives them back."""
        owners = Counter(block_id for seq in self.scheduler.running for block_id in self.owned_blocks(seq))
        return sum(owners[block_id] == 1 for block_id in table)

    def check_state(self):
        super().check_state()
        self.check_swapped()

    def check_blocks(self):
        check_invariants(self.scheduler)
        check_stored(self.manager, self.scheduler.running)
        check_cached_blocks(self.manager, self.cache)
        if not self.flights:
            self.check_flights_are_forgotten()

    def check_flights_are_forgotten(self):
        """Else a step that fails later would hide blocks that are filled."""
        assert self.stats.blocks_in_flight() == set()

    def check_tokens(self):
        expecting = {seq for flight in self.flights for seq in flight.samples}
        assert all(token >= 0 for seq in self.seqs for token in tokens_of(seq)), "a token that nobody knows"
        assert all(seq.num_tokens == seq.num_known_tokens for seq in self.seqs if seq not in expecting)

    def check_swapped(self):
        for seq in self.seqs:
            if self.host_block_ids(seq):
                self.cache.check_host(seq, seq.num_computed_tokens, self.host_block_ids(seq))

    def check_end(self):
        for seq in self.seqs:
            if not self.is_beam(seq) and seq.finish_reason != "abort" and seq.stop_reason != "a stop string":
                assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == self.expected(seq)
        for search in self.searches:
            if not search.is_aborted:
                assert search.result == expected_beams(search.prompt, search.width, len(search.result[0]))
        check_invariants(self.scheduler)
        assert self.manager.num_used_blocks == 0
        assert self.swap_space is None or self.swap_space.num_free_blocks == self.swap_space.num_blocks

    def expected(self, seq):
        limits = self.scheduler.max_model_len, self.manager.capacity
        return expected_output(seq, self.eos_token_ids, *limits, seq.sampling_params.min_tokens)


@dataclass
class Flight(run.Flight):
    written: dict[int, Sequence]
    journal: list
    children: dict[Sequence, list[Sequence]]


class Before(first_come.FirstComeBefore):
    """What was before a step, and the rules by which it may change: also overlap and swap."""

    def __init__(self, run):
        super().__init__(run)
        self.host = {seq: run.host_block_ids(seq) for seq in run.waiting}
        self.promises = {seq: Promise(run, seq) for seq in self.running}
        self.num_free_host = 0 if run.swap_space is None else run.swap_space.num_free_blocks
        self.must_verify = bool(run.flights) and run.has_reason_to_wait()
        # sequences whose next step needs to know the token that the step in flight brings
        self.askers = [
            seq
            for flight in run.flights
            for seq in flight.samples
            if seq.finish_reason is None and seq.num_known_tokens + 1 < seq.max_num_tokens
            if seq.processors
        ]

    def must_wait(self, out):
        """Whether nothing could be scheduled before the step in flight has landed; then nothing has changed."""
        if not self.run.flights:
            return False
        needed = sum(self.run.num_needed(seq) for seq in self.run.scheduler.running)
        lacks_blocks = not out.chunks and needed > self.run.manager.num_free_blocks
        if self.askers or lacks_blocks or self.must_verify:
            assert out == Step()
            assert {seq: table_of(seq) for seq in self.running} == self.tables
            return True
        return False

    def check(self, out):
        super().check(out)
        for seq in self.running:
            if seq not in out.preempted:
                self.promises[seq].check()

    def check_queues(self, out, admitted):
        if not self.run.searches:  # beams that are ready may have to let others pass
            super().check_queues(out, admitted)

    def check_preempted(self, out, admitted):
        if self.run.keeps_all_blocks:
            self.check_swaps(out, admitted)

    def check_swaps(self, out, admitted):
        size, expected_outs, num_free = self.run.manager.block_size, [], self.num_free_host
        for seq in out.preempted:
            num_blocks = -(-self.num_computed[seq] // size)
            if 0 < num_blocks <= num_free:
                assert len(self.run.host_block_ids(seq)) == num_blocks
                assert seq.num_computed_tokens == self.num_computed[seq]
                expected_outs += zip(self.tables[seq][:num_blocks], self.run.host_block_ids(seq), strict=True)
                num_free -= num_blocks
            else:
                assert (self.run.host_block_ids(seq), seq.num_computed_tokens) == ([], 0), (
                    "a full swap space means recompute"
                )
        expected_ins = [pair for seq in admitted for pair in zip(self.host[seq], table_of(seq), strict=False)]
        assert sorted(swap_outs(out)) == sorted(expected_outs)
        assert sorted(swap_ins(out)) == sorted(expected_ins)


class Promise:
    """How many free blocks a sequence takes at most for the tokens that it has, and whether a step keeps to that."""

    def __init__(self, run, seq):
        self.run, self.seq = run, seq
        self.num_tokens = seq.num_tokens
        num_copies = seq.has_shared_tail * getattr(run.manager, "num_groups", 1)
        self.num_blocks = run.manager.num_missing_blocks(seq) + num_copies
        self.owned = run.owned_blocks(seq)
        self.unshared = {block_id for block_id in self.owned if run.num_unshared([block_id])}

    def check(self):
        """What the step has taken, and what may follow, is not more than was promised before.

        Blocks that another sequence shares since then do not become free any more when the sequence gives them back.
        """
        if self.seq.num_tokens != self.num_tokens:  # there is a new token, or there are drafts
            return
        owned = self.run.owned_blocks(self.seq)
        num_taken = len(owned - self.owned) - len(self.unshared - owned)
        shared_before = self.owned - self.unshared
        num_shared_since = sum(not self.run.num_unshared([block_id]) for block_id in owned - shared_before)
        num_left = self.run.manager.num_missing_blocks(self.seq)
        assert num_taken + num_left <= self.num_blocks + num_shared_since, "more blocks than were reserved"


def swap_outs(out):
    return getattr(out.copies, "swap_outs", [])


def swap_ins(out):
    return getattr(out.copies, "swap_ins", [])


def serve_behind_a_shared_window(run):
    """Let a long prompt hit the window of a sequence that decodes, and give back its blocks while others arrive.

    The window has 9 tokens. (the number of preemptions, the tokens that were hit)
    """
    prompt = list(range(24))
    run.add(prompt, max_tokens=12)
    for _ in range(4):
        run.step()
    long = run.add([*prompt, *range(30, 48), *range(6)], max_tokens=1)
    run.step()
    for token in range(40, 43):
        run.add([token] * 8, max_tokens=2)
    run.finish()
    return run.stats.num_preemptions, long.num_cached_tokens


# ---- random traffic


class SchedulerMachine(machine.SchedulerMachine):
    """The core's traffic with any limit and policy, with and without swap space. Steps fail; the cache is reset."""

    overlap = False
    make_run = Run
    windows = st.none()

    def draw_options(self, data):
        return super().draw_options(data) | {
            "policy": data.draw(st.sampled_from([fcfs, *POLICIES.values(), lambda seq: -seq.num_prompt_tokens])),
            "threshold": data.draw(st.sampled_from([0, 0, 1, 2, 4])),
            "num_swap_blocks": data.draw(st.sampled_from([None, 0, 1, 4, 12, 12])),
            "overlap": self.overlap,
            "window": data.draw(self.windows),
        }

    def draw_params(self, data):
        params = super().draw_params(data)
        return params | {
            "priority": data.draw(st.integers(0, 2)),
            "min_tokens": data.draw(st.integers(0, min(3, params["max_tokens"] or 3))),
            "frequency_penalty": data.draw(st.sampled_from([0.0] * 4 + [0.5])),  # its tokens must be known
        }

    @precondition(lambda self: self.living)
    @rule()
    def fail_step(self):
        self.run.step(is_done=False)

    def end_by_its_text(self, seq):
        if not self.run.is_beam(seq):
            super().end_by_its_text(seq)

    @rule()
    def reset_prefix_cache(self):
        reset_prefix_cache(self.run.scheduler)


class BeamMachine(SchedulerMachine):
    """The same traffic among beam searches, whose sequences wait for each other and fork at every token."""

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def add_search(self, data, tokens):
        width = data.draw(st.integers(1, min(3, self.run.scheduler.max_num_seqs)))
        self.run.add_search(tokens[: self.longest_prompt], width, data.draw(st.integers(1, 6)))


class OverlapMachine(SchedulerMachine):
    """The same traffic while one step is always in flight, as far as it can be."""

    overlap = True


class OverlapBeamMachine(BeamMachine):
    overlap = True
