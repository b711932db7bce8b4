"""An interrupt at any bytecode of the scheduler loses no sequence: all of them go on, with the same tokens."""

import sys

import pytest

import nanovllm.scheduler
import nanovllm_extras.scheduling.scheduler
from nanovllm import block_manager
from nanovllm_extras.engine.invariants import check_invariants
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.swap_space import SwapSpace
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_observer import SchedulingStats
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.scheduling.roll_back import roll_back
from nanovllm_testing.fake_kv_cache import tokens_of
from nanovllm_testing.run import next_token

FILES = {one.__file__ for one in (nanovllm.scheduler, nanovllm_extras.scheduling.scheduler)}
LENGTH, NUM_OUTPUTS = 5, 6


class Interrupt:
    """Raises KeyboardInterrupt before the nth bytecode of the scheduler's files, and counts them."""

    def __init__(self, nth=None):
        self.nth = nth
        self.count = 0

    def __enter__(self):
        self.previous = sys.gettrace()
        sys.settrace(self.trace)

    def __exit__(self, *exception):
        sys.settrace(self.previous)

    def trace(self, frame, event, arg):
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self.nth:
                raise KeyboardInterrupt
        return self.trace


def make_core_scheduler():
    blocks = block_manager.BlockManager(7, 2, observer=SchedulingStats())
    return nanovllm.scheduler.Scheduler(blocks, 4, 8, 64)


def make_full_scheduler():
    blocks = BlockManager(7, 2, observer=SchedulingStats(), swap_space=SwapSpace(6))
    return nanovllm_extras.scheduling.scheduler.Scheduler(blocks, 4, 8, 64)


def run(make_scheduler, interrupt):
    """Serve two requests, one of them with three samples, and abort a third one. Returns the tokens of all samples.

    Blocks for one sample after the other: samples are forked, preempted, and admitted again.
    """
    scheduler = make_scheduler()
    scheduler.observer.on_start(scheduler.block_manager)
    seqs = []
    for i, n in enumerate((3, 1, 1)):
        params = SamplingParams(max_tokens=NUM_OUTPUTS, n=n)
        samples = [Sequence(str(i), list(range(LENGTH - i)), params, sample_index=j) for j in range(n)]
        samples[0].children = samples[1:]
        seqs += samples
        scheduler.add(samples[0])
    aborted = seqs.pop()
    num_preempted = 0
    for i in range(400):
        try:
            with interrupt:
                if i == 2:
                    scheduler.finish(aborted, "abort")
                step = scheduler.schedule()
        except KeyboardInterrupt:
            roll_back(scheduler)
            if aborted.finish_reason is None and i >= 2:
                scheduler.finish(aborted, "abort")
            check_invariants(scheduler)
            unborn = [child for seq in scheduler.waiting for child in seq.children]
            expected = {one for one in (*seqs, aborted) if one.finish_reason is None}
            assert {*scheduler.waiting, *unborn} == expected, "a sequence is lost"
            continue
        num_preempted += len(step.preempted)
        if step.chunks:
            scheduler.update(step, [next_token(tokens_of(seq), seq.sample_index) for seq in step.samples])
        if not scheduler.running and not scheduler.waiting:
            break
    assert scheduler.block_manager.num_used_blocks == 0
    assert num_preempted
    return [(tokens_of(seq), seq.finish_reason) for seq in seqs]


@pytest.mark.parametrize("every", [61, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make_scheduler", [make_core_scheduler, make_full_scheduler])
def test_an_interrupt_at_any_bytecode_loses_no_sequence(make_scheduler, every):
    counted = Interrupt()
    expected = run(make_scheduler, counted)
    assert all(reason == "length" for _, reason in expected)
    assert counted.count > 3000
    for nth in range(1, counted.count + 1, every):
        assert run(make_scheduler, Interrupt(nth)) == expected, nth
