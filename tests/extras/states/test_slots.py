"""Slots of states under random traffic: each chunk finds the state after exactly the tokens before it.

The fake pool keeps, for each slot, the tokens that its state has seen. So a state that is used twice, copied too early,
or not copied at all shows in the next chunk.
"""

import random

import pytest

from nanovllm.extras.extended_scheduler import count_places, fork_anytime
from nanovllm.extras.full_observer import SchedulingStats
from nanovllm.extras.full_sequence import Sequence
from nanovllm.extras.request_params import SamplingParams
from nanovllm.extras.roll_back import roll_back
from nanovllm.extras.states.slots import StateBlockManager, StateMoves, StateScheduler


class Run:
    """A scheduler whose model is a function of the tokens that a state has seen."""

    def __init__(self, rng, num_slots, num_blocks, budget):
        self.rng = rng
        self.blocks = StateBlockManager(num_blocks, 2, num_slots, SchedulingStats())
        self.scheduler = StateScheduler(self.blocks, num_slots, budget, 12)
        self.pool = [None] * (num_slots + 1)
        self.num_added = self.num_ended = 0
        self.outputs = {}

    def add(self):
        prompt = [self.rng.randrange(50) for _ in range(self.rng.randint(1, 7))]
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
        moves = step.copies
        assert isinstance(moves, StateMoves)
        for source, destination in moves.state_copies:
            self.pool[destination] = self.pool[source]
        assert len(set(moves.slots)) == len(step.chunks), "no slot is used twice"
        for (seq, start, num_new_tokens), slot in zip(step.chunks, moves.slots, strict=True):
            assert slot > 0, "the null slot is for padding"
            tokens = seq.token_ids.view(0, start + num_new_tokens).tolist()
            seen = self.pool[slot] if start else []
            assert seen == tokens[:start], "the state after the tokens before the chunk"
            self.pool[slot] = tokens
        if fails:
            roll_back(self.scheduler)
            return
        self.scheduler.update(step, [next_token(seq) for seq in step.samples])

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
    return (sum(seq.token_ids.view().tolist()) + 7 * seq.sample_index) % 50


@pytest.mark.parametrize("seed", range(40))
def test_each_chunk_finds_its_state(seed):
    """Seen to fail with copies of this step's forks, with copies in any order, and with slots that are freed late."""
    rng = random.Random(seed)
    run = Run(rng, rng.randint(3, 6), rng.randint(5, 12), rng.randint(1, 9))
    for _ in range(120):
        what = rng.random()
        if what < 0.25:
            run.add()
        elif what < 0.3:
            run.abort()
        elif what < 0.4:
            run.fork()
        else:
            run.step(fails=what > 0.97)
        check_owners(run)
    for _ in range(400):
        run.step()
    check_owners(run)
    assert not run.scheduler.running
    assert not run.scheduler.waiting
    assert run.blocks.num_free_slots == run.blocks.num_slots
    assert run.blocks.num_used_blocks == 0


def check_owners(run):
    """Running sequences own one slot each, waiting ones none."""
    slots = [run.blocks.slot_of(seq) for seq in run.scheduler.running]
    assert len(set(slots)) == len(slots) == run.blocks.num_slots - run.blocks.num_free_slots
    assert all(seq not in run.blocks._slots for seq in run.scheduler.waiting)


def test_a_request_waits_until_all_of_its_samples_have_slots():
    blocks = StateBlockManager(num_blocks=50, block_size=2, num_slots=3, observer=SchedulingStats())
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
    blocks = StateBlockManager(num_blocks=9, block_size=2, num_slots=3)
    blocks._state_copies = [(1, 2)]
    assert not StateScheduler(blocks, 3, 8, 20).schedule().chunks
    assert blocks.take_state_copies() == [(1, 2)]
