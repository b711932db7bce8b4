"""Who gets how many tokens: budgets, policies, preemption, swap, forks, ends, failed steps, and a step's statistics.

No model runs. Each sequence's next token is made up from all of its tokens, so what a request must produce follows from
its prompt alone (`expected_output`), however it was chunked, shared, preempted, swapped or rolled back. `fake_kv_cache`
plays the KV cache and the swap space, and counts are checked against naive ones over its slots. `Run.step` checks what
holds in every step.
"""

import random
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.forks import fork, resume
from nanovllm.scheduling.observer import SchedulingStats
from nanovllm.scheduling.overlap import can_schedule_ahead
from nanovllm.scheduling.policies import POLICIES, SJF_TOKENS_PER_ARRIVAL, fcfs, priority, sjf
from nanovllm.scheduling.preemption import Recompute
from nanovllm.scheduling.rollback import roll_back
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.sequence import Sequence, SequenceStatus
from nanovllm.scheduling.step import BlockMoves, SchedulerOutput
from nanovllm.scheduling.swap import Swap, SwapSpace
from nanovllm.scheduling.windows import make_block_manager
from tests.conftest import examples
from tests.fake_kv_cache import (
    FakeKVCache,
    WriterCheck,
    check_cached_blocks,
    check_ownership,
    check_stored,
    table_of,
    tokens_of,
)

VOCAB_SIZE = 50


def next_token(tokens, sample_index=0):
    return (sum(token * (i + 3) for i, token in enumerate(tokens)) + 7 * len(tokens) + 11 * sample_index) % VOCAB_SIZE


def expected_output(seq, eos_token_ids, max_model_len, capacity):
    """(tokens, finish_reason, stop_reason) of one sample, by generating it alone, one token at a time."""
    params, tokens = seq.sampling_params, tokens_of(seq)[: seq.num_prompt_tokens]
    while True:
        token = next_token(tokens, seq.sample_index)
        tokens.append(token)
        output = tokens[seq.num_prompt_tokens :]
        if len(output) > params.min_tokens:
            if token in eos_token_ids and not params.ignore_eos:
                return output, "stop", None
            if token in (params.stop_token_ids or ()):
                return output, "stop", token
        if len(output) == params.max_tokens or len(tokens) == max_model_len:
            return output, "length", None
        if len(tokens) > capacity:
            return output, "length", "kv_cache"


def choose(beams, width):
    """Who goes on, made up from the beams' tokens: for each of them, the tokens that follow it (maybe none)."""
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


class Search:
    """Several sequences whose tokens are chosen together, as in beam search: when all have caught up, some fork."""

    def __init__(self, run, request_id, prompt, width, max_tokens):
        self.scheduler, self.prompt, self.width, self.max_tokens = run.scheduler, prompt, width, max_tokens
        self.params = SamplingParams(temperature=0, max_tokens=max_tokens)
        self.all_seqs = []
        self.beams = [self.new_beam(request_id, prompt)]
        self.beams[0].num_places = width
        self.ready = set()
        self.is_aborted = False

    def new_beam(self, request_id, tokens):
        seq = Sequence(request_id, tokens, self.params, sample_index=len(self.all_seqs))
        seq.is_beam = True
        self.all_seqs.append(seq)
        return seq

    def end_step(self, advanced):
        self.ready.update(seq for seq in advanced if seq in self.beams)
        if not self.beams or not self.ready.issuperset(self.beams):
            return
        beams = [tokens_of(beam) for beam in self.beams]
        going_on = choose(beams, self.width)
        if self.beams[0].num_tokens + 1 == self.beams[0].max_num_tokens:
            self.result = extend(beams, going_on)
            self.end("stop")
            return
        self.ready.clear()
        for beam, tokens in zip(self.beams, going_on, strict=True):
            beam.num_places = 1
            if not tokens:
                self.scheduler.finish(beam, "abort")
        for beam, tokens in zip(list(self.beams), going_on, strict=True):
            place = self.beams.index(beam)
            children = [self.fork(beam) for _ in tokens[1:]]
            self.beams[place : place + 1] = [beam, *children][: len(tokens)]
            for seq, token in zip(self.beams[place:], tokens, strict=False):
                seq.append_token(token)
                resume(self.scheduler, seq)

    def fork(self, parent):
        child = self.new_beam(parent.request_id, tokens_of(parent))
        child.num_prompt_tokens = parent.num_prompt_tokens
        child.max_num_tokens, child.arrival = parent.max_num_tokens, parent.arrival
        child.order = (*parent.order[:2], child.sample_index)
        fork(self.scheduler, parent, child)
        return child

    def end(self, reason):
        for beam in self.beams:
            self.scheduler.finish(beam, reason)
        self.beams = []
        self.is_aborted = reason == "abort"


class RecordingStats(SchedulingStats):
    """Keeps for each step the tokens that are stored and the slots that are reserved."""

    def __init__(self):
        super().__init__()
        self.uses = {}
        self.steps = []  # so that no two have the same id

    def on_schedule(self, step, running, blocks):
        super().on_schedule(step, running, blocks)
        self.steps.append(step)
        self.uses[id(step)] = self._in_flight[-1][:2]


