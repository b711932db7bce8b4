"""Runs of a scheduler without a model, in which every step is checked: for tests of scheduling and of its extras.

No model runs. Each sequence's next token is made up from all of its tokens, so what a request must produce follows from
only its prompt (`expected_output`), however it was chunked, shared, preempted, swapped or rolled back. `fake_kv_cache`
plays the KV cache and the swap space, and counts are checked against naive ones over its slots. `Run.step` checks what
holds in every step.
"""

import random
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nanovllm.block_manager import BlockManager
from nanovllm.extras.roll_back import roll_back
from nanovllm.extras.full_observer import SchedulingStats
from nanovllm.extras.preemption import Recompute
from nanovllm.extras.policies import fcfs
from nanovllm.extras.request_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.extras.full_sequence import Sequence
from nanovllm.sequence import SequenceStatus
from nanovllm.scheduler import Step
from tests.conftest import has_extra
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
    """(tokens, finish_reason, stop_reason) of one sample, by generating it by itself, one token at a time."""
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

    The scheduler draws a token for each, and the search puts another in its place. A beam that has caught up before
    the others gives its blocks up.
    """

    def __init__(self, run, request_id, prompt, width, max_tokens):
        self.scheduler, self.prompt, self.width, self.max_tokens = run.scheduler, prompt, width, max_tokens
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
                if i == 0 and beam.status is SequenceStatus.RUNNING:
                    beam.token_ids.data[len(before)] = token
                    self.beams.append(beam)
                else:
                    self.beams.append(self.fork(beam, [*before, token]))

    def fork(self, parent, tokens):
        child = self.new_beam(parent.request_id, tokens)
        child.num_prompt_tokens = parent.num_prompt_tokens
        child.max_num_tokens, child.arrival = parent.max_num_tokens, parent.arrival
        child.order = (*parent.order[:2], child.sample_index)
        self.scheduler.fork(parent, child)
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
        blocks = (num_blocks, block_size, enable_prefix_caching, self.stats)
        if window is None:
            self.manager = BlockManager(*blocks)
        else:
            from nanovllm.extras.window_blocks import WindowBlockManager

            self.manager = WindowBlockManager(*blocks, window=window, max_chunk_len=threshold or budget)
        self.swap_space, preemption, scheduler_class = None, Recompute(self.manager), Scheduler
        if num_swap_blocks is not None:
            from nanovllm.extras.swap.space import Swap, SwapSpace

            self.swap_space = SwapSpace(num_swap_blocks, block_size)
            preemption = Swap(self.manager, self.swap_space)
        if overlap:
            from nanovllm.extras.overlap import OverlappedScheduler as scheduler_class
        self.scheduler = scheduler_class(
            self.manager, max_num_seqs, budget, max_model_len, policy, threshold, preemption
        )
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

    def is_beam(self, seq):
        return any(seq in search.all_seqs for search in self.searches)

    def host_block_ids(self, seq):
        return [] if self.swap_space is None else self.swap_space.host_block_ids(seq)

    def add(self, prompt, n=1, priority=0, **params):
        """The sequences of a new request; the one sequence if it has one."""
        params = SamplingParams(n=n, **{"max_tokens": None, **params})
        name = f"seq-{len(self.requests)}"
        processors = (Asks(),) if params.frequency_penalty else ()
        seqs = [Sequence(name, prompt, params, self.eos_token_ids, priority, 0, i, processors) for i in range(n)]
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
        self.check_state()
        return flight.out

    def launch(self):
        before = Before(self)
        if self.flights and not self.scheduler.can_schedule_ahead():
            out = Step()
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
        moved_to = {block_id for _, block_id in swap_ins(out) + out.moves.copies}
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
        journal = self.cache.move(swap_outs(out), swap_ins(out), out.moves.copies)
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
        lens = [seq.num_prompt_tokens + len(self.expected(seq)[0]) for seq in self.seqs if not self.is_beam(seq)]
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
        living = sorted(id(seq) for seq in running + waiting + unborn)
        assert living == sorted(id(seq) for seq in self.seqs if seq.finish_reason is None), "one is lost, or lives on"
        for seq in running:
            self.cache.check(seq, seq.num_computed_tokens)
        self.check_swap_space()

    def check_swap_space(self):
        kept = [block_id for seq in self.seqs for block_id in self.host_block_ids(seq)]
        if self.swap_space is None:
            assert kept == []
            return
        every = sorted(kept + self.swap_space._free)
        assert every == list(range(self.swap_space.num_blocks)), "each block is free, or keeps one sequence's"
        assert self.swap_space.num_free_blocks == len(every) - len(kept)
        for seq in self.seqs:
            if self.host_block_ids(seq):
                assert seq.status is SequenceStatus.WAITING
                self.cache.check_host(seq, seq.num_computed_tokens, self.host_block_ids(seq))
            elif seq.status is SequenceStatus.WAITING:
                assert seq.num_computed_tokens == 0

    def check_end(self):
        for seq in self.seqs:
            if not self.is_beam(seq) and seq.finish_reason != "abort" and seq.stop_reason != "a stop string":
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

    out: Step
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
        self.host = {seq: run.host_block_ids(seq) for seq in run.waiting}
        self.num_free_host = 0 if run.swap_space is None else run.swap_space.num_free_blocks
        self.writers = WriterCheck(self.running)
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
        size, free = self.run.manager.block_size, self.run.manager.num_free_blocks
        missing = [-(-seq.num_tokens // size) - len(table_of(seq)) for seq in self.run.scheduler.running]
        if self.run.window is not None:
            missing = [self.run.manager.num_missing_blocks(seq) for seq in self.run.scheduler.running]
        needed = sum(max(0, n) for n in missing) + sum(seq.has_shared_tail for seq in self.run.scheduler.running)
        if self.askers or (not out.chunks and needed > free):
            assert out == Step()
            assert {seq: table_of(seq) for seq in self.running} == self.tables
            return True
        return False

    def check(self, out):
        kept = [seq for seq in self.running if seq not in out.preempted]
        born = [child for seq, _, _ in out.chunks for child in self.children[seq] if not seq.children]
        admitted = [seq for seq in self.run.scheduler.running if seq not in kept + born]
        assert all(victim.order > seq.order for victim in out.preempted for seq in kept), "the last in order goes"
        self.check_budget(out, kept + admitted)
        if not self.run.searches:  # beams that are ready may have to let others pass
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


def swap_outs(out):
    return getattr(out.moves, "swap_outs", [])


def swap_ins(out):
    return getattr(out.moves, "swap_ins", [])


def chunk_lens(out):
    return {seq.request_id: num_new for seq, _, num_new in out.chunks}


# ---- random traffic


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


def policies():
    """First come, first served, those of the extra, and one of our own."""
    named = [fcfs]
    if has_extra("policies.py"):
        from nanovllm.extras.policies import POLICIES

        named += POLICIES.values()
    return [*named, lambda seq: -seq.num_prompt_tokens]


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
            policy=data.draw(st.sampled_from(policies())),
            threshold=data.draw(st.sampled_from([0, 0, 1, 2, 4])),
            num_swap_blocks=data.draw(st.sampled_from([None, 0, 1, 4, 12, 12] if has_extra("swap") else [None])),
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
        if seq.num_output_tokens and not self.run.is_beam(seq):
            self.run.scheduler.finish(seq, "stop", "a stop string")
            assert (seq.finish_reason, seq.status) == ("stop", SequenceStatus.FINISHED)
            self.run.check_state()

    @rule()
    def reset_prefix_cache(self):
        self.run.manager.prefix_cache.reset()

    def teardown(self):
        if hasattr(self, "run"):
            self.run.finish()


SETTINGS = settings(stateful_step_count=30, deadline=None, derandomize=True, report_multiple_bugs=False)
