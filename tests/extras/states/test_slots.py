"""Slots of states under random traffic: each chunk finds the state after exactly the tokens before it.

The fake pool keeps, for each slot, the tokens that its state has seen. So a state that is used twice, copied too early,
or not copied at all shows in the next chunk.
"""

import random

import pytest
from nanovllm_extras.states.known_snapshots import KnownStateBlockManager, OverlappedStateScheduler
from nanovllm_extras.states.state_swap import StateSwap, StateSwapSpace

from nanovllm_extras.full_observer import SchedulingStats
from nanovllm_extras.full_sequence import Sequence
from nanovllm_extras.invariants import check_invariants
from nanovllm_extras.memory.slots import StateBlockManager, StateScheduler
from nanovllm_extras.records import Moves
from nanovllm_extras.request_params import SamplingParams
from nanovllm_extras.scheduling.roll_back import roll_back
from nanovllm_extras.scheduling.scheduler import count_places, fork_anytime


class Run:
    """A scheduler whose model is a function of the tokens that a state has seen."""

    scheduler_class, blocks_class = StateScheduler, StateBlockManager

    def __init__(self, rng, sizes=None, has_cache=True, observer=None, has_swap=False):
        self.rng = rng
        num_slots, num_blocks, budget = sizes or (rng.randint(3, 9), rng.randint(5, 16), rng.randint(1, 9))
        observer = observer or SchedulingStats()
        self.blocks = self.blocks_class(num_blocks, 2, has_cache, observer, num_slots=num_slots)
        self.blocks.snapshot_interval = rng.choice([0, 1, 2, 64])
        self.space = preemption = None
        if has_swap:
            self.space = StateSwapSpace(rng.randint(1, 12), rng.randint(1, 4), self.blocks)
            preemption = StateSwap(self.blocks, self.space)
        max_num_seqs = rng.randint(3, num_slots)
        self.scheduler = self.scheduler_class(self.blocks, max_num_seqs, budget, 12, preemption=preemption)
        self.texts = [[rng.randrange(50) for _ in range(7)] for _ in range(3)]
        # the slots in host memory, which have negative numbers, are at its end
        self.pool = [None] * (num_slots + 1 + (self.space.num_slots if self.space else 0))
        self.num_added = self.num_ended = 0
        self.outputs = {}

    def act(self):
        """Add, abort or fork a request, or run a step, at random."""
        what = self.rng.random()
        if what < 0.25:
            self.add()
        elif what < 0.3:
            self.abort()
        elif what < 0.4:
            self.fork()
        else:
            self.step(fails=what > 0.97)

    def add(self):
        prompt = self.rng.choice(self.texts)[: self.rng.randint(1, 7)]
        if self.rng.random() < 0.3:
            prompt = [*prompt[:-1], self.rng.randrange(50)]
        n = self.rng.choice([1, 1, 2, 3])
        params = SamplingParams(temperature=0, max_tokens=self.rng.randint(1, 5), ignore_eos=True)
        seqs = [Sequence(str(self.num_added), prompt, params, sample_index=i) for i in range(n)]
        seqs[0].children = seqs[1:]
        self.num_added += n
        self.scheduler.add(seqs[0])

    def step(self, fails=False):
        step = self.scheduler.schedule()
        if not step.chunks:
            return
        self.compute(step)
        if fails:
            roll_back(self.scheduler)
            return
        self.save(step)
        self.scheduler.update(step, [next_token(seq) for seq in step.samples])

    def save(self, step):
        """For runs with a K/V store."""

    def tokens_of(self, seq, num_tokens):
        return seq.token_ids.view(0, num_tokens).tolist()

    def compute(self, step):
        moves = step.copies
        assert isinstance(moves, Moves)
        for source, destination in moves.state_copies:
            self.pool[destination] = self.pool[source]
        assert len(set(moves.slots)) == len(step.chunks), "no slot is used twice"
        for (seq, start, num_new_tokens), slot in zip(step.chunks, moves.slots, strict=True):
            assert slot > 0, "the null slot is for padding"
            tokens = self.tokens_of(seq, start + num_new_tokens)
            seen = self.pool[slot] if start else []
            assert seen == tokens[:start], "the state after the tokens before the chunk"
            self.pool[slot] = tokens

    def abort(self):
        if alive := [*self.scheduler.running, *self.scheduler.waiting]:
            seq = self.rng.choice(alive)
            self.scheduler.finish(seq, "abort")

    def fork(self):
        """Fork a sequence that has caught up, between two steps, as a beam search does."""
        ready = [seq for seq in self.scheduler.running if seq.num_computed_tokens == seq.num_tokens - 1]
        if not ready or count_places(self.scheduler.running) >= self.scheduler.max_num_seqs:
            return
        parent = self.rng.choice(ready)
        tokens = [*parent.token_ids.view(0, parent.num_tokens - 1).tolist(), self.rng.randrange(50)]
        child = Sequence("fork", tokens, parent.sampling_params, sample_index=100 + self.num_added)
        child.max_num_tokens, child.order = parent.max_num_tokens, (*parent.order[:-1], child.sample_index)
        self.num_added += 1
        fork_anytime(self.scheduler, parent, child)


