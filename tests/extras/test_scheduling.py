"""Scheduling with policies, limits for chunks, failed steps, overlap, swap and beams: random traffic, and by hand.

`tests/extras/full_traffic.py` has the runs, and what is checked in every step.
"""

import pytest
from hypothesis import settings

from nanovllm_extras.scheduling.policies import fcfs
from nanovllm_extras.scheduling.roll_back import roll_back
from nanovllm_testing.fake_kv_cache import table_of
from nanovllm_testing.machine import SETTINGS
from nanovllm_testing.run import chunk_lens, next_token
from tests.conftest import examples
from tests.extras.full_traffic import (
    BeamMachine,
    OverlapBeamMachine,
    OverlapMachine,
    Run,
    SchedulerMachine,
    swap_ins,
    swap_outs,
)

TestTraffic = pytest.mark.examples(SchedulerMachine.TestCase)
TestTraffic.settings = settings(SETTINGS, max_examples=examples(250))
TestTrafficWithOverlap = pytest.mark.examples(OverlapMachine.TestCase)
TestTrafficWithOverlap.settings = settings(SETTINGS, max_examples=examples(250))
TestTrafficWithBeamsAndOverlap = pytest.mark.examples(OverlapBeamMachine.TestCase)
TestTrafficWithBeamsAndOverlap.settings = settings(SETTINGS, max_examples=examples(60))
TestTrafficWithBeams = pytest.mark.examples(BeamMachine.TestCase)
TestTrafficWithBeams.settings = settings(SETTINGS, max_examples=examples(100))


# ---- the cap on one sequence's share


