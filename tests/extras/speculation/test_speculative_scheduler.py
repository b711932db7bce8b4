"""Drafts in random traffic without a model: each step's blocks, what the prefix cache knows, and the tokens at the end.

`tests/extras/full_traffic.py` has the traffic, and what holds in every step. Here a proposer guesses the next tokens,
and is wrong now and then; the tokens that come out are those that follow from each prompt without it.

Broken by hand, and seen here: blocks that are not given back; `num_computed_tokens` that stays behind a wrong draft, or
goes back only after the sequence has ended, so that a wrong draft's block is registered; drafts behind a stop token;
drafts beyond the end; drafts that are counted after a failed step; drafts for a sequence that is about to be forked.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from nanovllm.scheduler import Step
from nanovllm_testing.machine import SETTINGS
from nanovllm_testing.run import next_token
from tests.conftest import examples
from tests.extras.full_traffic import BeamMachine, Run, SchedulerMachine
from tests.extras.speculative_traffic import Guesser, SpeculativeRun


class SpeculativeMachine(SchedulerMachine):
    make_run = SpeculativeRun


class OverlapSpeculativeMachine(SpeculativeMachine):
    """Where nobody could get drafts, the next step is launched ahead."""

    overlap = True


class OverlapSpeculativeBeamMachine(BeamMachine):
    """Beams among other requests: they get no drafts, and their neighbours do."""

    make_run = SpeculativeRun
    overlap = True
    windows = st.sampled_from([None, 1, 2, 5, 9])


TestTrafficWithDrafts = pytest.mark.examples(SpeculativeMachine.TestCase)
TestTrafficWithDrafts.settings = settings(SETTINGS, max_examples=examples(80))
TestTrafficWithDraftsAndOverlap = pytest.mark.examples(OverlapSpeculativeMachine.TestCase)
TestTrafficWithDraftsAndOverlap.settings = settings(SETTINGS, max_examples=examples(80))
TestTrafficWithEverything = pytest.mark.examples(OverlapSpeculativeBeamMachine.TestCase)
TestTrafficWithEverything.settings = settings(SETTINGS, max_examples=examples(80))


# ---- what happens when


def test_right_drafts_save_steps_and_wrong_ones_cost_none():
    steps = {}
    for share_right in (0, 1):
        run = SpeculativeRun(proposer=Guesser(share_right, is_erratic=False))
        run.add([1] * 5, max_tokens=24)
        steps[share_right] = run.finish()
    assert steps == {0: 24, 1: 1 + 1 + 4}, "one token; two drafts and one; then four drafts and one"


def test_a_step_with_drafts_is_many_decodes_of_one_sequence():
    run = SpeculativeRun(proposer=Guesser(1, is_erratic=False), max_drafts=2)
    seq = run.add([1] * 5, max_tokens=9)
    run.step()
    out = run.step()
    assert out.chunks == [(seq, 5, 1), (seq, 6, 1), (seq, 7, 1)]
    assert (out.num_decodes, out.num_scheduled_tokens, out.samples) == (3, 3, [seq] * 3)
    assert (seq.num_known_tokens, seq.num_computed_tokens) == (9, 8)


def test_blocks_behind_wrong_drafts_are_given_back():
    """Blocks of 1, six known tokens: two drafts take two more blocks, and both are wrong."""
    run = SpeculativeRun(proposer=Guesser(0, is_erratic=False), block_size=1)
    seq = run.add([1] * 5, max_tokens=9)
    run.step()
    run.launch()
    assert (seq.num_computed_tokens, len(seq.block_table), seq.num_tokens) == (8, 8, 8)
    flight = run.flights.pop()
    run.update(flight)
    assert (seq.num_computed_tokens, len(seq.block_table), seq.num_tokens) == (6, 6, 7)
    run.check_state()
    run.finish()


def test_drafts_preempt_nobody_and_wait_for_those_that_may_be_admitted():
    run = SpeculativeRun(num_blocks=4, block_size=2, proposer=Guesser(1, is_erratic=False))
    run.add([1] * 3, max_tokens=4)
    run.add([2] * 3, max_tokens=4)
    run.finish()
    assert run.stats.num_preemptions == plain_preemptions(num_blocks=4, block_size=2)


def plain_preemptions(**options):
    run = Run(**options)
    run.add([1] * 3, max_tokens=4)
    run.add([2] * 3, max_tokens=4)
    run.finish()
    return run.stats.num_preemptions


def test_drafts_end_before_a_stop_token_also_while_min_tokens_is_not_reached():
    """The draft after the first would come when a stop token counts, and the last one behind the end."""
    tokens = [1] * 5
    for _ in range(4):
        tokens.append(next_token(tokens))
    run = SpeculativeRun(proposer=Guesser(1, is_erratic=False), max_drafts=4)
    seq = run.add([1] * 5, max_tokens=20, min_tokens=2, stop_token_ids=[tokens[7]])
    run.finish()
    assert (seq.output_token_ids, seq.finish_reason) == (tokens[5:8], "stop")


def test_a_step_has_no_more_rows_than_are_nearly_free():
    run = SpeculativeRun(proposer=Guesser(1, is_erratic=False), max_rows=4)
    seqs = [run.add([i] * 3, max_tokens=30) for i in range(3)]
    run.step()
    assert [chunk[0] for chunk in run.step().chunks] == [seqs[1], seqs[2], seqs[0], seqs[0]], "plain decodes first"
    run.add([5] * 3, max_tokens=30)
    run.step()
    assert len(run.step().chunks) == 4, "four sequences, four rows"
    assert run.step() != Step()
    run.finish()


def test_no_drafts_beside_more_sequences_than_allowed():
    run = SpeculativeRun(proposer=Guesser(1, is_erratic=False), max_seqs=1)
    run.add([1] * 3, max_tokens=30)
    run.step()
    assert len(run.step().chunks) == 3, "one row, and two drafts"
    run.add([2] * 3, max_tokens=30)
    run.step()
    assert len(run.step().chunks) == 2
    run.finish()


def test_a_sequence_whose_drafts_fail_gets_ever_fewer():
    run = SpeculativeRun(proposer=Guesser(0, is_erratic=False))
    run.add([1] * 3, max_tokens=100, ignore_eos=True)
    run.scheduler.max_model_len = 200
    has_drafts = []
    while run.scheduler.running or run.scheduler.waiting:
        has_drafts.append(len(run.step().chunks) > 1)
    tries = [i for i, has in enumerate(has_drafts) if has]
    assert [later - earlier for earlier, later in zip(tries, tries[1:], strict=False)] == [2, 4, 8, 16]
