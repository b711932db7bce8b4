"""Recorded traffic of a model with recurrent states, and what the block manager's slots hold at each step."""

import random

from nanovllm_extras.engine.prefix_misses import PrefixMisses
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.slots import Slots
from nanovllm_extras.memory.swap_space import SwapSpace
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_observer import SchedulingStats
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.scheduling.roll_back import reset_prefix_cache
from nanovllm_extras.scheduling.scheduler import Scheduler
from nanovllm_extras.trace.recorder import Recorder
from tests.extras.states.state_traffic import Traffic
from tests.extras.trace_traffic import Lines, StrictObservers


class SlotRecorder(Recorder):
    """Notes at each `schedule` which sequence owns which slot, the snapshots, the copies, and what is swapped out."""

    def __init__(self):
        super().__init__()
        self.space, self.truth = None, {}

    def on_schedule(self, step, running, blocks):
        super().on_schedule(step, running, blocks)
        block_of = {one.serial: one.block_id for one in blocks.prefix_cache._by_id.values()}
        self.truth[self._num_steps] = {
            "owners": {blocks.states.owned[seq]: self._seqs[seq] for seq in running} | self.swapped(),
            "snapshots": {slot: block_of[serial] for serial, slot in blocks.states.snapshots.items()},
            "copies": list(step.copies.state_copies),
        }
        if self.space is not None:
            moves = step.copies
            self.truth[self._num_steps] |= {"outs": list(moves.swap_outs), "ins": list(moves.swap_ins)}

    def swapped(self):
        """Return host slot -> sequence for all that are swapped out."""
        return {} if self.space is None else {slot: self._seqs[seq] for seq, slot in self.space._slots.items()}


class RecordedTraffic(Traffic):
    """Traffic that is recorded. limit: bytes of a segment"""

    def __init__(self, seed, limit, *features, **options):
        self.recorder = SlotRecorder()
        observers = StrictObservers(SchedulingStats(), [self.recorder])
        super().__init__(random.Random(seed), *features, observer=observers, **options)
        self.recorder.space = self.space
        observers.on_start(self.blocks)
        self.recorder.begin(Lines(limit), {"max_num_batched_tokens": self.scheduler.max_num_batched_tokens})

    def act(self):
        has_drafts = self.scheduler.drafter is not None
        super().act() if not has_drafts or self.rng.random() < 0.5 else self.step()  # drafts need steps without waiting

    def step(self, fails=False):
        super().step(fails)
        self.recorder.flush()


def random_slots(seed, limit=10**9, kind="plain"):
    """Return the segments of a recording, and what was true at each of its steps.

    kind: `plain`, or features of `Traffic`, such as `drafts and swap`
    """
    if kind == "plain":
        run = RecordedTraffic(seed, limit)
    else:  # few blocks, so that sequences are preempted
        sizes = 4 + seed % 5, 6 + seed % 3, 9
        run = RecordedTraffic(seed, limit, *kind.split(" and "), sizes=sizes)
    for i in range(150):
        run.act()
        if i % 40 == 39:
            reset_prefix_cache(run.scheduler)
    return run.recorder._sink.segments, run.recorder.truth


def known_slots(has_swap=False):
    """Return the lines of the run that chapter 15 of the book follows: four slots, a fork, a preemption."""
    recorder = Recorder()
    space = SwapSpace(9, 2) if has_swap else None
    blocks = BlockManager(6, 4, observer=recorder, states=Slots(4, 4, recorder), swap_space=space)
    recorder.on_start(blocks)
    recorder.begin(Lines(), {"max_num_batched_tokens": 64, "max_num_seqs": 3})
    scheduler = Scheduler(blocks, 3, 64, max_model_len=64)
    add(scheduler, "A", range(10), n=1)
    number = 0
    while scheduler.running or scheduler.waiting:
        number += 1
        if number == 3:
            add(scheduler, "B", range(9), n=2)
        step = scheduler.schedule()
        scheduler.update(step, [100 * (1 + seq.sample_index) + number for seq in step.samples])
        recorder.flush()
    recorder.close()
    [lines] = recorder._sink.segments
    return lines


def prompts_in_turn(*turns, num_slots):
    """Return the lines of a run with blocks of 4. turns: name -> prompt; a turn starts when the last one has ended."""
    recorder = Recorder()
    observers = StrictObservers(SchedulingStats(), [recorder], PrefixMisses())
    blocks = BlockManager(12, 4, observer=observers, states=Slots(num_slots, 4, observers))
    observers.on_start(blocks)
    recorder.begin(Lines(), {"max_num_batched_tokens": 64, "max_num_seqs": 3})
    scheduler = Scheduler(blocks, 3, 64, max_model_len=64)
    for turn in turns:
        for name, token_ids in turn.items():
            add(scheduler, name, token_ids, n=1)
        while scheduler.running or scheduler.waiting:
            step = scheduler.schedule()
            scheduler.update(step, [100 for _ in step.samples])
            recorder.flush()
    recorder.close()
    [lines] = recorder._sink.segments
    return lines


def add(scheduler, name, token_ids, n):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    seqs = [Sequence(name, list(token_ids), params, sample_index=i) for i in range(n)]
    seqs[0].children = seqs[1:]
    scheduler.add(seqs[0])
