"""Slots of drafts: each row finds the state after the tokens before it, drafts included.

Random traffic is in `test_slots.py`. `test_qwen3_5_drafts.py` has the same with a model.
"""

import random

import pytest

from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.scheduling.patience import Patience
from tests.extras.states.state_traffic import Guesser, Model, Traffic, expected, make_scheduler


def test_the_traffic_has_drafts_of_all_kinds():
    num_drafts = num_accepted = 0
    for seed in range(6):
        rng = random.Random(seed)
        run = Traffic(rng, "drafts", "overlap", "store", sizes=(12, 20, 9))
        for _ in range(150):
            run.add() if rng.random() < 0.15 else run.step()
        num_drafts, num_accepted = num_drafts + run.num_drafts, num_accepted + run.num_accepted
    assert 50 < num_accepted < num_drafts


def start_one(proposer, num_slots=8, max_tokens=20, interval=0):
    """A sequence with a prompt of 6 tokens, after two steps in blocks of 4."""
    run = Model(make_scheduler(20, 4, num_slots, (3, 64, 30), interval=interval, proposer=proposer))
    seq = Sequence("a", list(range(6)), SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    run.scheduler.add(seq)
    while seq.num_computed_tokens < 6:
        run.step()
    return run, seq


class Fixed:
    def __init__(self, drafts):
        self.drafts = drafts

    def propose(self, wanted):
        return [self.drafts for _ in wanted]


def test_the_example_of_the_docstring():
    """d1 is right and d2 is wrong, so the sequence owns the slot of d1."""
    run, seq = start_one(Fixed([30, 9, 9]))  # 15 follows the prompt, and 30 follows 15
    patience = run.scheduler.drafter._patience[seq] = Patience(0)
    patience._most = 3
    own = run.states.owned[seq]
    step, _ = launched = run.launch()
    moves = step.copies
    assert [start for _, start, _ in step.chunks] == [6, 7, 8, 9]
    assert (moves.slots[0], moves.sources) == (own, [own, *moves.slots[:-1]])
    assert run.states.num_free_slots == 8 - 4
    run.update(*launched)
    assert run.states.owned[seq] == moves.slots[1]
    assert seq.num_computed_tokens == 8
    assert run.states.num_free_slots == 8 - 1


def test_drafts_end_where_a_snapshot_is_due():
    """The snapshot is taken after the verification, at every block. A prompt with these tokens finds the last."""
    run, seq = start_one(Guesser(1), interval=1)
    starts = []
    while seq.finish_reason is None:
        step = run.step()
        starts.append([start for _, start, _ in step.chunks])
    assert starts[:4] == [[6, 7], [8, 9, 10], [11], [12, 13, 14, 15]]
    other = Sequence("b", seq.token_ids[:25].tolist(), SamplingParams(max_tokens=1))
    run.scheduler.add(other)
    run.step()
    assert other.num_cached_tokens == 24


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_a_sequence_gets_as_many_drafts_as_there_are_slots(num_slots):
    """Snapshots are dropped for drafts."""
    run, seq = start_one(Guesser(1), num_slots=num_slots)
    most = 0
    while seq.finish_reason is None:
        most = max(most, len(run.step().chunks))
    assert most == num_slots
    assert seq.output_token_ids == expected(seq)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_hit_needs_the_same_snapshots_as_without_drafts(overlaps):
    """A conversation of three turns. In the first, a snapshot is due when the last drafts are verified."""
    hits = {}
    for proposer in (Guesser(1), None):
        limits = (3, 64, 30)
        run = Model(make_scheduler(40, 2, 12, limits, interval=1, proposer=proposer, overlaps=overlaps))
        tokens, hits[proposer] = [1, 2, 3], []
        for turn in range(3):
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            run.scheduler.add(seq := Sequence(str(turn), tokens, params))
            while seq.finish_reason is None:
                run.step()
            hits[proposer].append(seq.num_cached_tokens)
            tokens = [*seq.token_ids, turn]
        assert (run.num_drafts > 0) == (proposer is not None)
    assert [*hits.values()] == [[0, 8, 14]] * 2
