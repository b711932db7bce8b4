"""Slots of states: each chunk finds the state after exactly the tokens before it.

Random traffic with all parts of a scheduler (`state_traffic.py`), and decisions one by one. `test_drafted_slots.py` has
more of drafts, `test_state_store.py` of stores, `test_state_swap.py` of host memory.

Seen to fail with copies of this step's forks, hits without a snapshot, snapshots of failed steps, and with a sequence
that keeps the slot of a rejected draft, or its own slot after accepted drafts; slots of drafts that are not freed;
drafts that pass a snapshot that is due; a snapshot that is taken before its drafts are verified, or never; with a
stored snapshot of another slot, of another block, or without the blocks that the pool has.
"""

import random
from itertools import combinations

import pytest

from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.scheduling.roll_back import roll_back
from tests.extras.states.state_traffic import Traffic, make_scheduler

FEATURES = ("overlap", "drafts", "swap", "store")
KINDS = [kind for count in range(5) for kind in combinations(FEATURES, count)]
KINDS += [("no cache",), ("no cache", "overlap"), ("no cache", "drafts"), ("no cache", "overlap", "drafts", "swap")]
SEEDS = [seed if seed < 2 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(10)]


@pytest.mark.parametrize("kind", KINDS, ids=" and ".join)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_chunk_finds_its_state(seed, kind):
    """Overlap, drafts, swap and a store that fails, and all of them together."""
    run = Traffic(random.Random(seed), *kind)
    for _ in range(150):
        run.act(rate=0.15 if "drafts" in kind else 0.25)
        run.check()
    run.check_end()
    assert "overlap" not in kind or "drafts" in kind or run.num_ahead > 20
    if "no cache" in kind:
        assert len(run.states.snapshots) == run.blocks.observer.prefix_cache_hit_tokens == 0


def test_a_request_waits_until_all_of_its_samples_have_slots():
    limits = 10, 1, 20  # a budget of 1: no prompt is complete after the first step
    scheduler = make_scheduler(50, 2, num_slots=3, limits=limits, has_cache=False)
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
    scheduler = make_scheduler(9, 2, num_slots=3, limits=(3, 8, 20))
    blocks = scheduler.block_manager
    blocks.states.copies_for_next.append((1, 2))
    for _ in range(2):
        assert not scheduler.schedule().chunks
    assert blocks.take_copies().state_copies == [(1, 2)]
    assert blocks.take_copies().state_copies == []


def test_a_slot_that_an_interrupt_leaves_behind_is_free_after_a_roll_back():
    """The interrupt comes between two lines of `schedule`: the sequence has a slot, and no blocks yet."""
    run = Traffic(random.Random(0))
    run.add()
    assert run.blocks.try_admit(run.scheduler.waiting[0])
    roll_back(run.scheduler)
    assert run.states.num_free_slots == run.states.num_slots
    run.check()


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
    scheduler = make_scheduler(20, 4, num_slots=3, limits=(3, 64, 40))
    tokens = list(range(10))
    assert prefill(scheduler, "a", tokens) == ([(0, 8), (8, 10)], [[], [(1, 2)]])
    assert prefill(scheduler, "b", tokens[:9]) == ([(8, 9)], [[(2, 1)]])
    assert prefill(scheduler, "c", [*tokens[:4], 20, 21])[0] == [(0, 4), (4, 6)]
    assert prefill(scheduler, "d", [*tokens[:4], 30, 31, 32])[0] == [(4, 7)]
    assert len(scheduler.block_manager.states.snapshots) == 2


def test_snapshots_are_taken_at_branches_ends_and_intervals():
    """The second prompt leaves the first after 5 tokens, or 2 cached blocks. The third one leaves both there."""
    for interval, chunks in {
        0: [(0, 4), (4, 12), (12, 13)],
        2: [(4, 8), (8, 12), (12, 13)],  # the first prompt has a snapshot there
        4: [(0, 4), (4, 8), (8, 12), (12, 13)],
        5: [(0, 4), (4, 10), (10, 12), (12, 13)],
    }.items():
        scheduler = make_scheduler(40, 2, num_slots=9, limits=(1, 64, 20), interval=interval)
        prefill(scheduler, "a", list(range(9)))
        assert prefill(scheduler, "b", [*range(5), *range(20, 28)])[0] == chunks
        assert prefill(scheduler, "c", [*range(5), 40])[0] == [(4, 6)]


def test_an_evicted_block_takes_its_snapshot_with_it():
    scheduler = make_scheduler(3, 4, num_slots=4, limits=(1, 64, 12))
    prefill(scheduler, "a", list(range(9)))
    assert len(scheduler.block_manager.states.snapshots) == 1
    prefill(scheduler, "b", list(range(20, 29)))  # needs all three blocks
    assert prefill(scheduler, "a again", list(range(9)))[0] == [(0, 8), (8, 9)]
    assert len(scheduler.block_manager.states.snapshots) == 1


def test_the_least_recently_used_snapshot_is_dropped_first():
    scheduler = make_scheduler(30, 4, num_slots=3, limits=(1, 64, 20))
    prompts = [[10 * i + j for j in range(6)] for i in range(3)]
    for prompt in (*prompts[:2], prompts[0], prompts[2]):  # two snapshots fit beside the sequence that runs
        prefill(scheduler, "", prompt)
    assert prefill(scheduler, "", prompts[0])[0] == [(4, 6)]
    assert prefill(scheduler, "", prompts[1])[0] == [(0, 4), (4, 6)]
