"""Runs of a scheduler without a model, in which every step is checked.

No model runs. Each sequence's next token is made up from all of its tokens, so what a request must produce follows from
only its prompt (`expected_output`), however it was chunked, shared or preempted. `fake_kv_cache` plays the KV cache.
`Run.step` checks what holds in every step.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nanovllm.block_manager import BlockManager
from nanovllm.observer import Stats
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler, Step
from nanovllm.sequence import Sequence
from tests.fake_kv_cache import (
    FakeKVCache,
    WriterCheck,
    check_cached_blocks,
    check_ownership,
    stored_slots,
    table_of,
    tokens_of,
)

VOCAB_SIZE = 50


def next_token(tokens, sample_index=0):
    return (sum(token * (i + 3) for i, token in enumerate(tokens)) + 7 * len(tokens) + 11 * sample_index) % VOCAB_SIZE


def expected_output(seq, eos_token_ids, max_model_len, capacity, min_tokens=0):
    """(tokens, finish_reason, stop_reason) of one sample, by generating it by itself, one token at a time."""
    params, tokens = seq.sampling_params, tokens_of(seq)[: seq.num_prompt_tokens]
    while True:
        token = next_token(tokens, seq.sample_index)
        tokens.append(token)
        output = tokens[seq.num_prompt_tokens :]
        if len(output) > min_tokens:
            if token in eos_token_ids and not params.ignore_eos:
                return output, "stop", None
            if token in (params.stop_token_ids or ()):
                return output, "stop", token
        if len(output) == params.max_tokens or len(tokens) == max_model_len:
            return output, "length", None
        if len(tokens) > capacity:
            return output, "length", "kv_cache"


def output_of(seq):
    return tokens_of(seq)[seq.num_prompt_tokens :]


class RecordingStats(Stats):
    """Keeps for each step the tokens that are stored and the slots that are reserved, by sight of the block tables."""

    def __init__(self):
        super().__init__()
        self.uses = {}
        self.recorded = []  # so that no two have the same id
        self.preemptions = Counter()  # of each sequence

    def on_preempt(self, seq, needy):
        super().on_preempt(seq, needy)
        self.preemptions[seq] += 1

    def on_schedule(self, step, running, blocks):
        super().on_schedule(step, running, blocks)
        self.recorded.append(step)
        self.uses[id(step)] = kv_use(running, blocks.block_size)


def kv_use(running, block_size):
    """(tokens stored, slots reserved); a block of several sequences counts once."""
    blocks = {block_id for seq in running for block_id in table_of(seq)}
    return len(stored_slots(running, block_size)), len(blocks) * block_size


class Run:
    """A scheduler, its fake cache, and all sequences that were ever added. The `make_…` methods choose the parts."""

    params_class, sequence_class = SamplingParams, Sequence

    def __init__(
        self,
        num_blocks=64,
        block_size=4,
        max_num_seqs=8,
        budget=16,
        max_model_len=64,
        eos_token_ids=frozenset(),
        enable_prefix_caching=True,
    ):
        self.eos_token_ids = eos_token_ids
        self.requests = []  # of each, its sequences
        self.num_steps = 0
        self.max_chunk_len = budget
        self.stats = self.make_stats()
        self.manager = self.make_manager(num_blocks, block_size, enable_prefix_caching, self.stats)
        self.scheduler = self.make_scheduler(self.manager, max_num_seqs, budget, max_model_len)
        self.cache = self.make_cache(block_size)

    def make_stats(self):
        return RecordingStats()

    def make_manager(self, *arguments):
        return BlockManager(*arguments)

    def make_scheduler(self, *arguments):
        return Scheduler(*arguments)

    def make_cache(self, block_size):
        return FakeKVCache(block_size)

    @property
    def seqs(self):
        return [seq for seqs in self.requests for seq in seqs]

    @property
    def waiting(self):
        return list(self.scheduler.waiting)

    @property
    def has_unfinished(self):
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def may_pause(self):
        """Whether a step may compute nothing."""
        return not self.has_unfinished

    def place_of(self, seq):
        """What the queues are sorted by: the order of arrival, and that of a request's samples."""
        return next(i for i, seqs in enumerate(self.requests) if seq in seqs), seq.sample_index

    def is_running(self, seq):
        return seq in self.scheduler.running

    def is_waiting(self, seq):
        """Whether it waits itself, or to begin with a request that waits."""
        return any(seq in (one, *one.children) for one in self.scheduler.waiting)

    def kv_use(self, out):
        """(tokens stored, slots reserved) of a step."""
        return self.stats.uses[id(out)]

    def add(self, prompt, n=1, **params):
        """The sequences of a new request; the one sequence if it has one."""
        params = self.params_class(n=n, **{"max_tokens": None, **params})
        seqs = [self.make_seq(f"seq-{len(self.requests)}", prompt, params, i) for i in range(n)]
        seqs[0].children = seqs[1:]
        self.requests.append(seqs)
        self.scheduler.add(seqs[0])
        return seqs if n > 1 else seqs[0]

    def make_seq(self, name, prompt, params, sample_index):
        return self.sequence_class(name, prompt, params, self.eos_token_ids, sample_index=sample_index)

    def step(self):
        """Schedule, compute, update; what `schedule()` said."""
        self.num_steps += 1
        flight = self.launch()
        if flight is None:
            return Step()
        self.update(flight)
        self.check_state()
        return flight.out

    def launch(self):
        """The next step, scheduled and computed; None if there is nothing to do."""
        before = Before(self)
        out = self.scheduler.schedule()
        before.check(out)
        self.check_scheduled(out)
        if not out.chunks:
            return None
        writes = [(seq, start, start + num_new) for seq, start, num_new in out.chunks]
        before.writers.check(writes, self.manager.block_size)
        self.cache.copy(out.copies)
        for write in writes:
            self.cache.write(*write)
        for seq, _, stop in writes:
            self.cache.check(seq, stop)
        samples, tokens = self.draw(writes, before)
        return Flight(out, samples, tokens)

    def draw(self, writes, before):
        """(sequences that have caught up, and their children; the next token of each)"""
        caught_up = [(seq, stop) for seq, _, stop in writes if stop == before.num_tokens[seq]]
        samples = [(sample, stop) for seq, stop in caught_up for sample in (seq, *before.children[seq])]
        tokens = [next_token(self.cache.tokens_of(seq, stop), seq.sample_index) for seq, stop in samples]
        return [seq for seq, _ in samples], tokens

    def update(self, flight):
        samples = [(row, seq) for row, seq in enumerate(flight.samples) if seq.finish_reason is None]
        assert self.scheduler.update(flight.out, flight.tokens) == samples

    def abort(self, seqs):
        for seq in seqs:
            if seq.finish_reason is None:
                self.scheduler.finish(seq, "abort")
        self.check_state()

    def finish(self, max_steps=None):
        """Step until all is done; how many steps that took."""
        first = self.num_steps
        max_steps = self.max_steps() if max_steps is None else max_steps
        while self.has_unfinished:
            self.step()
            assert self.num_steps - first <= max_steps, "hangs"
        self.check_end()
        return self.num_steps - first

    def max_steps(self):
        """While the first in order waits, no other is admitted, and the first of those that run advances each step."""
        lens = self.lens_at_the_end()
        return (len(lens) + 1) * sum(lens)

    def lens_at_the_end(self):
        return [seq.num_prompt_tokens + len(self.expected(seq)[0]) for seq in self.seqs]

    # ---- what always holds

    def check_scheduled(self, out):
        scheduler, size = self.scheduler, self.manager.block_size
        lens = [num_new for _, _, num_new in out.chunks]
        assert sum(lens) == out.num_scheduled_tokens <= scheduler.max_num_batched_tokens
        assert lens or self.may_pause, "some sequence always advances"
        assert len({id(seq) for seq, _, _ in out.chunks}) == len(lens)
        assert all(num_new == 1 for num_new in lens[: out.num_decodes])
        assert all(num_new > 1 for num_new in lens[out.num_decodes :])
        assert out.num_scheduled_tokens - out.num_decodes == sum(lens[out.num_decodes :])
        computed = {seq: seq.num_computed_tokens for seq in scheduler.running}
        for seq, start, num_new in out.chunks:
            assert computed[seq] == start + num_new
            assert len(table_of(seq)) == max(-(-computed[seq] // size), start // size), "a reserve"

    def check_state(self):
        waiting, running = self.waiting, self.scheduler.running
        self.check_blocks()
        assert all(len(table_of(seq)) == 0 for seq in waiting)
        for queue in (running, waiting):
            assert [self.place_of(seq) for seq in queue] == sorted(self.place_of(seq) for seq in queue)
        assert sum(1 + len(seq.children) for seq in running) <= self.scheduler.max_num_seqs
        assert all(seq.num_tokens <= self.scheduler.max_model_len for seq in self.seqs)
        self.check_tokens()
        unborn = [child for seq in running + waiting for child in seq.children]
        living = sorted(id(seq) for seq in running + waiting + unborn)
        assert living == sorted(id(seq) for seq in self.seqs if seq.finish_reason is None), "one is lost, or lives on"
        for seq in running:
            self.cache.check(seq, seq.num_computed_tokens)

    def check_blocks(self):
        check_ownership(self.manager, self.seqs)
        check_cached_blocks(self.manager, self.cache)

    def check_tokens(self):
        assert all(seq.num_tokens == len(seq.token_ids) for seq in self.seqs)

    def check_end(self):
        for seq in self.seqs:
            if seq.finish_reason != "abort" and seq.stop_reason != "a stop string":
                assert (output_of(seq), seq.finish_reason, seq.stop_reason) == self.expected(seq)
        check_ownership(self.manager, [])
        assert self.manager.num_used_blocks == 0

    def expected(self, seq):
        return expected_output(seq, self.eos_token_ids, self.scheduler.max_model_len, self.manager.capacity)


@dataclass
class Flight:
    """A step that is computed, while the scheduler has not heard of its tokens."""

    out: Step
    samples: list[Sequence]
    tokens: list[int]


class Before:
    """What was before a step, and the rules by which it may change: order, budget, limits and preemption."""

    def __init__(self, run):
        self.run = run
        self.running = list(run.scheduler.running)
        self.tables = {seq: table_of(seq) for seq in self.running}
        self.num_computed = {seq: seq.num_computed_tokens for seq in self.running}
        self.num_tokens = {seq: seq.num_tokens for seq in run.seqs}
        self.children = {seq: list(seq.children) for seq in run.seqs}
        self.writers = WriterCheck(self.running)

    def check(self, out):
        kept = [seq for seq in self.running if seq not in out.preempted]
        born = [child for seq, _, _ in out.chunks for child in self.children[seq] if not seq.children]
        admitted = [seq for seq in self.run.scheduler.running if seq not in kept + born]
        place_of = self.run.place_of
        assert all(place_of(victim) > place_of(seq) for victim in out.preempted for seq in kept), (
            "the last in order goes"
        )
        self.check_budget(out, kept + admitted)
        self.check_queues(out, admitted)

    def check_queues(self, out, admitted):
        place_of = self.run.place_of
        assert all(place_of(seq) < place_of(other) for seq in admitted for other in self.run.waiting), "first in order"
        assert all(place_of(one) > place_of(next_one) for one, next_one in pairwise(out.preempted)), "from the end"
        assert not (admitted and out.preempted), "it would only come back to be preempted again"
        self.check_preempted(out, admitted)

    def check_preempted(self, out, admitted):
        assert all(seq.num_computed_tokens == 0 for seq in out.preempted)

    def check_budget(self, out, in_turn):
        """Those that ran, in order, then new ones: each what it needs, up to the limit of a chunk, while the budget
        lasts."""
        left, expected = self.run.scheduler.max_num_batched_tokens, {}
        starts = {seq: start for seq, start, _ in out.chunks}
        for seq in in_turn:
            start = starts[seq] if seq in starts else self.num_computed[seq]
            assert start == self.num_computed.get(seq, start) or seq in out.preempted
            num_new = min(self.num_tokens[seq] - start, left, self.run.max_chunk_len)
            left -= num_new
            if num_new:
                expected[seq] = start, num_new
        assert {seq: span for seq, *span in out.chunks} == {seq: list(span) for seq, span in expected.items()}


def chunk_lens(out):
    return {seq.request_id: num_new for seq, _, num_new in out.chunks}


# ---- random traffic


class SchedulerMachine(RuleBasedStateMachine):
    """Any pool, block size, budget and limits, with and without prefix caching.

    Requests with one or several samples come; samples reach stop tokens and stop strings, or are aborted. Preemption,
    forks and copies follow from caches of a few blocks. `Run` checks each step, and at the end that every request was
    served in a bounded number of steps and that nothing has leaked.
    """

    make_run = Run

    @initialize(data=st.data())
    def make(self, data):
        self.run = self.make_run(**self.draw_options(data))

    def draw_options(self, data):
        block_size, num_blocks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 10))
        return {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": data.draw(st.integers(1, 5)),
            "budget": data.draw(st.sampled_from([1, 2, 3, 5, 8, 13, 20])),
            "max_model_len": data.draw(st.sampled_from([2, 12, 40, 40])),
            "eos_token_ids": data.draw(st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=2)),
            "enable_prefix_caching": data.draw(st.booleans()),
        }

    def draw_params(self, data):
        return {
            "max_tokens": data.draw(st.none() | st.integers(1, 12)),
            "ignore_eos": data.draw(st.booleans()),
            "stop_token_ids": data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2)),
        }

    @property
    def living(self):
        return [seqs for seqs in self.run.requests if any(seq.finish_reason is None for seq in seqs)]

    @property
    def longest_prompt(self):
        return min(self.run.manager.capacity, self.run.scheduler.max_model_len - 1)

    @rule(data=st.data(), n=st.sampled_from([1, 1, 2, 3]), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def add(self, data, n, tokens):
        n = min(n, self.run.scheduler.max_num_seqs)
        self.run.add(tokens[: self.longest_prompt], n=n, **self.draw_params(data))
        self.run.check_state()

    @precondition(lambda self: self.living)
    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps):
        for _ in range(num_steps):
            if self.run.has_unfinished:
                self.run.step()

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def abort(self, data):
        self.run.abort(data.draw(st.sampled_from(self.living)))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def find_stop_string(self, data):
        """The text of one sample ends it; the others go on."""
        seqs = [seq for seq in data.draw(st.sampled_from(self.living)) if seq.finish_reason is None]
        self.end_by_its_text(data.draw(st.sampled_from(seqs)))

    def end_by_its_text(self, seq):
        if output_of(seq):
            self.run.scheduler.finish(seq, "stop", "a stop string")
            assert (seq.finish_reason, self.run.is_running(seq), self.run.is_waiting(seq)) == ("stop", False, False)
            self.run.check_state()

    def teardown(self):
        if hasattr(self, "run"):
            self.run.finish()


SETTINGS = settings(stateful_step_count=30, deadline=None, derandomize=True, report_multiple_bugs=False)
