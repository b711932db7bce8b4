"""A recording of random traffic, replayed, is the state of the block manager at every step: free blocks in their order,
owners, reference counts, cached blocks, computed tokens, swapped blocks.
"""

import pytest
from hypothesis import settings

from nanovllm_extras.trace.replay import EVENTS, Replay, ReplayError
from nanovllm_testing.machine import SETTINGS
from tests.conftest import examples
from tests.extras.test_scheduling import BeamMachine, OverlapBeamMachine
from tests.extras.test_windows import OverlapWindowMachine, WindowMachine
from tests.extras.trace_traffic import Lines, RecordedRun, RecordedSpeculativeRun, random_run, state_of_replay


def check_segments(segments, states):
    """Each segment by itself gives the states of all of its steps."""
    num_compared = 0
    for segment in segments:
        replay = Replay(segment[0])
        for line in segment[1:]:
            for event in line["events"]:
                replay.apply(event)
                if event[0] == "schedule":
                    assert state_of_replay(replay) == states[replay.step], replay.step
                    num_compared += 1
    assert num_compared == len(states)


class RecordedTraffic:
    """For a machine of `test_scheduler.py`: its run is recorded, and compared when it is over."""

    def make_run(self, **options):
        self.lines = Lines(limit=7)
        return RecordedRun(self.lines, **options)

    def teardown(self):
        super().teardown()
        if hasattr(self, "run"):
            self.run.recorder.close()
            check_segments(self.lines.segments, self.run.recorder.states)


class RecordedBeamMachine(RecordedTraffic, BeamMachine):
    pass


class RecordedOverlapMachine(RecordedTraffic, OverlapBeamMachine):
    pass


class RecordedWindowMachine(RecordedTraffic, WindowMachine):
    pass


class RecordedOverlapWindowMachine(RecordedTraffic, OverlapWindowMachine):
    pass


class RecordedSpeculativeMachine(RecordedTraffic, BeamMachine):
    def make_run(self, **options):
        self.lines = Lines(limit=7)
        return RecordedSpeculativeRun(self.lines, **options)


TestTraffic = pytest.mark.examples(RecordedBeamMachine.TestCase)
TestTraffic.settings = settings(SETTINGS, max_examples=examples(100))
TestTrafficWithOverlap = pytest.mark.examples(RecordedOverlapMachine.TestCase)
TestTrafficWithOverlap.settings = settings(SETTINGS, max_examples=examples(100))
TestTrafficWithDrafts = pytest.mark.examples(RecordedSpeculativeMachine.TestCase)
TestTrafficWithDrafts.settings = settings(SETTINGS, max_examples=examples(60))
TestTrafficWithWindow = pytest.mark.examples(RecordedWindowMachine.TestCase)
TestTrafficWithWindow.settings = settings(SETTINGS, max_examples=examples(40))
TestTrafficWithWindowAndOverlap = pytest.mark.examples(RecordedOverlapWindowMachine.TestCase)
TestTrafficWithWindowAndOverlap.settings = settings(SETTINGS, max_examples=examples(40))


# ---- the same without hypothesis


def test_each_kind_of_event_is_met_and_replayed():
    codes = set()
    for seed, window in enumerate([None, None, None, None, 2, 5, None, None, 5]):
        run = random_run(seed, 40, window, has_drafts=seed > 5)
        segments = run.lines.segments
        check_segments(segments, run.recorder.states)
        codes |= {event[0] for segment in segments for line in segment[1:] for event in line["events"]}
    # the others are in test_recording.py and test_recorded_slots.py
    assert codes == EVENTS - {"start", "slot", "move", "snapshot", "drop"}


def test_exactly_the_running_sequences_without_a_chunk_are_idle():
    codes = set()

    def check(replay, event, idle):
        _, _, _, _, chunks, *_ = event
        computed = {*replay.decodes, *(chunk[0] for chunk in chunks)}
        running = {number for number, seq in replay.seqs.items() if seq.status == "running"}
        assert idle.keys() == running - computed - {*replay.in_flight[replay.step]}  # forked samples share its chunk
        num_tokens = len(replay.decodes) + sum(chunk[2] for chunk in chunks)
        codes.update(idle.values())
        for number, code in idle.items():
            seq = replay.seqs[number]
            waits = [step for step, numbers in replay.in_flight.items() if number in numbers and step < replay.step]
            if code == "caught_up":  # it waits for the token that ends it
                assert waits
                assert seq.num_computed_tokens == len(seq.tokens)
            else:
                assert (code, num_tokens) == ("budget", budget)

    for seed in (0, 1, 2, 3, 7):
        run = random_run(seed, has_drafts=seed > 5)
        budget = run.scheduler.max_num_batched_tokens
        [(header, *lines)] = run.lines.segments
        replay, idle = Replay(header), {}
        for event in (event for line in lines for event in line["events"]):
            replay.apply(event)
            if event[0] == "idle":
                assert event[1] not in idle, "twice in a step"
                idle[event[1]] = event[2]
            elif event[0] == "schedule":
                check(replay, event, idle)
                idle = {}
    assert codes == {"budget", "caught_up"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda events: events.remove(next(e for e in events if e[0] == "take")), "free"),
        (lambda events: events.insert(0, ["take", 1, 5, 1]), "first free"),
        (lambda events: events.append(["nonsense", 1]), "unknown event"),
        (lambda events: events.remove(next(e for e in events if e[0] == "schedule")), "step 0: .*update.*does not fit"),
    ],
)
def test_recording_that_was_changed_contradicts_itself(change, message):
    lines = Lines()
    run = RecordedRun(lines, num_blocks=6, block_size=2)
    run.add([1, 2, 3], max_tokens=4)
    run.finish()
    [segment] = lines.segments
    change(segment[1]["events"])
    with pytest.raises(ReplayError, match=message):
        check_segments(lines.segments, run.recorder.states)
