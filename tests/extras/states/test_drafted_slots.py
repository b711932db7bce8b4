"""Slots of drafts under random traffic: each row finds the state after the tokens before it, drafts included.

The fake pool of `test_slots.py` keeps the tokens that each state has seen. The outputs are those that follow from each
prompt without drafts. `test_qwen3_5_drafts.py` has the same with a model.

Broken by hand, and seen here: a sequence that keeps the slot of a rejected draft, or its own slot after accepted
drafts; slots of drafts that are not freed; drafts that pass a snapshot that is due; a snapshot that is taken before
its drafts are verified, or never.
"""

import random

import pytest
from nanovllm_extras.states.drafted_slots import DraftedStateBlockManager, DraftedStateScheduler
from nanovllm_extras.states.state_swap import StateSwap, StateSwapSpace

from nanovllm_extras.full_observer import SchedulingStats
from nanovllm_extras.full_sequence import Sequence
from nanovllm_extras.memory.slots import StateBlockManager, StateScheduler
from nanovllm_extras.records import Moves
from nanovllm_extras.request_params import SamplingParams
from nanovllm_extras.scheduling.ordered_queues import fcfs
from nanovllm_extras.scheduling.roll_back import roll_back
from nanovllm_extras.states.pool import find_rounds
from tests.extras.states import test_slots
from tests.extras.states.test_slots import check_owners, next_token


class Guesser:
    """Knows the rule of `next_token`. A guess is right with the probability `share_right`."""

    def __init__(self, share_right, seed=0):
        self.share_right, self.rng = share_right, random.Random(seed)

    def propose(self, wanted):
        return [self.guess(seq, count) for seq, count in wanted]

    def guess(self, seq, count):
        tokens, drafts = seq.token_ids.view().tolist(), []
        for _ in range(count):
            right = (sum(tokens + drafts) + 7 * seq.sample_index) % 50
            drafts.append(right if self.rng.random() < self.share_right else (right + 1) % 50)
        return drafts


def make_scheduler(blocks, max_num_seqs, budget, proposer, max_model_len=30, max_drafts=4, preemption=None):
    order = (fcfs, 0, preemption)
    return DraftedStateScheduler(blocks, max_num_seqs, budget, max_model_len, *order, proposer=proposer,
                                 max_drafts=max_drafts, max_rows=24, max_seqs=99, vocab_size=50)  # fmt: skip


class Run(test_slots.Run):
    """Traffic of `test_slots.py`, whose steps may have several rows of a sequence."""

    def __init__(self, rng, num_slots, num_blocks, budget, has_cache, has_swap=False, observer=None):
        super().__init__(rng, (num_slots, num_blocks, budget), has_cache)
        observer = observer or SchedulingStats()
        self.blocks = DraftedStateBlockManager(num_blocks, 2, has_cache, observer, num_slots=num_slots)
        self.blocks.snapshot_interval = rng.choice([0, 1, 2, 64])
        proposer = Guesser(rng.choice([0, 0.5, 0.8, 1]), rng.random())
        preemption = None
        if has_swap:
            self.space = StateSwapSpace(rng.randint(1, 12), rng.randint(1, 4), self.blocks)
            self.pool += [None] * self.space.num_slots
            preemption = StateSwap(self.blocks, self.space)
        max_num_seqs = rng.randint(3, num_slots)
        self.scheduler = make_scheduler(self.blocks, max_num_seqs, budget, proposer, 24, preemption=preemption)
        self.seqs = []
        self.num_drafts = self.num_accepted = 0

    def add(self):
        super().add()
        first = self.scheduler.waiting[-1]
        self.seqs += [first, *first.children]

    def step(self, fails=False):
        step = self.scheduler.schedule()
        if not step.chunks:
            return
        moves = step.copies
        assert isinstance(moves, Moves)
        for source, destination in moves.state_copies:
            self.pool[destination] = self.pool[source]
        assert len(set(moves.slots)) == len(step.chunks), "no slot is written twice"
        rounds = find_rounds(moves.slots, moves.sources) or [range(len(step.chunks))]
        for row in [row for rows in rounds for row in rows]:
            seq, start, num_new_tokens = step.chunks[row]
            tokens = seq.token_ids.data[: start + num_new_tokens].tolist()  # known tokens, and drafts
            seen = self.pool[moves.sources[row]] if start else []
            assert seen == tokens[:start], "the state after the tokens before the row"
            self.pool[moves.slots[row]] = tokens
        if fails:
            roll_back(self.scheduler)
            return
        drawn = []
        for seq, i in zip(step.samples, step.sampled_chunks, strict=True):
            owner, start, num_new_tokens = step.chunks[i]
            drawn.append((sum(owner.token_ids.data[: start + num_new_tokens].tolist()) + 7 * seq.sample_index) % 50)
        num_known = {seq: seq.num_known_tokens for seq in step.samples}
        self.scheduler.update(step, drawn)
        self.num_drafts += len(step.samples) - len(num_known)
        self.num_accepted += sum(seq.num_known_tokens - num - 1 for seq, num in num_known.items())


