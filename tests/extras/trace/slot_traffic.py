"""Recorded traffic of a model with recurrent states, and what the block manager's slots hold at each step."""

import random

from nanovllm.extras.full_sequence import Sequence
from nanovllm.extras.request_params import SamplingParams
from nanovllm.extras.roll_back import reset_prefix_cache
from nanovllm.extras.states.slots import StateBlockManager, StateScheduler
from nanovllm.extras.trace.recorder import Recorder
from tests.extras.states.test_slots import Run
from tests.extras.trace_traffic import Lines


class SlotRecorder(Recorder):
    """Notes at each `schedule` which sequence owns which slot, the snapshots, and the copies of the step."""

    def __init__(self, lines):
        super().__init__(lines)
        self.truth = {}

    def on_schedule(self, step, running, blocks):
        super().on_schedule(step, running, blocks)
        block_of = {one.serial: one.block_id for one in blocks.prefix_cache._by_id.values()}
        self.truth[self._num_steps] = {
            "owners": {blocks.slot_of(seq): self._seqs[seq] for seq in running},
            "snapshots": {slot: block_of[serial] for serial, slot in blocks.prefix_cache.snapshots.items()},
            "copies": list(step.copies.state_copies),
        }


class RecordedSlots(Run):
    """`Run`, whose observer is a recorder."""

    def __init__(self, seed, limit=10**9):
        self.recorder = SlotRecorder(Lines(limit))
        super().__init__(random.Random(seed), observer=self.recorder)
        self.recorder.on_start(self.blocks)
        self.recorder.begin({"max_num_batched_tokens": self.scheduler.max_num_batched_tokens})

    def step(self, fails=False):
        super().step(fails)
        self.recorder.flush()


def random_slots(seed, limit=10**9):
    """Return the segments of a recording, and what was true at each of its steps."""
    run = RecordedSlots(seed, limit)
    for i in range(150):
        run.act()
        if i % 40 == 39:
            reset_prefix_cache(run.scheduler)
    return run.recorder._sink.segments, run.recorder.truth


def known_slots():
    """Return the lines of the run that chapter 15 of the book follows: four slots, a fork, a preemption."""
    recorder = Recorder(Lines())
    blocks = StateBlockManager(6, 4, observer=recorder, num_slots=4)
    recorder.on_start(blocks)
    recorder.begin({"max_num_batched_tokens": 64, "max_num_seqs": 3})
    scheduler = StateScheduler(blocks, max_num_seqs=3, max_num_batched_tokens=64, max_model_len=64)
    add(scheduler, "A", 10, n=1)
    number = 0
    while scheduler.running or scheduler.waiting:
        number += 1
        if number == 3:
            add(scheduler, "B", 9, n=2)
        step = scheduler.schedule()
        scheduler.update(step, [100 * (1 + seq.sample_index) + number for seq in step.samples])
        recorder.flush()
    recorder.close()
    [lines] = recorder._sink.segments
    return lines


def add(scheduler, name, length, n):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    seqs = [Sequence(name, list(range(length)), params, sample_index=i) for i in range(n)]
    seqs[0].children = seqs[1:]
    scheduler.add(seqs[0])
