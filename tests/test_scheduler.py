"""How many tokens a sequence gets: budgets, preemption, forks, ends, and a step's statistics.

`nanovllm_testing/run.py` and `first_come.py` have the runs, and what is checked in every step.
"""

import pytest
from hypothesis import settings

from nanovllm_testing.fake_kv_cache import table_of, tokens_of
from nanovllm_testing.first_come import FirstComeRun
from nanovllm_testing.machine import SETTINGS, SchedulerMachine
from nanovllm_testing.run import chunk_lens, next_token, output_of

TestTraffic = SchedulerMachine.TestCase  # `tests/extras/test_scheduling.py` has the long sweep, with more rules
TestTraffic.settings = settings(SETTINGS, max_examples=30)


# ---- blocks


def test_admission_reserves_nothing_for_tokens_to_come():
    run = FirstComeRun(num_blocks=4, block_size=4, max_model_len=2000)
    for i in range(4):
        run.add([i] * 4, max_tokens=1000)
    run.step()
    assert len(run.scheduler.running) == 4
    assert run.manager.num_free_blocks == 0


def test_prompt_that_is_computed_in_chunks_keeps_the_room_that_it_was_admitted_to():
    """A long prompt is admitted when all of it fits; what comes later does not take the blocks of its later chunks."""
    run = FirstComeRun(num_blocks=6, block_size=4, budget=5)
    long = run.add([1] * 20, max_tokens=1)
    run.step()
    short = run.add([2] * 7, max_tokens=1)
    while long.finish_reason is None:
        assert run.step().preempted == []
        assert short.num_computed_tokens == 0
    run.finish()


def test_newest_is_preempted_and_resumes_with_all_of_its_tokens():
    run = FirstComeRun(num_blocks=6, block_size=4, budget=32)
    seqs = [run.add([i] * 7, max_tokens=9) for i in range(3)]
    run.step()
    assert [len(table_of(seq)) for seq in seqs] == [2, 2, 2]
    run.step()
    tokens = tokens_of(seqs[2])
    assert len(tokens) == 9
    out = run.step()  # all three would need a third block
    assert (out.preempted, run.stats.num_preemptions, run.stats.preemptions) == ([seqs[2]], 1, {seqs[2]: 1})
    assert chunk_lens(out) == {"seq-0": 1, "seq-1": 1}
    assert run.waiting == [seqs[2]]
    assert tokens_of(seqs[2]) == tokens
    late = run.add([5])
    assert run.waiting == [seqs[2], late], "it waits before those that came later"
    run.finish()


# ---- several samples of one prompt


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_samples_share_the_prompt_and_run_together(enable_prefix_caching):
    run = FirstComeRun(block_size=4, budget=32, enable_prefix_caching=enable_prefix_caching)
    seqs = run.add([1] * 10, n=4, max_tokens=9)
    out = run.step()
    assert chunk_lens(out) == {"seq-0": 10}, "the prompt is computed once"
    assert [len(output_of(seq)) for seq in seqs] == [1] * 4
    assert run.scheduler.running == seqs
    assert [table_of(seq) for seq in seqs] == [table_of(seqs[0])] * 4
    assert run.manager.num_used_blocks == 3
    out = run.step()
    assert [seq for seq, _, _ in out.chunks] == seqs
    assert len(out.copies) == 3
    assert out.copies[0][0] == table_of(seqs[3])[2], "the last owner writes where all of them were"
    assert (out.num_decodes, *run.kv_use(out)) == (4, 8 + 4 * 3, (2 + 4) * 4)
    for _ in range(7):
        assert [seq for seq, _, _ in run.step().chunks] == seqs, "they go on together"
    assert not run.has_unfinished
    run.check_end()
    assert len({tuple(output_of(seq)) for seq in seqs}) == 4


def test_samples_need_room_for_all_of_them_before_the_first_is_admitted():
    run = FirstComeRun(max_num_seqs=4, budget=32)
    run.add([1] * 3, n=2, max_tokens=3)
    third, behind = run.add([2] * 3, n=3, max_tokens=3), run.add([3] * 3, max_tokens=3)
    for _ in range(3):
        run.step()
        assert run.waiting == [third[0], behind], "nobody overtakes"
        assert third[0].children == third[1:]
    out = run.step()
    assert chunk_lens(out) == {"seq-1": 3, "seq-2": 3}
    assert len(run.scheduler.running) == 4
    run.finish()


@pytest.mark.parametrize("num_steps", [0, 2, 3, 5])
def test_request_of_several_samples_is_aborted_at_any_moment(num_steps):
    """Waiting, in the middle of its prompt, just forked, decoding."""
    run = FirstComeRun(budget=4)
    seqs, other = run.add([1] * 10, n=3, max_tokens=9), run.add([2] * 3, max_tokens=2)
    for _ in range(num_steps):
        run.step()
    run.abort(seqs)
    assert [seq.finish_reason for seq in seqs] == ["abort"] * 3
    assert all(table_of(seq) == [] for seq in seqs)
    run.finish()
    assert len(output_of(other)) == 2


def test_samples_count_as_one_query_of_the_prefix_cache():
    run = FirstComeRun(block_size=4, budget=32)
    run.add([1] * 9, n=3, max_tokens=2)
    run.finish()
    again = run.add([1] * 9, n=3, max_tokens=2)
    run.finish()
    assert [seq.num_cached_tokens for seq in again] == [8, 8, 8]
    assert (run.stats.prefix_cache_query_tokens, run.stats.prefix_cache_hit_tokens) == (18, 8)


# ---- the end of a sequence


def test_stop_token_at_the_last_allowed_place_is_a_stop():
    first = next_token([1, 2])
    run = FirstComeRun(eos_token_ids=frozenset([first]))
    seq = run.add([1, 2], max_tokens=1)
    run.finish()
    assert seq.finish_reason == "stop"


def test_sequence_that_outgrows_the_whole_cache_ends_and_harms_nobody():
    """The big sequence runs by itself at its end; the others were preempted, and finish after it unharmed."""
    run = FirstComeRun(num_blocks=3, block_size=4, max_model_len=1000)
    big = run.add([1] * 6)
    small = [run.add([2 + i] * 3, max_tokens=4) for i in range(2)]
    run.finish()
    assert (big.num_tokens, big.finish_reason, big.stop_reason) == (13, "length", "kv_cache")
    assert [seq.finish_reason for seq in small] == ["length"] * 2
    assert [seq.stop_reason for seq in small] == [None] * 2
    assert run.stats.num_preemptions > 0


# ---- prefix caching, and what is counted


def test_requests_of_one_step_share_their_prefix():
    run = FirstComeRun(block_size=4, budget=32)
    first, second = run.add([1] * 10), run.add([1] * 10 + [2])
    out = run.step()
    assert chunk_lens(out) == {"seq-0": 10, "seq-1": 3}
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert run.kv_use(out) == (13, 4 * 4)  # two shared blocks, and one of each
    assert run.stats.prefix_cache_query_tokens == 21
    assert run.stats.prefix_cache_hit_tokens == 8


def test_idle_scheduler_has_no_work():
    run = FirstComeRun()
    out = run.scheduler.schedule()
    assert (list(out.chunks), out.preempted, out.copies) == ([], [], [])
    assert (out.num_scheduled_tokens, run.stats.uses) == (0, {})