@pytest.mark.parametrize("kind", ["snapshots", "no cache", "swap"])
@pytest.mark.parametrize(
    "seed", [seed if seed < 4 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(50)]
)
def test_each_row_finds_its_state(seed, kind):
    rng = random.Random(seed)
    run = Run(rng, rng.randint(3, 12), rng.randint(6, 20), rng.randint(1, 9), kind != "no cache", kind == "swap")
    for _ in range(200):
        what = rng.random()
        if what < 0.15:
            run.add()
        elif what < 0.18:
            run.abort()
        elif what < 0.22:
            run.fork()
        else:
            run.step(fails=what > 0.98)
        check_owners(run)
        check_snapshots(run)
    for _ in range(600):
        run.step()
    check_owners(run)
    assert not run.scheduler.running
    assert not run.scheduler.waiting
    assert run.blocks.num_free_slots == run.blocks.num_slots
    assert run.blocks.num_used_blocks == 0
    for seq in run.seqs:
        if seq.finish_reason != "abort":
            assert seq.output_token_ids == expected(seq)


def check_snapshots(run):
    """Each snapshot has seen the tokens up to the end of its block, unless it is still to be copied."""
    pool = list(run.pool)
    for source, destination in run.blocks._copies_for_next:
        pool[destination] = pool[source]
    cached = {one.serial: one for one in run.blocks.prefix_cache._by_id.values()}
    for serial, slot in run.blocks.prefix_cache.snapshots.items():
        parts = []
        while serial:
            parts.insert(0, cached[serial].tokens)
            serial = cached[serial].parent_serial
            if serial and serial not in cached:  # the block before was evicted
                break
        tokens = [int.from_bytes(b"".join(parts)[i : i + 4], "little") for i in range(0, 4 * 2 * len(parts), 4)]
        assert pool[slot][-len(tokens) :] == tokens
        assert len(pool[slot]) == len(tokens) or serial


def expected(seq):
    tokens = seq.token_ids.view(0, seq.num_prompt_tokens).tolist()
    while len(tokens) < seq.token_ids.length:
        tokens.append((sum(tokens) + 7 * seq.sample_index) % 50)
    return tokens[seq.num_prompt_tokens :]


def test_the_traffic_has_drafts_of_all_kinds():
    num_drafts = num_accepted = 0
    for seed in range(6):
        rng = random.Random(seed)
        run = Run(rng, 12, 20, 9, has_cache=True)
        for _ in range(150):
            run.add() if rng.random() < 0.15 else run.step()
        num_drafts, num_accepted = num_drafts + run.num_drafts, num_accepted + run.num_accepted
    assert 50 < num_accepted < num_drafts


