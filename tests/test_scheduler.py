"""How many tokens a sequence gets: budgets, preemption, forks, ends, and a step's statistics.

`tests/scheduling_traffic.py` has the runs, and what is checked in every step.
"""

import pytest
from hypothesis import settings

from tests.conftest import examples
from tests.fake_kv_cache import table_of, tokens_of
from tests.scheduling_traffic import SETTINGS, VOCAB_SIZE, Run, SchedulerMachine, chunk_lens, next_token, output_of

TestTraffic = pytest.mark.examples(SchedulerMachine.TestCase)
TestTraffic.settings = settings(SETTINGS, max_examples=examples(250))


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
    assert (len(output_of(first)), len(output_of(second))) == (2, 1)


def test_max_num_seqs_bounds_the_batch():
    run = Run(max_num_seqs=2)
    seqs = [run.add([i], max_tokens=3) for i in range(5)]
    run.step()
    assert run.scheduler.running == seqs[:2]
    assert run.waiting == seqs[2:]
    run.finish()


def test_decodes_come_first_also_when_their_sequence_is_younger():
    run = Run(budget=16)
    run.add([1] * 20)
    run.step()
    run.add([2])  # its only chunk is one token, beside the older one's rest of 4
    out = run.step()
    assert [(seq.request_id, num_new) for seq, _, num_new in out.chunks] == [("seq-1", 1), ("seq-0", 4)]
    assert (out.num_decodes, out.num_scheduled_tokens) == (1, 5)


def test_decode_advances_in_every_step_while_prompts_keep_arriving():
    run = Run(num_blocks=500, budget=8, max_num_seqs=100)
    decoding = run.add([1, 2, 3])
    run.step()
    for num_output_tokens in range(2, 30):
        run.add([num_output_tokens] * 20, max_tokens=1)
        out = run.step()
        assert out.num_scheduled_tokens == 8
        assert len(output_of(decoding)) == num_output_tokens


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


def test_newest_is_preempted_and_resumes_with_all_of_its_tokens():
    run = Run(num_blocks=6, block_size=4, budget=32)
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


def test_preempted_sequence_finds_its_own_blocks_again():
    """Only the block that it lost to its neighbour is computed again."""
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
    assert (run.waiting, run.scheduler.running) == ([new], [old])
    run.finish()


def test_prompt_that_fills_the_whole_pool_is_served():
    run = Run(num_blocks=4, block_size=4)
    run.add(list(range(16)), max_tokens=1)
    run.add(list(range(16)), max_tokens=3)
    run.add([3], max_tokens=3)
    run.finish()
    assert run.seqs[1].stop_reason == "kv_cache"


# ---- several samples of one prompt


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_samples_share_the_prompt_and_run_together(enable_prefix_caching):
    run = Run(block_size=4, budget=32, enable_prefix_caching=enable_prefix_caching)
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
    run = Run(max_num_seqs=4, budget=32)
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
    run = Run(num_blocks=6, block_size=4, budget=3)
    early = run.add([2] * 4, max_tokens=12)
    run.step()
    run.step()
    late = run.add([1] * 16, n=3, max_tokens=3)
    while not (out := run.step()).preempted:
        assert run.num_steps < 20
    assert (out.preempted, run.waiting, late[0].children) == ([late[0]], [late[0]], late[1:])
    assert len(output_of(late[0])) == 0
    run.finish()
    assert [len(output_of(seq)) for seq in late] == [3] * 3
    assert len(output_of(early)) == 12


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
    assert len(output_of(other)) == 2


def test_samples_count_as_one_query_of_the_prefix_cache():
    run = Run(block_size=4, budget=32)
    run.add([1] * 9, n=3, max_tokens=2)
    run.finish()
    again = run.add([1] * 9, n=3, max_tokens=2)
    run.finish()
    assert [seq.num_cached_tokens for seq in again] == [8, 8, 8]
    assert (run.stats.prefix_cache_query_tokens, run.stats.prefix_cache_hit_tokens) == (18, 8)


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
    assert (len(output_of(seq)), seq.finish_reason, seq.stop_reason) == (max_tokens, "length", None)


def test_end_token_of_the_model_ends_it_without_a_stop_reason():
    first = next_token([1, 2])
    run = Run(eos_token_ids=frozenset([first]))
    seq = run.add([1, 2])
    run.finish()
    assert (output_of(seq), seq.finish_reason, seq.stop_reason) == ([first], "stop", None)


def test_ignore_eos_goes_on_and_stop_token_ids_hold_all_the_same():
    first = next_token([1, 2])
    second = next_token([1, 2, first])
    assert first != second
    run = Run(eos_token_ids=frozenset([first, second]))
    seq = run.add([1, 2], ignore_eos=True, stop_token_ids=[second])
    run.finish()
    assert (output_of(seq), seq.finish_reason, seq.stop_reason) == ([first, second], "stop", second)


def test_stop_token_at_the_last_allowed_place_is_a_stop():
    first = next_token([1, 2])
    run = Run(eos_token_ids=frozenset([first]))
    seq = run.add([1, 2], max_tokens=1)
    run.finish()
    assert seq.finish_reason == "stop"


def test_sequence_that_outgrows_the_whole_cache_ends_and_harms_nobody():
    """The big sequence runs by itself at its end; the others were preempted, and finish after it unharmed."""
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
        assert (seq.finish_reason, run.is_running(seq), run.is_waiting(seq)) == ("abort", False, False)
    assert run.manager.num_free_blocks == run.manager.num_blocks
    run.finish()
    assert len(output_of(other)) == 2


# ---- prefix caching, and what is counted


def test_requests_of_one_step_share_their_prefix():
    run = Run(block_size=4, budget=32)
    first, second = run.add([1] * 10), run.add([1] * 10 + [2])
    out = run.step()
    assert chunk_lens(out) == {"seq-0": 10, "seq-1": 3}
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert run.kv_use(out) == (13, 4 * 4)  # two shared blocks, and one of each
    assert run.stats.prefix_cache_query_tokens == 21
    assert run.stats.prefix_cache_hit_tokens == 8


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
    """Its last block is computed again, in a block of its own."""
    run = Run(block_size=4, budget=32)
    run.add([1] * 8, max_tokens=9)
    run.step()
    run.add([1] * 8, max_tokens=9)
    out = run.step()
    assert out.copies == []
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
    assert (list(out.chunks), out.preempted, out.copies) == ([], [], [])
    assert (out.num_scheduled_tokens, run.stats.uses) == (0, {})