def next_token(seq):
    return token_after(seq.token_ids.view().tolist(), seq.sample_index)


def token_after(tokens, sample_index):
    return (sum(tokens) + 7 * sample_index) % 50


class OverlappedRun(Run):
    """Launches a step before the tokens of the step before are known. Its model knows them, as a device does."""

    scheduler_class, blocks_class = OverlappedStateScheduler, KnownStateBlockManager

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.newest, self.ahead, self.num_ahead = [], None, 0

    def fork(self):
        """Beam searches wait for each token."""

    def launch(self):
        step = self.scheduler.schedule()
        if not step.chunks:
            return None
        self.compute(step)
        lens = [(step.chunks[place], seq.sample_index) for seq, place in self.sampled(step)]
        self.newest = [token_after(self.tokens_of(seq, start + n), index) for (seq, start, n), index in lens]
        return step, self.newest

    def sampled(self, step):
        return zip(step.samples, step.sampled_chunks, strict=True)

    def tokens_of(self, seq, num_tokens):
        ids = seq.token_ids.data[:num_tokens].tolist()
        return [token_id if token_id >= 0 else self.newest[-1 - token_id] for token_id in ids]

    def step(self, fails=False):
        launched, self.ahead = self.ahead if self.scheduler.in_flight else None, None
        launched = launched or self.launch()
        if launched is None:
            return
        if self.scheduler.can_schedule_ahead():
            self.ahead = self.launch()
            self.num_ahead += self.ahead is not None
        if fails:
            roll_back(self.scheduler)
            return
        self.scheduler.update(*launched)


@pytest.mark.parametrize("kind", ["snapshots", "no cache", "swap", "overlap", "overlap and swap"])
@pytest.mark.parametrize(
    "seed", [seed if seed < 4 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(60)]
)
def test_each_chunk_finds_its_state(seed, kind):
    """Seen to fail with copies of this step's forks, hits without a snapshot, and snapshots of failed steps."""
    kind_of_run = OverlappedRun if "overlap" in kind else Run
    run = kind_of_run(random.Random(seed), has_cache=kind != "no cache", has_swap="swap" in kind)
    for _ in range(120):
        run.act()
        check_owners(run)
    for _ in range(400):
        run.step()
    check_owners(run)
    assert not run.scheduler.running
    assert not run.scheduler.waiting
    assert run.blocks.num_free_slots == run.blocks.num_slots
    assert run.blocks.num_used_blocks == 0
    assert "overlap" not in kind or run.num_ahead > 20
    if kind == "no cache":
        assert run.blocks.num_snapshots == run.blocks.observer.prefix_cache_hit_tokens == 0


def check_owners(run):
    """Nothing contradicts itself, and host slots hold the states after what their waiting sequences have computed."""
    check_invariants(run.scheduler)
    if run.space is not None:
        for seq, slot in run.space._slots.items():
            assert run.pool[slot] == seq.token_ids.view(0, seq.num_computed_tokens).tolist()


def test_a_request_waits_until_all_of_its_samples_have_slots():
    blocks = StateBlockManager(50, 2, False, SchedulingStats(), num_slots=3)
    scheduler = StateScheduler(blocks, 10, 1, 20)  # a budget of 1: no prompt is complete after the first step
    params = SamplingParams(temperature=0, max_tokens=3)
    for name, n in (("a", 2), ("b", 2), ("c", 1)):
        seqs = [Sequence(name, [1, 2, 3], params, sample_index=i) for i in range(n)]
        seqs[0].children = seqs[1:]
        scheduler.add(seqs[0])
    scheduler.schedule()
    assert [seq.request_id for seq in scheduler.running] == ["a"]
    scheduler.max_num_batched_tokens = scheduler.max_chunk_len = 8
    scheduler.schedule()
    assert [(seq.request_id, seq.sample_index) for seq in scheduler.running] == [("a", 0), ("a", 1)]
    assert [seq.request_id for seq in scheduler.waiting] == ["b", "c"], "one slot is free, and b needs two"