def start_one(proposer, num_slots=8, max_tokens=20, interval=0):
    """A sequence with a prompt of 6 tokens, after two steps in blocks of 4."""
    options = {"observer": SchedulingStats(), "num_slots": num_slots, "snapshot_interval": interval}
    blocks = DraftedStateBlockManager(20, 4, **options)
    scheduler = make_scheduler(blocks, 3, 64, proposer)
    seq = Sequence("a", list(range(6)), SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    scheduler.add(seq)
    while seq.num_computed_tokens < 6:
        step = scheduler.schedule()
        scheduler.update(step, [next_token(seq) for seq in step.samples])
    return scheduler, seq


class Fixed:
    def __init__(self, drafts):
        self.drafts = drafts

    def propose(self, wanted):
        return [self.drafts for _ in wanted]


def test_the_example_of_the_docstring():
    """d1 is right and d2 is wrong, so the sequence owns the slot of d1."""
    scheduler, seq = start_one(Fixed([30, 9, 9]))  # 15 follows the prompt, and 30 follows 15
    blocks = scheduler.block_manager
    scheduler._patience[seq] = scheduler._meet(seq)
    scheduler._patience[seq]._most = 3
    own = blocks.slot_of(seq)
    step = scheduler.schedule()
    moves = step.copies
    assert [start for _, start, _ in step.chunks] == [6, 7, 8, 9]
    assert (moves.slots[0], moves.sources) == (own, [own, *moves.slots[:-1]])
    assert blocks.num_free_slots == 8 - 4
    scheduler.update(step, [30, 10, 10, 10])
    assert blocks.slot_of(seq) == moves.slots[1]
    assert seq.num_computed_tokens == 8
    assert blocks.num_free_slots == 8 - 1


def test_drafts_end_where_a_snapshot_is_due():
    """The snapshot is taken after the verification, at every block. A prompt with these tokens finds the last."""
    scheduler, seq = start_one(Guesser(1), interval=1)
    starts = []
    while seq.finish_reason is None:
        step = scheduler.schedule()
        starts.append([start for _, start, _ in step.chunks])
        draws = [sum(seq.token_ids.data[: start + 1].tolist()) % 50 for start in starts[-1]]
        scheduler.update(step, draws)
    assert starts[:4] == [[6, 7], [8, 9, 10], [11], [12, 13, 14, 15]]
    other = Sequence("b", seq.token_ids.view(0, 25).tolist(), SamplingParams(max_tokens=1))
    scheduler.add(other)
    scheduler.schedule()
    assert other.num_cached_tokens == 24


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_a_sequence_gets_as_many_drafts_as_there_are_slots(num_slots):
    """Snapshots are dropped for drafts."""
    scheduler, seq = start_one(Guesser(1), num_slots=num_slots)
    most = 0
    while seq.finish_reason is None:
        step = scheduler.schedule()
        most = max(most, len(step.chunks))
        scheduler.update(step, [sum(seq.token_ids.data[: start + 1].tolist()) % 50 for _, start, _ in step.chunks])
    assert most == num_slots
    assert seq.output_token_ids == expected(seq)


def test_a_hit_needs_the_same_snapshots_as_without_drafts():
    """A conversation of three turns. In the first, a snapshot is due when the last drafts are verified."""
    hits = {}
    for kind in ("drafts", "plain"):
        options = {"observer": SchedulingStats(), "num_slots": 12, "snapshot_interval": 1}
        if kind == "drafts":
            scheduler = make_scheduler(DraftedStateBlockManager(40, 2, **options), 3, 64, Guesser(1))
        else:
            scheduler = StateScheduler(StateBlockManager(40, 2, **options), 3, 64, 30)
        tokens, hits[kind] = [1, 2, 3], []
        for turn in range(3):
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            scheduler.add(seq := Sequence(str(turn), tokens, params))
            while seq.finish_reason is None:
                step = scheduler.schedule()
                ends = [step.chunks[i][1] + step.chunks[i][2] for i in step.sampled_chunks]
                scheduler.update(step, [sum(seq.token_ids.data[:end].tolist()) % 50 for end in ends])
            hits[kind].append(seq.num_cached_tokens)
            tokens = [*seq.token_ids.view().tolist(), turn]
    assert hits["drafts"] == hits["plain"] == [0, 8, 14]