class Run:
    """A scheduler, its fake cache, and all sequences that were ever added."""

    def __init__(
        self,
        num_blocks=64,
        block_size=4,
        max_num_seqs=8,
        budget=16,
        max_model_len=64,
        eos_token_ids=frozenset(),
        enable_prefix_caching=True,
        policy=fcfs,
        threshold=0,
        num_swap_blocks=None,
        overlap=False,
        window=None,
    ):
        self.overlap = overlap
        self.window = window  # of all layers; see test_windows.py
        self.flights = []
        self.stats = RecordingStats()
        options = (num_blocks, block_size, enable_prefix_caching, self.stats, window, threshold or budget)
        self.manager = make_block_manager(*options)
        self.swap_space = None if num_swap_blocks is None else SwapSpace(num_swap_blocks, block_size)
        preemption = Recompute(self.manager) if self.swap_space is None else Swap(self.manager, self.swap_space)
        self.scheduler = Scheduler(self.manager, max_num_seqs, budget, max_model_len, policy, threshold, preemption)
        self.cache = FakeKVCache(block_size, window)
        self.eos_token_ids = eos_token_ids
        self.requests = []  # of each, its sequences
        self.searches = []
        self.num_steps = 0

    @property
    def seqs(self):
        return [seq for seqs in self.requests for seq in seqs]

    def kv_use(self, out):
        """(tokens stored, slots reserved) of a step."""
        return self.stats.uses[id(out)]

    @property
    def waiting(self):
        return list(self.scheduler.waiting)

    def add(self, prompt, n=1, priority=0, **params):
        """The sequences of a new request; the one sequence if it has one."""
        params = SamplingParams(n=n, **{"max_tokens": None, **params})
        name = f"seq-{len(self.requests)}"
        seqs = [Sequence(name, prompt, params, self.eos_token_ids, priority, 0, i) for i in range(n)]
        seqs[0].children = seqs[1:]
        self.requests.append(seqs)
        self.scheduler.add(seqs[0])
        return seqs if n > 1 else seqs[0]

    def add_search(self, prompt, width, max_tokens):
        search = Search(self, f"seq-{len(self.requests)}", prompt, width, max_tokens)
        self.searches.append(search)
        self.requests.append(search.all_seqs)
        self.scheduler.add(search.beams[0])
        return search

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
            return SchedulerOutput([], 0, 0, [], BlockMoves(), 0, 0)
        if is_done:
            flight = self.flights.pop(0)
            self.update(flight)
        else:
            flight = self.flights[0]
            for lost in reversed(self.flights):
                self.cache.spoil(lost.journal)
            self.flights.clear()
            roll_back(self.scheduler)
        self.check_state()
        return flight.out

    def launch(self):
        before = Before(self)
        if self.flights and not can_schedule_ahead(self.scheduler):
            out = SchedulerOutput()
        else:
            out = self.scheduler.schedule()
        if before.must_wait(out):
            return
        before.check(out)
        self.check_scheduled(out)
        if not out.chunks:
            return
        writes = [(seq, start, start + num_new) for seq, start, num_new in out.chunks]
        before.writers.check(writes, self.manager.block_size)
        written = {table_of(seq)[i // self.manager.block_size]: seq for seq, *span in writes for i in range(*span)}
        moved_to = {block_id for _, block_id in out.moves.swap_ins + out.moves.copies}
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
        journal = self.cache.move(out.moves.swap_outs, out.moves.swap_ins, out.moves.copies)
        for write in writes:
            journal += self.cache.write(*write)
        for seq, _, stop in writes:
            self.cache.check(seq, stop)
        caught_up = [(seq, stop) for seq, _, stop in writes if stop == before.num_tokens[seq]]
        samples = [(sample, stop) for seq, stop in caught_up for sample in (seq, *before.children[seq])]
        self.cache.newest = [next_token(self.cache.tokens_of(seq, stop), seq.sample_index) for seq, stop in samples]
        samples = [seq for seq, _ in samples]
        self.flights.append(Flight(out, samples, self.cache.newest, written, journal, before.children))

    def update(self, flight):
        samples = [(row, seq) for row, seq in enumerate(flight.samples) if seq.finish_reason is None]
        assert self.scheduler.update(flight.out, flight.tokens) == samples
        for search in self.searches:
            search.end_step([seq for _, seq in samples])
        for _, seq in samples:
            assert (seq.status is SequenceStatus.FINISHED) == (seq.finish_reason is not None)

    def abort(self, seqs):
        for search in self.searches:
            if search.all_seqs is seqs:
                search.end("abort")
        for seq in seqs:
            if seq.finish_reason is None:
                self.scheduler.finish(seq, "abort")
        self.check_state()

    def finish(self, max_steps=None):
        """Step until all is done; how many steps that took."""
        first = self.num_steps
        max_steps = self.max_steps() if max_steps is None else max_steps
        while self.scheduler.has_unfinished() or self.flights:
            self.step()
            assert self.num_steps - first <= max_steps, "hangs"
        self.check_end()
        return self.num_steps - first

    def max_steps(self):
        """While the first in order waits, no other is admitted, and the first of those that run advances each step."""
        lens = [seq.num_prompt_tokens + len(self.expected(seq)[0]) for seq in self.seqs if not seq.is_beam]
        for search in self.searches:  # each token of each beam may be computed in steps of its own, from the beginning
            most = min(len(search.prompt) + search.max_tokens, self.manager.capacity + 1)
            lens += [most * most] * search.width
        return (len(lens) + 1) * sum(lens)

    # ---- what always holds

    def check_scheduled(self, out):
        scheduler, size = self.scheduler, self.manager.block_size
        lens = [num_new for _, _, num_new in out.chunks]
        assert sum(lens) == out.num_scheduled_tokens <= scheduler.max_num_batched_tokens
        assert lens or self.flights or not scheduler.has_unfinished(), "some sequence always advances"
        assert len({id(seq) for seq, _, _ in out.chunks}) == len(lens)
        assert all(num_new == 1 for num_new in lens[: out.num_decodes])
        assert all(num_new > 1 for num_new in lens[out.num_decodes :])
        assert out.num_prefill_tokens == sum(lens[out.num_decodes :])
        owners = scheduler.running
        computed = {seq: seq.num_computed_tokens for seq in owners}
        for seq, start, num_new in out.chunks:
            assert computed[seq] == start + num_new
            assert len(table_of(seq)) == max(-(-computed[seq] // size), start // size), "a reserve"
        slots = {self.cache.slot(seq, position) for seq, stop in computed.items() for position in range(stop)}
        slots = {slot for slot in slots if slot[0]}  # behind a window there is the null block
        blocks = {block_id for seq in owners for block_id in table_of(seq)} - {0}
        assert self.stats.uses.get(id(out), (0, 0)) == (len(slots), len(blocks) * size) or not out.chunks

    def check_state(self):
        waiting, running = self.waiting, self.scheduler.running
        check_ownership(self.manager, self.seqs)
        check_stored(self.manager, running)
        check_cached_blocks(self.manager, self.cache)
        assert all(seq.status is SequenceStatus.WAITING and len(table_of(seq)) == 0 for seq in waiting)
        assert all(seq.status is SequenceStatus.RUNNING for seq in running)
        assert [seq.order for seq in running] == sorted(seq.order for seq in running)
        assert sum(seq.num_places for seq in running) <= self.scheduler.max_num_seqs
        assert len(running) <= self.scheduler.max_num_seqs
        expecting = {seq for flight in self.flights for seq in flight.samples}
        assert all(token >= 0 for seq in self.seqs for token in tokens_of(seq)), "a token that nobody knows"
        assert all(seq.num_tokens == seq.num_known_tokens for seq in self.seqs if seq not in expecting)
        assert all(seq.num_tokens <= self.scheduler.max_model_len for seq in self.seqs)
        unborn = [child for seq in running + waiting for child in seq.children]
        parked = [
            seq
            for seq in self.seqs
            if seq.status is SequenceStatus.WAITING and seq not in waiting and seq not in unborn
        ]
        assert all(seq.is_beam and len(table_of(seq)) == 0 for seq in parked)
        living = sorted(id(seq) for seq in running + waiting + unborn + parked)
        assert living == sorted(id(seq) for seq in self.seqs if seq.finish_reason is None), "one is lost, or lives on"
        for seq in running:
            self.cache.check(seq, seq.num_computed_tokens)
        self.check_swap_space()

    def check_swap_space(self):
        kept = [block_id for seq in self.seqs for block_id in seq.host_block_ids]
        if self.swap_space is None:
            assert kept == []
            return
        every = sorted(kept + self.swap_space._free)
        assert every == list(range(self.swap_space.num_blocks)), "each block is free, or keeps one sequence's"
        assert self.swap_space.num_free_blocks == len(every) - len(kept)
        for seq in self.seqs:
            if seq.host_block_ids:
                assert seq.status is SequenceStatus.WAITING
                self.cache.check_host(seq, seq.num_computed_tokens)
            elif seq.status is SequenceStatus.WAITING:
                assert seq.num_computed_tokens == 0

    def check_end(self):
        for seq in self.seqs:
            if not seq.is_beam and seq.finish_reason != "abort" and seq.stop_reason != "a stop string":
                assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == self.expected(seq)
        for search in self.searches:
            if not search.is_aborted:
                assert search.result == expected_beams(search.prompt, search.width, len(search.result[0]))
        check_ownership(self.manager, [])
        assert self.manager.num_used_blocks == 0
        assert self.swap_space is None or self.swap_space.num_free_blocks == self.swap_space.num_blocks

    def expected(self, seq):
        return expected_output(seq, self.eos_token_ids, self.scheduler.max_model_len, self.manager.capacity)


@dataclass
class Flight:
    """A step that is computed, while the scheduler has not heard of its tokens."""

    out: SchedulerOutput
    samples: list[Sequence]
    tokens: list[int]
    written: dict[int, Sequence]
    journal: list
    children: dict[Sequence, list[Sequence]]


class Before:
    """What was before a step, and the rules by which it may change: order, budget, limits, preemption and swap."""

    def __init__(self, run):
        self.run = run
        self.running = list(run.scheduler.running)
        self.tables = {seq: table_of(seq) for seq in self.running}
        self.num_computed = {seq: seq.num_computed_tokens for seq in self.running}
        self.num_tokens = {seq: seq.num_tokens for seq in run.seqs}
        self.children = {seq: list(seq.children) for seq in run.seqs}
        self.host = {seq: list(seq.host_block_ids) for seq in run.waiting}
        self.num_free_host = 0 if run.swap_space is None else run.swap_space.num_free_blocks
        self.writers = WriterCheck(self.running)
        # sequences whose next step needs to know the token that the step in flight brings
        self.askers = [
            seq
            for flight in run.flights
            for seq in flight.samples
            if seq.finish_reason is None and seq.num_known_tokens + 1 < seq.max_num_tokens
            if seq.is_beam or seq.sampling_params.frequency_penalty
        ]

    def must_wait(self, out):
        """Whether nothing could be scheduled before the step in flight has landed; then nothing has changed."""
        if not self.run.flights:
            return False
        size, free = self.run.manager.block_size, self.run.manager.num_free_blocks
        missing = [-(-seq.num_tokens // size) - len(table_of(seq)) for seq in self.run.scheduler.running]
        if self.run.window is not None:
            missing = [self.run.manager.num_missing_blocks(seq) for seq in self.run.scheduler.running]
        needed = sum(max(0, n) for n in missing) + sum(seq.has_shared_tail for seq in self.run.scheduler.running)
        if self.askers or (not out.chunks and needed > free):
            assert out == SchedulerOutput()
            assert {seq: table_of(seq) for seq in self.running} == self.tables
            return True
        return False

    def check(self, out):
        kept = [seq for seq in self.running if seq not in out.preempted]
        born = [child for seq, _, _ in out.chunks for child in self.children[seq] if not seq.children]
        admitted = [seq for seq in self.run.scheduler.running if seq not in kept + born]
        assert all(victim.order > seq.order for victim in out.preempted for seq in kept), "the last in order goes"
        self.check_budget(out, kept + admitted)
        if not any(seq.is_beam for seq in self.run.seqs):  # beams that are ready may have to let others pass
            assert all(seq.order < other.order for seq in admitted for other in self.run.waiting), "first in order"
            assert not (admitted and out.preempted), "it would only come back to be preempted again"
            if self.run.window is None:
                self.check_swaps(out, admitted)

    def check_budget(self, out, in_turn):
        """Those that ran, in order, then new ones: each what it needs, up to the threshold, while the budget lasts."""
        left, expected = self.run.scheduler.max_num_batched_tokens, {}
        starts = {seq: start for seq, start, _ in out.chunks}
        for seq in in_turn:
            start = starts[seq] if seq in starts else self.num_computed[seq]
            assert start == self.num_computed.get(seq, start) or seq in out.preempted
            num_new = min(self.num_tokens[seq] - start, left, self.run.scheduler.max_chunk_len)
            left -= num_new
            if num_new:
                expected[seq] = start, num_new
        assert {seq: span for seq, *span in out.chunks} == {seq: list(span) for seq, span in expected.items()}

    def check_swaps(self, out, admitted):
        size, swap_outs, num_free = self.run.manager.block_size, [], self.num_free_host
        for seq in out.preempted:
            num_blocks = -(-self.num_computed[seq] // size)
            if 0 < num_blocks <= num_free:
                assert len(seq.host_block_ids) == num_blocks
                assert seq.num_computed_tokens == self.num_computed[seq]
                swap_outs += zip(self.tables[seq][:num_blocks], seq.host_block_ids, strict=True)
                num_free -= num_blocks
            else:
                assert (seq.host_block_ids, seq.num_computed_tokens) == ([], 0), "a full swap space means recompute"
        swap_ins = [pair for seq in admitted for pair in zip(self.host[seq], table_of(seq), strict=False)]
        assert sorted(out.moves.swap_outs) == sorted(swap_outs)
        assert sorted(out.moves.swap_ins) == sorted(swap_ins)


def chunk_lens(out):
    return {seq.request_id: num_new for seq, _, num_new in out.chunks}


# ---- random traffic


class SchedulerMachine(RuleBasedStateMachine):
    """Any pool, block size, budget, limits and policy, with and without swap space and prefix caching.

    Requests with one or several samples come; samples reach stop tokens and stop strings, or are aborted; steps fail;
    the prefix cache is reset. Preemption, swap, forks and copies follow from caches of a few blocks. `Run` checks each
    step, and at the end that every request was served in a bounded number of steps and that nothing has leaked.
    """

    overlap = False
    make_run = Run
    windows = st.none()

    @initialize(data=st.data())
    def make(self, data):
        block_size, num_blocks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 10))
        self.run = self.make_run(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=data.draw(st.integers(1, 5)),
            budget=data.draw(st.sampled_from([1, 2, 3, 5, 8, 13, 20])),
            max_model_len=data.draw(st.sampled_from([2, 12, 40, 40])),
            eos_token_ids=data.draw(st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=2)),
            enable_prefix_caching=data.draw(st.booleans()),
            policy=data.draw(st.sampled_from([*POLICIES.values(), lambda seq: -seq.num_prompt_tokens])),
            threshold=data.draw(st.sampled_from([0, 0, 1, 2, 4])),
            num_swap_blocks=data.draw(st.sampled_from([None, 0, 1, 4, 12, 12])),
            overlap=self.overlap,
            window=data.draw(self.windows),
        )

    @property
    def living(self):
        return [seqs for seqs in self.run.requests if any(seq.finish_reason is None for seq in seqs)]

    @property
    def longest_prompt(self):
        return min(self.run.manager.capacity, self.run.scheduler.max_model_len - 1)

    @rule(data=st.data(), n=st.sampled_from([1, 1, 2, 3]), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def add(self, data, n, tokens):
        max_tokens = data.draw(st.none() | st.integers(1, 12))
        self.run.add(
            tokens[: self.longest_prompt],
            n=min(n, self.run.scheduler.max_num_seqs),
            priority=data.draw(st.integers(0, 2)),
            max_tokens=max_tokens,
            min_tokens=data.draw(st.integers(0, min(3, max_tokens or 3))),
            ignore_eos=data.draw(st.booleans()),
            stop_token_ids=data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2)),
            frequency_penalty=data.draw(st.sampled_from([0.0] * 4 + [0.5])),  # its tokens must be known
        )
        self.run.check_state()

    @precondition(lambda self: self.living)
    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps):
        for _ in range(num_steps):
            if self.run.scheduler.has_unfinished() or self.run.flights:
                self.run.step()

    @precondition(lambda self: self.living)
    @rule()
    def fail_step(self):
        self.run.step(is_done=False)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def abort(self, data):
        self.run.abort(data.draw(st.sampled_from(self.living)))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def find_stop_string(self, data):
        """The text of one sample ends it; the others go on."""
        seqs = [seq for seq in data.draw(st.sampled_from(self.living)) if seq.finish_reason is None]
        seq = data.draw(st.sampled_from(seqs))
        if seq.num_output_tokens and not seq.is_beam:
            self.run.scheduler.finish(seq, "stop", "a stop string")
            assert (seq.finish_reason, seq.status) == ("stop", SequenceStatus.FINISHED)
            self.run.check_state()

    @rule()
    def reset_prefix_cache(self):
        self.run.manager.prefix_cache.reset()

    def teardown(self):
        if hasattr(self, "run"):
            self.run.finish()


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


SETTINGS = settings(stateful_step_count=30, deadline=None, derandomize=True, report_multiple_bugs=False)
TestTraffic = pytest.mark.examples(SchedulerMachine.TestCase)
TestTraffic.settings = settings(SETTINGS, max_examples=examples(250))
TestTrafficWithOverlap = pytest.mark.examples(OverlapMachine.TestCase)
TestTrafficWithOverlap.settings = settings(SETTINGS, max_examples=examples(250))
TestTrafficWithBeamsAndOverlap = pytest.mark.examples(OverlapBeamMachine.TestCase)
TestTrafficWithBeamsAndOverlap.settings = settings(SETTINGS, max_examples=examples(60))
TestTrafficWithBeams = pytest.mark.examples(BeamMachine.TestCase)
TestTrafficWithBeams.settings = settings(SETTINGS, max_examples=examples(100))


# ---- budget and order


def test_budget_is_shared_out_in_order_of_arrival():
    run = Run(budget=16)
    for start, num_tokens in ((0, 10), (10, 9), (20, 5)):
        run.add(list(range(start, start + num_tokens)))
    assert chunk_lens(run.step()) == {"seq-0": 10, "seq-1": 6}
    assert chunk_lens(run.step()) == {"seq-0": 1, "seq-1": 3, "seq-2": 5}
    assert chunk_lens(run.step()) == {"seq-0": 1, "seq-1": 1, "seq-2": 1}


def test_every_prompt_of_a_batch_can_be_chunked():
    """Neither the first nor the last is special: a prompt is cut where the budget ends."""
    run = Run(budget=10)
    first, second = run.add([1] * 25), run.add([2] * 12)
    lens = [chunk_lens(run.step()) for _ in range(4)]
    assert lens[:3] == [{"seq-0": 10}, {"seq-0": 10}, {"seq-0": 5, "seq-1": 5}]
    assert lens[3] == {"seq-0": 1, "seq-1": 7}
    assert (first.num_output_tokens, second.num_output_tokens) == (2, 1)


def test_max_num_seqs_bounds_the_batch():
    run = Run(max_num_seqs=2)
    seqs = [run.add([i], max_tokens=3) for i in range(5)]
    run.step()
    assert [seq.status for seq in seqs] == [SequenceStatus.RUNNING] * 2 + [SequenceStatus.WAITING] * 3
    run.finish()


def test_decodes_come_first_also_when_their_sequence_is_younger():
    run = Run(budget=16)
    run.add([1] * 20)
    run.step()
    run.add([2])  # its only chunk is one token, beside the older one's rest of 4
    out = run.step()
    assert [(seq.request_id, num_new) for seq, _, num_new in out.chunks] == [("seq-1", 1), ("seq-0", 4)]
    assert (out.num_decodes, out.num_prefill_tokens, out.num_scheduled_tokens) == (1, 4, 5)


def test_decode_advances_in_every_step_while_prompts_keep_arriving():
    run = Run(num_blocks=500, budget=8, max_num_seqs=100)
    decoding = run.add([1, 2, 3])
    run.step()
    for num_output_tokens in range(2, 30):
        run.add([num_output_tokens] * 20, max_tokens=1)
        out = run.step()
        assert out.num_scheduled_tokens == 8
        assert decoding.num_output_tokens == num_output_tokens


def test_long_prompt_among_a_stream_of_short_ones_finishes():
    run = Run(num_blocks=500, budget=8, max_num_seqs=100, max_model_len=200)
    for i in range(3):
        run.add([i, i], max_tokens=5)
    long = run.add([9] * 100, max_tokens=2)
    num_steps = 0
    while long.finish_reason is None:
        run.add([num_steps % VOCAB_SIZE], max_tokens=5)
        run.step()
        num_steps += 1
        assert num_steps < 40
    run.finish()


def test_budget_of_one_token_serves_all():
    run = Run(budget=1)
    for i in range(3):
        run.add([i] * 6, max_tokens=3)
    # 6 tokens of prompt and 2 of output are computed for each; the last token never is
    assert run.finish() == 3 * 8


# ---- the cap on one sequence's share


def test_threshold_lets_short_prompts_past_a_long_one():
    run = Run(budget=16, max_model_len=200, threshold=4)
    long = run.add([1] * 30, max_tokens=2)
    run.step()
    short = [run.add([2 + i] * 3, max_tokens=4) for i in range(2)]
    assert chunk_lens(run.step()) == {"seq-0": 4, "seq-1": 3, "seq-2": 3}
    assert [seq.num_output_tokens for seq in short] == [1, 1]
    assert chunk_lens(run.step()) == {"seq-0": 4, "seq-1": 1, "seq-2": 1}
    assert (long.num_computed_tokens, long.num_output_tokens) == (12, 0)
    run.finish()


@pytest.mark.parametrize(("threshold", "largest"), [(0, 16), (1, 1), (15, 15), (16, 16), (17, 16), (1000, 16)])
def test_threshold_caps_every_chunk_and_the_budget_caps_the_threshold(threshold, largest):
    run = Run(budget=16, threshold=threshold)
    run.add([1] * 40, max_tokens=1)
    assert chunk_lens(run.step()) == {"seq-0": largest}
    assert run.finish() == -(-(40 - largest) // largest)


def test_threshold_leaves_no_budget_idle_while_others_have_tokens():
    run = Run(budget=8, threshold=4)
    for i in range(3):
        run.add([i] * 10)
    assert chunk_lens(run.step()) == {"seq-0": 4, "seq-1": 4}


# ---- policies


def order_of_service(policy, requests, **options):
    """The requests in the order in which they are first served, one at a time, all being there from the beginning."""
    run = Run(policy=policy, max_num_seqs=1, budget=100, max_model_len=1000, num_blocks=300, **options)
    for length, urgency in requests:
        run.add([len(run.requests)] * length, max_tokens=1, priority=urgency)
    order = []
    while run.scheduler.has_unfinished():
        for seq, _, _ in run.step().chunks:
            if seq.request_id not in order:
                order.append(seq.request_id)
    run.check_end()
    return [int(name.removeprefix("seq-")) for name in order]


REQUESTS = [(30, 1), (20, 0), (50, 2), (10, 1), (20, 0), (40, -5)]  # (prompt tokens, priority)


def test_fcfs_serves_in_order_of_arrival_whatever_the_priority():
    assert order_of_service(fcfs, REQUESTS) == [0, 1, 2, 3, 4, 5]


def test_priority_serves_the_smallest_number_first_and_equals_by_arrival():
    assert order_of_service(priority, REQUESTS) == [5, 1, 4, 0, 3, 2]


def test_sjf_serves_the_shortest_prompt_first_as_long_as_it_is_not_overtaken_for_too_long(monkeypatch):
    monkeypatch.setattr("nanovllm.scheduling.policies.SJF_TOKENS_PER_ARRIVAL", 0)
    assert order_of_service(sjf, REQUESTS) == [3, 1, 4, 0, 5, 2]
    monkeypatch.setattr("nanovllm.scheduling.policies.SJF_TOKENS_PER_ARRIVAL", 6)
    # 30, 20 + 6, 50 + 12, 10 + 18, 20 + 24, 40 + 30
    assert order_of_service(sjf, REQUESTS) == [1, 3, 0, 4, 2, 5]


def test_policy_of_ones_own_is_a_function_of_the_sequence():
    assert order_of_service(lambda seq: -seq.num_prompt_tokens, REQUESTS) == [2, 5, 0, 1, 4, 3]


def test_sjf_starves_nobody():
    """A long prompt among a stream of short ones that never ends: a bounded number of them goes first."""
    run = Run(num_blocks=1000, budget=64, max_num_seqs=1, max_model_len=2000, policy=sjf)
    run.add([0], max_tokens=1)
    num_tokens = 600
    long = run.add([1] * num_tokens, max_tokens=1)
    num_overtaking = 0
    while long.finish_reason is None:
        short = run.add([2], max_tokens=1)
        run.step()
        num_overtaking += short.finish_reason is not None and not long.num_computed_tokens
        assert run.num_steps < 100
    # it stops being overtaken when arrivals alone outweigh its length
    assert num_overtaking <= num_tokens / SJF_TOKENS_PER_ARRIVAL + 1


def test_budget_and_admission_follow_the_policy():
    run = Run(policy=priority, budget=10)
    run.add([1] * 8, priority=2)
    run.add([2] * 8, priority=1)
    assert chunk_lens(run.step()) == {"seq-1": 8, "seq-0": 2}
    run.add([3] * 8, priority=0)
    assert chunk_lens(run.step()) == {"seq-1": 1, "seq-0": 6, "seq-2": 3}, "who runs goes on before others come"
    assert chunk_lens(run.step()) == {"seq-2": 5, "seq-1": 1, "seq-0": 1}, "in order from then on"


@pytest.mark.parametrize(
    ("policy", "priorities", "victims"),
    [
        (fcfs, [0, 0, 0], [2, 1]),
        (priority, [3, 1, 2], [0, 2]),
        (priority, [1, 1, 1], [2, 1]),
        (lambda seq: -seq.arrival, [0, 0, 0], [0, 1]),
    ],
)
def test_victim_is_the_last_in_order(policy, priorities, victims):
    run = Run(policy=policy, num_blocks=6, block_size=4, budget=32)
    seqs = [run.add([i] * 7, max_tokens=9, priority=urgency) for i, urgency in enumerate(priorities)]
    preempted = []
    while run.scheduler.has_unfinished():
        for seq in run.step().preempted:
            if seq not in preempted:
                preempted.append(seq)
    assert preempted[0] is seqs[victims[0]]
    assert [seqs.index(seq) for seq in preempted] == victims[: len(preempted)]
    run.check_end()


def test_higher_priority_waits_for_room_and_takes_nothing_from_those_that_run():
    run = Run(policy=priority, num_blocks=4, block_size=4)
    low = run.add([1] * 12, max_tokens=3, priority=9)
    run.step()
    high = run.add([2] * 8, max_tokens=1, priority=0)
    out = run.step()
    assert (out.preempted, chunk_lens(out)) == ([], {"seq-0": 1})
    assert (low.status, high.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    run.finish()


# ---- blocks


def test_admission_reserves_nothing_for_tokens_to_come():
    run = Run(num_blocks=4, block_size=4, max_model_len=2000)
    for i in range(4):
        run.add([i] * 4, max_tokens=1000)
    run.step()
    assert len(run.scheduler.running) == 4
    assert run.manager.num_free_blocks == 0


def test_prompt_that_is_computed_in_chunks_keeps_the_room_that_it_was_admitted_to():
    """A long prompt is admitted when all of it fits; what comes later does not take the blocks of its later chunks."""
    run = Run(num_blocks=6, block_size=4, budget=5)
    long = run.add([1] * 20, max_tokens=1)
    run.step()
    short = run.add([2] * 7, max_tokens=1)
    while long.finish_reason is None:
        assert run.step().preempted == []
        assert short.num_computed_tokens == 0
    run.finish()


def test_prompts_that_are_admitted_in_one_step_do_not_count_on_the_same_room():
    """The threshold leaves budget for a second prompt, but its blocks are needed for the later chunks of the first."""
    run = Run(num_blocks=6, block_size=4, budget=16, threshold=4)
    first, second = run.add([1] * 16, max_tokens=1), run.add([2] * 12, max_tokens=1)
    for _ in range(4):
        out = run.step()
        assert chunk_lens(out) == {first.request_id: 4}
        assert second.status is SequenceStatus.WAITING
    run.finish()
    assert first.num_preemptions == second.num_preemptions == 0


def test_samples_that_need_copies_take_no_blocks_while_a_step_is_in_flight():
    """The budget serves two of four samples at a time. The others still share the prompt's last block when the first
    two are at their ends and hold all other blocks: these come free as soon as the step in flight has landed."""
    run = Run(num_blocks=3, block_size=4, budget=2, overlap=True)
    samples = run.add([1] * 3, n=4, max_tokens=2)
    run.finish()
    assert [seq.num_preemptions for seq in samples] == [0, 0, 0, 0]


def test_newest_is_preempted_and_resumes_with_all_of_its_tokens():
    run = Run(num_blocks=6, block_size=4, budget=32)
    seqs = [run.add([i] * 7, max_tokens=9) for i in range(3)]
    run.step()
    assert [len(table_of(seq)) for seq in seqs] == [2, 2, 2]
    run.step()
    tokens = tokens_of(seqs[2])
    assert len(tokens) == 9
    out = run.step()  # all three would need a third block
    assert (out.preempted, run.stats.num_preemptions, seqs[2].num_preemptions) == ([seqs[2]], 1, 1)
    assert chunk_lens(out) == {"seq-0": 1, "seq-1": 1}
    assert seqs[2].status is SequenceStatus.WAITING
    assert tokens_of(seqs[2]) == tokens
    late = run.add([5])
    assert run.waiting == [seqs[2], late], "it waits before those that came later"
    run.finish()


def test_preempted_sequence_finds_its_own_blocks_again():
    """Nothing but the block that it lost to its neighbour is computed anew."""
    run = Run(num_blocks=5, block_size=4)
    first, second = run.add([1] * 7, max_tokens=6), run.add([2] * 11)
    run.step()
    run.step()
    assert run.step().preempted == [second]
    num_tokens = second.num_tokens
    while first.finish_reason is None:
        run.step()
    assert chunk_lens(run.step()) == {"seq-1": num_tokens - 8}, "two of three full blocks were still there"


def test_sequence_is_preempted_itself_when_it_is_the_newest():
    run = Run(num_blocks=3, block_size=4)
    old, new = run.add([1] * 5, max_tokens=4), run.add([2] * 4, max_tokens=4)
    out = run.step()
    assert chunk_lens(out) == {"seq-0": 5, "seq-1": 4}
    assert chunk_lens(run.step()) == {"seq-0": 1}
    assert (new.status, old.status) == (SequenceStatus.WAITING, SequenceStatus.RUNNING)
    run.finish()


def test_prompt_that_fills_the_whole_pool_is_served():
    run = Run(num_blocks=4, block_size=4)
    run.add(list(range(16)), max_tokens=1)
    run.add(list(range(16)), max_tokens=3)
    run.add([3], max_tokens=3)
    run.finish()
    assert run.seqs[1].stop_reason == "kv_cache"


# ---- swap


def swapped_run(num_swap_blocks=8, **options):
    """Two sequences of ten tokens, nine of them computed: two steps later they need a block that is not there."""
    run = Run(num_blocks=6, block_size=4, budget=32, num_swap_blocks=num_swap_blocks, **options)
    seqs = [run.add([i] * 9, max_tokens=9) for i in range(2)]
    while not run.step().preempted:
        assert run.num_steps < 10
    return run, *seqs


def test_swapped_sequence_comes_back_without_computing_anything_anew():
    run, first, second = swapped_run()
    assert second.num_computed_tokens == 12
    assert len(second.host_block_ids) == 3
    assert (run.stats.num_swaps, run.stats.num_preemptions, second.num_preemptions) == (
        1,
        1,
        1,
    )
    kept = list(second.host_block_ids)
    while first.finish_reason is None:
        out = run.step()
        assert out.moves == BlockMoves()
    out = run.step()
    assert chunk_lens(out) == {"seq-1": 1}
    assert out.moves.swap_ins == list(zip(kept, table_of(second), strict=False))
    assert len(out.moves.swap_ins) == 3
    assert (out.moves.swap_outs, out.moves.copies, second.host_block_ids) == ([], [], [])
    run.finish()
    assert run.stats.num_swaps == 1


def test_copies_out_name_the_blocks_that_the_victim_had():
    run = Run(num_blocks=6, block_size=4, budget=32, num_swap_blocks=8)
    run.add([0] * 9, max_tokens=9)
    victim = run.add([1] * 9, max_tokens=9)
    run.step()
    table = table_of(victim)
    while not (out := run.step()).preempted:
        assert table_of(victim) == table
    assert out.preempted == [victim]
    assert out.moves.swap_outs == list(zip(table, victim.host_block_ids, strict=True))
    assert out.moves.swap_ins == []


@pytest.mark.parametrize("num_swap_blocks", [0, 1, 2])
def test_full_swap_space_means_recompute(num_swap_blocks):
    run, _, second = swapped_run(num_swap_blocks)
    assert (second.host_block_ids, second.num_computed_tokens) == ([], 0)
    assert (run.stats.num_swaps, run.stats.num_preemptions) == (0, 1)
    assert run.swap_space.num_free_blocks == num_swap_blocks
    run.finish()


def test_swap_space_that_has_room_for_one_sends_the_other_to_be_computed_anew():
    run = Run(num_blocks=6, block_size=4, budget=40, num_swap_blocks=2)
    for i in range(3):
        run.add([i] * 7, max_tokens=16)
    run.finish()
    assert 0 < run.stats.num_swaps < run.stats.num_preemptions


def test_failed_step_loses_what_it_should_have_copied_out():
    run = Run(num_blocks=6, block_size=4, budget=32, num_swap_blocks=8)
    seqs = [run.add([i] * 9, max_tokens=9) for i in range(2)]
    for _ in range(4):
        run.step()
    out = run.step(is_done=False)
    assert out.preempted == [seqs[1]]
    assert run.swap_space.num_free_blocks == 8
    assert run.waiting == seqs
    run.finish()


def test_failed_step_loses_what_it_should_have_copied_in():
    run, first, second = swapped_run()
    while first.finish_reason is None:
        run.step()
    out = run.step(is_done=False)
    assert len(out.moves.swap_ins) == 3
    assert (second.status, second.num_computed_tokens, second.host_block_ids) == (SequenceStatus.WAITING, 0, [])
    assert run.swap_space.num_free_blocks == 8
    run.finish()


def test_failed_step_leaves_alone_what_was_copied_out_before():
    run, _, second = swapped_run()
    kept = list(second.host_block_ids)
    run.step(is_done=False)
    assert second.host_block_ids == kept
    run.finish()
    assert run.stats.num_swaps == 1


def test_aborted_sequence_gives_up_its_place_in_the_swap_space():
    run, _, second = swapped_run()
    run.abort([second])
    assert run.swap_space.num_free_blocks == 8
    run.finish()


def test_swapped_sequence_shares_no_block_when_it_is_back():
    """Two sequences that shared their prompt's blocks: the one that was swapped has copies of its own."""
    run = Run(num_blocks=7, block_size=4, budget=32, num_swap_blocks=8)
    first, second = run.add([1] * 8 + [2], max_tokens=16), run.add([1] * 8 + [3], max_tokens=9)
    run.step()
    assert table_of(first)[:2] == table_of(second)[:2]
    while not run.step().preempted:
        assert run.num_steps < 20
    while not run.step().moves.swap_ins:
        assert run.num_steps < 40
    assert not set(table_of(first)) & set(table_of(second))
    run.finish()


# ---- several samples of one prompt


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_samples_share_the_prompt_and_run_together(enable_prefix_caching):
    run = Run(block_size=4, budget=32, enable_prefix_caching=enable_prefix_caching)
    seqs = run.add([1] * 10, n=4, max_tokens=9)
    out = run.step()
    assert chunk_lens(out) == {"seq-0": 10}, "the prompt is computed once"
    assert [seq.num_output_tokens for seq in seqs] == [1] * 4
    assert run.scheduler.running == seqs
    assert [table_of(seq) for seq in seqs] == [table_of(seqs[0])] * 4
    assert run.manager.num_used_blocks == 3
    out = run.step()
    assert [seq for seq, _, _ in out.chunks] == seqs
    assert len(out.moves.copies) == 3
    assert out.moves.copies[0][0] == table_of(seqs[3])[2], "the last owner writes where all of them were"
    assert (out.num_decodes, *run.kv_use(out)) == (4, 8 + 4 * 3, (2 + 4) * 4)
    for _ in range(7):
        assert [seq for seq, _, _ in run.step().chunks] == seqs, "they go on together"
    assert not run.scheduler.has_unfinished()
    run.check_end()
    assert len({tuple(seq.output_token_ids) for seq in seqs}) == 4


def test_samples_need_room_for_all_of_them_before_the_first_is_admitted():
    run = Run(max_num_seqs=4, budget=32)
    run.add([1] * 3, n=2, max_tokens=3)
    third, behind = run.add([2] * 3, n=3, max_tokens=3), run.add([3] * 3, max_tokens=3)
    for _ in range(3):
        run.step()
        assert [seq.status for seq in third] == [SequenceStatus.WAITING] * 3
        assert behind.status is SequenceStatus.WAITING, "nobody overtakes"
    out = run.step()
    assert chunk_lens(out) == {"seq-1": 3, "seq-2": 3}
    assert len(run.scheduler.running) == 4
    run.finish()


def test_children_come_to_life_with_the_last_chunk_of_the_prompt():
    run = Run(budget=4)
    seqs = run.add([1] * 10, n=3, max_tokens=2)
    for num_computed in (4, 8):
        run.step()
        assert run.scheduler.running == seqs[:1]
        assert seqs[0].num_computed_tokens == num_computed
    run.step()
    assert run.scheduler.running == seqs
    run.finish()


def test_sample_that_ends_with_its_first_token_leaves_the_others():
    run = Run()
    tokens = [next_token([1, 2], i) for i in range(3)]
    run = Run(eos_token_ids=frozenset([tokens[1]]))
    seqs = run.add([1, 2], n=3, max_tokens=5)
    run.step()
    assert [seq.finish_reason for seq in seqs] == [None, "stop", None]
    assert run.scheduler.running == [seqs[0], seqs[2]]
    run.finish()


def test_one_sample_is_preempted_and_not_its_whole_request():
    run = Run(num_blocks=5, block_size=4, budget=32, enable_prefix_caching=False)
    seqs = run.add([1] * 6, n=3, max_tokens=12)
    while not (out := run.step()).preempted:
        assert run.num_steps < 20
    assert out.preempted == [seqs[2]]
    assert run.scheduler.running == seqs[:2]
    run.finish()


def test_samples_of_a_preempted_prompt_wait_with_it():
    """It loses its blocks in the middle of its prompt; all of its samples come to life later all the same."""
    run = Run(policy=priority, num_blocks=6, block_size=4, budget=4)
    late = run.add([1] * 16, n=3, max_tokens=3, priority=5)
    run.step()
    early = run.add([2] * 4, max_tokens=12, priority=0)
    run.finish()
    assert [seq.num_output_tokens for seq in late] == [3] * 3
    assert early.num_output_tokens == 12


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_request_of_several_samples_is_aborted_at_any_moment(num_steps):
    """Waiting, in the middle of its prompt, just forked, decoding."""
    run = Run(budget=4)
    seqs, other = run.add([1] * 10, n=3, max_tokens=9), run.add([2] * 3, max_tokens=2)
    for _ in range(num_steps):
        run.step()
    run.abort(seqs)
    assert [seq.finish_reason for seq in seqs] == ["abort"] * 3
    assert all(table_of(seq) == [] for seq in seqs)
    run.finish()
    assert other.num_output_tokens == 2


def test_samples_count_as_one_query_of_the_prefix_cache():
    run = Run(block_size=4, budget=32)
    run.add([1] * 9, n=3, max_tokens=2)
    run.finish()
    again = run.add([1] * 9, n=3, max_tokens=2)
    run.finish()
    assert [seq.num_cached_tokens for seq in again] == [8, 8, 8]
    assert (run.stats.prefix_cache_query_tokens, run.stats.prefix_cache_hit_tokens) == (18, 8)


# ---- sequences that wait for each other


@pytest.mark.parametrize("num_swap_blocks", [None, 4])
@pytest.mark.parametrize("budget", [1, 7])
@pytest.mark.parametrize("num_blocks", range(3, 9))
def test_beams_that_do_not_all_fit_are_computed_one_after_the_other(num_blocks, budget, num_swap_blocks):
    """Those that are ready hold the blocks which the others need: no two of them may take turns for ever."""
    run = Run(num_blocks=num_blocks, block_size=4, budget=budget, num_swap_blocks=num_swap_blocks)
    search = run.add_search([1, 2, 3, 4, 5], 3, 6)
    run.finish()
    assert len(search.result[0]) == 11


@pytest.mark.parametrize("num_swap_blocks", [None, 8])
@pytest.mark.parametrize("num_failures", [1, 2])
def test_beams_survive_steps_that_fail(num_swap_blocks, num_failures):
    """Also those that are ready and take no part in the step."""
    for num_steps in range(12):
        run = Run(num_blocks=4, block_size=4, budget=4, num_swap_blocks=num_swap_blocks)
        run.add_search([1, 2, 3, 4, 5], 3, 6)
        for _ in range(num_steps):
            run.step()
        for _ in range(num_failures):
            run.step(is_done=False)
        run.finish()


@pytest.mark.parametrize("others", [[([1], 1)], [([1], 2)], [([0, 1], 2), ([1], 1)], [([1], 1), ([0], 1)]])
@pytest.mark.parametrize("prompt", [[0, 1], [1, 0, 0, 0, 1, 0, 0, 0]])
@pytest.mark.parametrize("num_steps", range(1, 6))
def test_beams_that_fork_while_others_run_keep_to_max_num_seqs(prompt, others, num_steps):
    """Some of them had lost their blocks, and others came in for them; each step checks the limit."""
    run = Run(max_num_seqs=3, num_blocks=3 * len(prompt), block_size=1, budget=20)
    run.add_search(prompt, 3, 6)
    for tokens, width in others:
        for _ in range(num_steps):
            run.step()
        if width == 1:
            run.add(tokens, max_tokens=4)
        else:
            run.add_search(tokens, width, 4)
    run.finish()


def test_beam_that_is_ready_gets_no_tokens_of_the_budget():
    run = Run(budget=2)
    search = run.add_search([1, 2], 2, 4)
    run.step()
    first, second = search.beams
    run.scheduler.max_num_batched_tokens = 1
    assert [seq for seq, _, _ in run.step().chunks] == [first]
    assert [seq for seq, _, _ in run.step().chunks] == [second], "the first has caught up, and waits"
    run.finish()


# ---- the end of a sequence


@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 5, 18, 19])
def test_max_model_len_is_kept_to_the_token(num_prompt_tokens):
    run = Run(max_model_len=20)
    seq = run.add([1] * num_prompt_tokens)
    run.finish()
    assert (seq.num_tokens, seq.finish_reason, seq.stop_reason) == (20, "length", None)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_is_kept_to_the_token(max_tokens):
    run = Run()
    seq = run.add([1, 2, 3], max_tokens=max_tokens)
    run.finish()
    assert (seq.num_output_tokens, seq.finish_reason, seq.stop_reason) == (max_tokens, "length", None)


def test_end_token_of_the_model_ends_it_without_a_stop_reason():
    first = next_token([1, 2])
    run = Run(eos_token_ids=frozenset([first]))
    seq = run.add([1, 2])
    run.finish()
    assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == ([first], "stop", None)


def test_ignore_eos_goes_on_and_stop_token_ids_hold_all_the_same():
    first = next_token([1, 2])
    second = next_token([1, 2, first])
    assert first != second
    run = Run(eos_token_ids=frozenset([first, second]))
    seq = run.add([1, 2], ignore_eos=True, stop_token_ids=[second])
    run.finish()
    assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == ([first, second], "stop", second)


def test_stop_token_at_the_last_allowed_place_is_a_stop():
    first = next_token([1, 2])
    run = Run(eos_token_ids=frozenset([first]))
    seq = run.add([1, 2], max_tokens=1)
    run.finish()
    assert seq.finish_reason == "stop"


def test_stop_token_before_min_tokens_ends_nothing():
    first = next_token([1, 2])
    run = Run(eos_token_ids=frozenset([first]))
    seq = run.add([1, 2], min_tokens=1, max_tokens=3)
    run.finish()
    assert seq.num_output_tokens > 1


def test_sequence_that_outgrows_the_whole_cache_ends_and_harms_nobody():
    """The big one is alone at the end of its life; its neighbours were preempted and finish after it, unharmed."""
    run = Run(num_blocks=3, block_size=4, max_model_len=1000)
    big = run.add([1] * 6)
    small = [run.add([2 + i] * 3, max_tokens=4) for i in range(2)]
    run.finish()
    assert (big.num_tokens, big.finish_reason, big.stop_reason) == (13, "length", "kv_cache")
    assert [seq.finish_reason for seq in small] == ["length"] * 2
    assert [seq.stop_reason for seq in small] == [None] * 2
    assert run.stats.num_preemptions > 0


def test_max_tokens_that_is_reached_as_the_cache_ends_is_no_cache_end():
    run = Run(num_blocks=2, block_size=4)
    seq = run.add([1] * 4, max_tokens=5)
    run.finish()
    assert (seq.num_tokens, seq.stop_reason) == (9, None)


def test_aborted_sequence_leaves_at_once_from_wherever_it_is():
    run = Run(max_num_seqs=2)
    decoding, prefilling, waiting, other = run.add([1]), run.add([2] * 40), run.add([3]), run.add([4], max_tokens=2)
    run.step()
    for seq in (waiting, prefilling, decoding):
        run.abort([seq])
        assert (seq.finish_reason, seq.status) == ("abort", SequenceStatus.FINISHED)
    assert run.manager.num_free_blocks == run.manager.num_blocks
    run.finish()
    assert other.num_output_tokens == 2


# ---- steps that fail


def test_failed_step_loses_no_token_and_keeps_the_order():
    run = Run(budget=10)
    seqs = [run.add([i] * 6, max_tokens=6) for i in range(4)]
    run.step()
    run.step()
    tokens = [tokens_of(seq) for seq in seqs]
    run.step(is_done=False)
    assert [tokens_of(seq) for seq in seqs] == tokens
    assert run.waiting == seqs
    assert run.manager.num_free_blocks == run.manager.num_blocks
    run.finish()


def test_blocks_of_a_failed_step_cannot_be_hit():
    run = Run(block_size=4, budget=12)
    run.add([1] * 13)
    run.step(is_done=False)
    again = run.add([1] * 9)
    run.step()
    run.step()
    assert again.num_cached_tokens == 8, "found in what its twin computed after the failure, not before"
    run.finish()


def test_blocks_of_earlier_steps_survive_a_failed_one():
    run = Run(block_size=4, budget=8)
    run.add([1] * 20)
    run.step()  # two blocks are computed
    run.step(is_done=False)  # two more are not
    out = run.step()
    assert chunk_lens(out) == {"seq-0": 8}
    assert run.seqs[0].num_computed_tokens == 16, "it went on after the two blocks of the first step"


def test_failed_step_that_preempted_somebody_keeps_the_order():
    run = Run(num_blocks=6, block_size=4)
    seqs = [run.add([i] * 7, max_tokens=9) for i in range(3)]
    run.step()
    run.step()
    late = run.add([5], max_tokens=1)
    assert run.step(is_done=False).preempted == [seqs[2]]
    assert run.waiting == [*seqs, late]
    run.finish()


def test_blocks_that_were_shared_within_a_failed_step_are_forgotten():
    run = Run(block_size=4, budget=32)
    run.add([1] * 10)
    run.add([1] * 14)
    run.step(is_done=False)
    assert run.manager.num_free_blocks == run.manager.num_blocks
    run.finish()  # nobody reads the slots that the failed step spoiled


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_samples_survive_a_failed_step(num_steps):
    """Of their prompt, of their first copies, and later; with swap space that is not used."""
    run = Run(block_size=4, budget=32, num_swap_blocks=4)
    run.add([1] * 6, n=3, max_tokens=6)
    for _ in range(num_steps):
        run.step()
    run.step(is_done=False)
    run.finish()


# ---- prefix caching, and what is counted


def test_requests_of_one_step_share_their_prefix():
    run = Run(block_size=4, budget=32)
    first, second = run.add([1] * 10), run.add([1] * 10 + [2])
    out = run.step()
    assert chunk_lens(out) == {"seq-0": 10, "seq-1": 3}
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert run.kv_use(out) == (13, 4 * 4)  # two blocks shared, one of each alone
    assert run.stats.prefix_cache_query_tokens == 21
    assert run.stats.prefix_cache_hit_tokens == 8


@pytest.mark.parametrize("num_swap_blocks", [None, 8])
def test_preempted_sequence_is_not_counted_as_a_hit(num_swap_blocks):
    run = Run(num_blocks=6, block_size=4, num_swap_blocks=num_swap_blocks)
    for i in range(3):
        run.add([i] * 7, max_tokens=9)
    run.finish()
    assert run.stats.num_preemptions > 0
    assert run.stats.prefix_cache_query_tokens == 3 * 7
    assert run.stats.prefix_cache_hit_tokens == 0
    assert [seq.num_cached_tokens for seq in run.seqs] == [0, 0, 0]


def test_of_a_prompt_that_is_cached_whole_only_the_last_block_is_computed():
    run = Run(block_size=4)
    run.add([1] * 8, max_tokens=2)
    run.finish()
    second = run.add([1] * 8, max_tokens=2)
    assert chunk_lens(run.step()) == {"seq-1": 4}
    run.finish()
    assert second.num_cached_tokens == 4
    assert (run.stats.prefix_cache_query_tokens, run.stats.prefix_cache_hit_tokens) == (16, 4)


def test_second_turn_of_a_chat_finds_the_answer_to_the_first():
    run = Run(block_size=4, budget=32)
    first = run.add([1, 2, 3, 4, 5], max_tokens=9)
    run.finish()
    second = run.add([*tokens_of(first), 7, 8, 9], max_tokens=2)
    # 14 tokens, of which the last was never computed: 13, in three full blocks and a part
    assert chunk_lens(run.step()) == {"seq-1": 17 - 12}
    assert second.num_cached_tokens == 12
    run.finish()


def test_cached_prompt_is_counted_right_while_somebody_else_owns_it():
    """Its last block is computed anew, in a block of its own."""
    run = Run(block_size=4, budget=32)
    run.add([1] * 8, max_tokens=9)
    run.step()
    run.add([1] * 8, max_tokens=9)
    out = run.step()
    assert out.moves == BlockMoves()
    assert chunk_lens(out) == {"seq-0": 1, "seq-1": 4}
    assert run.kv_use(out) == (9 + 4, 4 * 4)
    run.finish()


def test_waste_is_counted_over_blocks_and_not_over_sequences():
    run = Run(num_blocks=64, block_size=8, budget=64)
    for _ in range(3):
        run.add([1] * 17)
    out = run.step()
    assert run.kv_use(out) == (16 + 3, (2 + 3) * 8)  # two blocks shared by three, and one token of each
    assert (out.num_decodes, out.num_scheduled_tokens) == (2, 19)


def test_idle_scheduler_has_no_work():
    run = Run()
    out = run.scheduler.schedule()
    assert (list(out.chunks), out.preempted, out.moves) == ([], [], BlockMoves())
    assert (out.num_scheduled_tokens, run.stats.uses) == (0, {})