@pytest.mark.parametrize(("threshold", "largest"), [(0, 16), (1, 1), (15, 15), (17, 16)])
def test_threshold_caps_every_chunk_and_the_budget_caps_the_threshold(threshold, largest):
    run = Run(budget=16, threshold=threshold)
    run.add([1] * 40, max_tokens=1)
    assert chunk_lens(run.step()) == {"seq-0": largest}
    assert run.finish() == -(-(40 - largest) // largest)


def test_prompts_that_are_admitted_in_one_step_do_not_count_on_the_same_room():
    """The threshold leaves budget for a second prompt, but its blocks are needed for the later chunks of the first."""
    run = Run(num_blocks=6, block_size=4, budget=16, threshold=4)
    first, second = run.add([1] * 16, max_tokens=1), run.add([2] * 12, max_tokens=1)
    for _ in range(4):
        out = run.step()
        assert chunk_lens(out) == {first.request_id: 4}
        assert run.waiting == [second]
    run.finish()
    assert run.stats.preemptions == {}


# ---- policies


def by_priority(seq):
    return seq.priority


def test_budget_and_admission_follow_the_policy():
    run = Run(policy=by_priority, budget=10)
    run.add([1] * 8, priority=2)
    run.add([2] * 8, priority=1)
    assert chunk_lens(run.step()) == {"seq-1": 8, "seq-0": 2}
    run.add([3] * 8, priority=0)
    assert chunk_lens(run.step()) == {"seq-1": 1, "seq-0": 6, "seq-2": 3}, "running sequences come before waiting ones"
    assert chunk_lens(run.step()) == {"seq-2": 5, "seq-1": 1, "seq-0": 1}, "in order from then on"


@pytest.mark.parametrize(
    ("policy", "priorities", "victims"),
    [
        (fcfs, [0, 0, 0], [2, 1]),
        (by_priority, [3, 1, 2], [0, 2]),
        (by_priority, [1, 1, 1], [2, 1]),
        (lambda seq: -seq.arrival, [0, 0, 0], [0, 1]),
    ],
)
def test_victim_is_the_last_in_order(policy, priorities, victims):
    run = Run(policy=policy, num_blocks=6, block_size=4, budget=32)
    seqs = [run.add([i] * 7, max_tokens=9, priority=urgency) for i, urgency in enumerate(priorities)]
    preempted = []
    while run.scheduler.running or run.scheduler.waiting:
        for seq in run.step().preempted:
            if seq not in preempted:
                preempted.append(seq)
    assert preempted[0] is seqs[victims[0]]
    assert [seqs.index(seq) for seq in preempted] == victims[: len(preempted)]
    run.check_end()


# ---- steps that fail


@pytest.mark.parametrize("hook", ["on_preempt", "on_share_block", "on_admit"])
def test_schedule_that_fails_half_way_loses_nobody(hook, monkeypatch):
    """At a call of an observer: while one is preempted, or while one that is admitted shares a prefix."""
    run = Run(num_blocks=7, block_size=4)
    seqs = [run.add([i // 2] * 7, max_tokens=9) for i in range(3)]

    def failing(*arguments):
        raise RuntimeError("half-way")

    def step():
        run.scheduler.update(scheduled := run.scheduler.schedule(), [1] * len(scheduled.samples))

    def run_to_the_end():
        while run.scheduler.running or run.scheduler.waiting:
            step()

    with monkeypatch.context() as patch:
        patch.setattr(run.stats, hook, failing)
        with pytest.raises(RuntimeError):
            run_to_the_end()
    roll_back(run.scheduler)
    assert run.waiting == seqs
    run_to_the_end()
    assert [len(seq.output_token_ids) for seq in seqs] == [9, 9, 9]
    assert run.manager.num_used_blocks == 0


def test_blocks_of_a_failed_step_cannot_be_hit():
    run = Run(block_size=4, budget=12)
    run.add([1] * 13)
    run.step(is_done=False)
    again = run.add([1] * 9)
    run.step()
    run.step()
    assert again.num_cached_tokens == 8, "found in what its twin computed after the failure, not before"
    run.finish()


def test_failed_step_is_not_counted():
    """It had twelve blocks in use; those after it store what they say themselves."""
    run, never_failed = Run(block_size=4, budget=48), Run(block_size=4, budget=48)
    big = run.add([1] * 48)
    run.step(is_done=False)
    run.abort([big])
    for each in (run, never_failed):
        each.add([2] * 5, max_tokens=3)
        each.finish()
    for name in ("kv_tokens_stored", "kv_slots_reserved", "peak_used_blocks"):
        assert getattr(run.stats, name) == getattr(never_failed.stats, name), name


# ---- overlap


def test_samples_that_need_copies_take_no_blocks_while_a_step_is_in_flight():
    """The budget serves two of four samples at a time. The others still share the prompt's last block when the first
    two are at their ends and hold all other blocks: these come free as soon as the step in flight has landed."""
    run = Run(num_blocks=3, block_size=4, budget=2, overlap=True)
    samples = run.add([1] * 3, n=4, max_tokens=2)
    run.finish()
    assert len(samples) == 4
    assert run.stats.preemptions == {}


@pytest.mark.parametrize("is_text", [False, True])
def test_block_that_a_step_in_flight_fills_is_forgotten_with_it_after_its_sequence_has_ended(is_text):
    """The sequence ends with the last token of a block, whose K and V the step in flight computes in vain."""
    first = next_token([1, 2, 3])
    run = Run(block_size=4, overlap=True, eos_token_ids=frozenset() if is_text else frozenset([first]))
    seq = run.add([1, 2, 3], max_tokens=9)
    run.step()
    if is_text:
        run.scheduler.finish(seq, "stop", "a stop string")
    assert (seq.finish_reason, len(run.flights)) == ("stop", 1)
    assert len(run.manager.prefix_cache._by_id) == 1
    run.step(is_done=False)
    assert len(run.manager.prefix_cache._by_id) == 0
    run.finish()


def test_block_that_a_finished_sequence_has_filled_survives_a_failed_step():
    """It was registered when the sequence ended, and the step that filled it has run."""
    first = next_token([1, 2, 3])
    run = Run(block_size=4, overlap=True, eos_token_ids=frozenset([first]))
    run.add([1, 2, 3], max_tokens=9)
    run.finish()
    run.add([4, 5], max_tokens=2)
    run.step(is_done=False)
    run.finish()
    again = run.add([1, 2, 3, first, 6], max_tokens=1)
    run.finish()
    assert again.num_cached_tokens == 4


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
    assert len(run.host_block_ids(second)) == 3
    assert (run.stats.num_swaps, run.stats.num_preemptions, run.stats.preemptions) == (1, 1, {second: 1})
    kept = run.host_block_ids(second)
    while first.finish_reason is None:
        out = run.step()
        assert (out.copies, swap_outs(out), swap_ins(out)) == ([], [], [])
    out = run.step()
    assert chunk_lens(out) == {"seq-1": 1}
    assert out.copies.swap_ins == list(zip(kept, table_of(second), strict=False))
    assert len(out.copies.swap_ins) == 3
    assert (out.copies.swap_outs, out.copies, run.host_block_ids(second)) == ([], [], [])
    run.finish()
    assert run.stats.num_swaps == 1


def test_copy_in_that_fails_half_way_is_computed_anew(monkeypatch):
    """It has blocks again, and is still in the swap space."""
    run, first, second = swapped_run()
    while first.finish_reason is None:
        run.step()

    def failing(seq, tables):
        raise RuntimeError("half-way")

    with monkeypatch.context() as patch:
        patch.setattr(run.swap_space, "swap_in", failing)
        with pytest.raises(RuntimeError):
            run.scheduler.schedule()
    assert len(table_of(second)) == len(run.host_block_ids(second)) == 3
    roll_back(run.scheduler)
    assert (run.waiting, second.num_computed_tokens, run.host_block_ids(second)) == ([second], 0, [])
    run.check_state()
    run.finish()


# ---- beams


@pytest.mark.parametrize(
    ("num_blocks", "budget", "num_swap_blocks"), [(3, 1, 4), (4, 7, None), (5, 1, None), (6, 7, 4), (8, 7, None)]
)
def test_beams_that_do_not_all_fit_are_computed_one_after_the_other(num_blocks, budget, num_swap_blocks):
    """Those that are ready hold the blocks which the others need: no two of them may take turns for ever."""
    run = Run(num_blocks=num_blocks, block_size=4, budget=budget, num_swap_blocks=num_swap_blocks)
    search = run.add_search([1, 2, 3, 4, 5], 3, 6)
    run.finish()
    assert len(search.result[0]) == 11


@pytest.mark.parametrize("others", [[([1], 1)], [([1], 2)], [([0, 1], 2), ([1], 1)], [([1], 1), ([0], 1)]])
@pytest.mark.parametrize("prompt", [[0, 1], [1, 0, 0, 0, 1, 0, 0, 0]])
@pytest.mark.parametrize("num_steps", [1, 2, 4])
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