def test_a_step_that_is_not_run_keeps_the_copies_of_earlier_forks():
    blocks = StateBlockManager(9, 2, num_slots=3)
    blocks.put_back([(1, 2)])
    assert not StateScheduler(blocks, 3, 8, 20).schedule().chunks
    assert blocks.take_state_copies() == [(1, 2)]


def test_a_slot_that_an_interrupt_leaves_behind_is_free_after_a_roll_back():
    """The interrupt comes between two lines of `schedule`: the sequence has a slot, and no blocks yet."""
    run = Run(random.Random(0))
    run.add()
    assert run.blocks.try_admit(run.scheduler.waiting[0])
    roll_back(run.scheduler)
    assert run.blocks.num_free_slots == run.blocks.num_slots
    check_owners(run)


def prefill(scheduler, name, prompt):
    """Compute a prompt and one token. Returns the chunks, and the state copies of each step."""
    seq = Sequence(name, prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    scheduler.add(seq)
    chunks, copies = [], []
    while seq.finish_reason is None:
        step = scheduler.schedule()
        chunks += [(start, start + n) for _, start, n in step.chunks]
        copies.append(step.copies.state_copies)
        scheduler.update(step, [7] * len(step.samples))
    return chunks, copies


def test_the_example_of_the_docstring():
    """A takes a snapshot at its last full block; B finds it; C, which branches before it, finds none but takes one."""
    scheduler = StateScheduler(StateBlockManager(20, 4, observer=SchedulingStats(), num_slots=3), 3, 64, 40)
    tokens = list(range(10))
    assert prefill(scheduler, "a", tokens) == ([(0, 8), (8, 10)], [[], [(1, 2)]])
    assert prefill(scheduler, "b", tokens[:9]) == ([(8, 9)], [[(2, 1)]])
    assert prefill(scheduler, "c", [*tokens[:4], 20, 21])[0] == [(0, 4), (4, 6)]
    assert prefill(scheduler, "d", [*tokens[:4], 30, 31, 32])[0] == [(4, 7)]
    assert scheduler.block_manager.num_snapshots == 2


def test_snapshots_are_taken_at_branches_ends_and_intervals():
    """The second prompt leaves the first after 5 tokens, or 2 cached blocks. The third one leaves both there."""
    for interval, chunks in {
        0: [(0, 4), (4, 12), (12, 13)],
        2: [(4, 8), (8, 12), (12, 13)],  # the first prompt has a snapshot there
        4: [(0, 4), (4, 8), (8, 12), (12, 13)],
        5: [(0, 4), (4, 10), (10, 12), (12, 13)],
    }.items():
        blocks = StateBlockManager(40, 2, observer=SchedulingStats(), num_slots=9, snapshot_interval=interval)
        scheduler = StateScheduler(blocks, 1, 64, 20)
        prefill(scheduler, "a", list(range(9)))
        assert prefill(scheduler, "b", [*range(5), *range(20, 28)])[0] == chunks
        assert prefill(scheduler, "c", [*range(5), 40])[0] == [(4, 6)]


def test_an_evicted_block_takes_its_snapshot_with_it():
    scheduler = StateScheduler(StateBlockManager(3, 4, observer=SchedulingStats(), num_slots=4), 1, 64, 12)
    prefill(scheduler, "a", list(range(9)))
    assert scheduler.block_manager.num_snapshots == 1
    prefill(scheduler, "b", list(range(20, 29)))  # needs all three blocks
    assert prefill(scheduler, "a again", list(range(9)))[0] == [(0, 8), (8, 9)]
    assert scheduler.block_manager.num_snapshots == 1


def test_the_least_recently_used_snapshot_is_dropped_first():
    scheduler = StateScheduler(StateBlockManager(30, 4, observer=SchedulingStats(), num_slots=3), 1, 64, 20)
    prompts = [[10 * i + j for j in range(6)] for i in range(3)]
    for prompt in (*prompts[:2], prompts[0], prompts[2]):  # two snapshots fit beside the sequence that runs
        prefill(scheduler, "", prompt)
    assert prefill(scheduler, "", prompts[0])[0] == [(4, 6)]
    assert prefill(scheduler, "", prompts[1])[0] == [(0, 4), (4, 6)]
