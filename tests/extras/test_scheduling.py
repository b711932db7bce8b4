"""Scheduling with overlap, swap and beams: random traffic, and what each of them promises.

`tests/scheduling_traffic.py` has the runs, and what is checked in every step.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from nanovllm.extras.swap.space import SwapMoves
from nanovllm.sequence import SequenceStatus
from tests.conftest import examples
from tests.fake_kv_cache import table_of
from tests.scheduling_traffic import SETTINGS, Run, SchedulerMachine, chunk_lens


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


TestTrafficWithOverlap = pytest.mark.examples(OverlapMachine.TestCase)
TestTrafficWithOverlap.settings = settings(SETTINGS, max_examples=examples(250))
TestTrafficWithBeamsAndOverlap = pytest.mark.examples(OverlapBeamMachine.TestCase)
TestTrafficWithBeamsAndOverlap.settings = settings(SETTINGS, max_examples=examples(60))
TestTrafficWithBeams = pytest.mark.examples(BeamMachine.TestCase)
TestTrafficWithBeams.settings = settings(SETTINGS, max_examples=examples(100))


def test_samples_that_need_copies_take_no_blocks_while_a_step_is_in_flight():
    """The budget serves two of four samples at a time. The others still share the prompt's last block when the first
    two are at their ends and hold all other blocks: these come free as soon as the step in flight has landed."""
    run = Run(num_blocks=3, block_size=4, budget=2, overlap=True)
    samples = run.add([1] * 3, n=4, max_tokens=2)
    run.finish()
    assert [seq.num_preemptions for seq in samples] == [0, 0, 0, 0]


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
    assert (run.stats.num_swaps, run.stats.num_preemptions, second.num_preemptions) == (
        1,
        1,
        1,
    )
    kept = run.host_block_ids(second)
    while first.finish_reason is None:
        out = run.step()
        assert out.moves == SwapMoves()
    out = run.step()
    assert chunk_lens(out) == {"seq-1": 1}
    assert out.moves.swap_ins == list(zip(kept, table_of(second), strict=False))
    assert len(out.moves.swap_ins) == 3
    assert (out.moves.swap_outs, out.moves.copies, run.host_block_ids(second)) == ([], [], [])
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
    assert out.moves.swap_outs == list(zip(table, run.host_block_ids(victim), strict=True))
    assert out.moves.swap_ins == []


@pytest.mark.parametrize("num_swap_blocks", [0, 1, 2])
def test_full_swap_space_means_recompute(num_swap_blocks):
    run, _, second = swapped_run(num_swap_blocks)
    assert (run.host_block_ids(second), second.num_computed_tokens) == ([], 0)
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
    assert (second.status, second.num_computed_tokens, run.host_block_ids(second)) == (SequenceStatus.WAITING, 0, [])
    assert run.swap_space.num_free_blocks == 8
    run.finish()


def test_failed_step_leaves_alone_what_was_copied_out_before():
    run, _, second = swapped_run()
    kept = run.host_block_ids(second)
    run.step(is_done=False)
    assert run.host_block_ids(second) == kept
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


def test_beam_that_is_early_gives_its_blocks_up():
    """So that no two of them wait for each other's blocks."""
    run = Run(budget=2)
    search = run.add_search([1, 2], 2, 4)
    run.step()
    first, second = search.beams
    run.scheduler.max_num_batched_tokens = 1
    assert [seq for seq, _, _ in run.step().chunks] == [first]
    assert table_of(first) == []
    assert second.status is SequenceStatus.RUNNING
    assert [seq for seq, _, _ in run.step().chunks] == [second]
    run.finish()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_samples_survive_a_failed_step(num_steps):
    """Of their prompt, of their first copies, and later; with swap space that is not used."""
    run = Run(block_size=4, budget=32, num_swap_blocks=4)
    run.add([1] * 6, n=3, max_tokens=6)
    for _ in range(num_steps):
        run.step()
    run.step(is_done=False)
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
