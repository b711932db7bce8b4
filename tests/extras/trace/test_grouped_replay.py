"""Groups of layers in recordings: what is replayed is what the block manager has in all groups, at every step."""

import copy

import pytest
from hypothesis import settings

from nanovllm_extras.trace.check import check_recording
from nanovllm_extras.trace.perfetto import to_perfetto
from nanovllm_extras.trace.replay import Replay, ReplayError
from nanovllm_testing.machine import SETTINGS
from tests.conftest import examples
from tests.extras.kv_groups.test_grouped_blocks import GroupedMachine, GroupedSpeculativeMachine, OverlapGroupedMachine
from tests.extras.trace.test_state_replay import RecordedTraffic, check_segments
from tests.extras.trace_traffic import (
    Lines,
    RecordedGroupedRun,
    RecordedSpeculativeGroupedRun,
    known_groups,
    random_run,
)

LINES, STATES = known_groups()


class RecordedGroupedMachine(RecordedTraffic, GroupedMachine):
    make_recorded_run = RecordedGroupedRun

    def make_run(self, **options):
        self.lines = Lines(limit=7)
        return self.make_recorded_run(self.lines, **options)


class RecordedOverlapGroupedMachine(RecordedGroupedMachine, OverlapGroupedMachine):
    pass


class RecordedSpeculativeGroupedMachine(RecordedGroupedMachine, GroupedSpeculativeMachine):
    make_recorded_run = RecordedSpeculativeGroupedRun


TestTraffic = pytest.mark.examples(RecordedGroupedMachine.TestCase)
TestTraffic.settings = settings(SETTINGS, max_examples=examples(40))
TestTrafficWithOverlap = pytest.mark.slow(RecordedOverlapGroupedMachine.TestCase)
TestTrafficWithOverlap.settings = settings(SETTINGS, max_examples=examples(40))
TestTrafficWithDrafts = pytest.mark.slow(RecordedSpeculativeGroupedMachine.TestCase)
TestTrafficWithDrafts.settings = settings(SETTINGS, max_examples=examples(40))


def events_of(lines):
    return [event for line in lines[1:] for event in line["events"]]


def test_replayed_tables_of_a_known_run_are_those_of_the_block_manager():
    codes = {(event[0], len(event)) for event in events_of(LINES)}
    assert {("take", 6), ("share", 5), ("copy", 5), ("register", 6), ("give_back", 3), ("preempt", 5)} <= codes
    check_recording("run.jsonl", copy.deepcopy(LINES))  # a replay appends to lists of the lines
    check_segments([copy.deepcopy(LINES)], STATES)
    tables = [one[5] for state in STATES.values() for one in state["seqs"].values()]
    assert any(table[:1] == [0] for table in tables), "a null block behind the window"
    spans = to_perfetto(copy.deepcopy(LINES))["traceEvents"]
    prefill = next(event for event in spans if event["name"] == "prefill")  # of the first request, until step 2
    seq = STATES[2]["seqs"]["seq-0", 0]
    assert prefill["args"]["blocks"] == count_blocks(seq) > len(seq[2])


def count_blocks(seq):
    _, _, table, _, _, *windows = seq
    return len(table) + sum(block_id != 0 for window in windows for block_id in window)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_replayed_tables_are_those_of_the_block_manager(seed):
    for limit in (10**9, 9):
        run = random_run(seed, limit, [1, 2, 5, 9][seed % 4], has_drafts=seed % 5 == 4, num_groups=2 + seed % 3)
        for segment in run.lines.segments:
            check_recording("run.jsonl", copy.deepcopy(segment))
        check_segments(run.lines.segments, run.recorder.states)


# ---- what is refused


def change(code, place, value):
    """Change a field of the first event of a group with a window that has this code."""
    changed = copy.deepcopy(LINES)
    longest = max(len(event) for event in events_of(changed) if event[0] == code)
    next(event for event in events_of(changed) if event[0] == code and len(event) == longest)[place] = value
    return changed


def without(is_left_out):
    changed = copy.deepcopy(LINES)
    for line in changed[1:]:
        line["events"] = [event for event in line["events"] if not is_left_out(event)]
    return changed


def with_header(**fields):
    return [LINES[0] | fields, *LINES[1:]]


def with_state(**fields):
    state = {"free": [1, 2], "cached": [], "loaded": [], "seqs": [], **fields}
    return with_header(state=state)[:1]


ONE_GROUP = [{name: value for name, value in LINES[0].items() if name != "num_groups"}, *LINES[1:]]
CORRUPT = {
    "group 3": (change("take", 4, 3), "group of take must be a group with a window, got 3"),
    "group 0": (change("share", 3, 0), "group of share must be a group with a window, got 0"),
    "group true": (change("copy", 4, True), "group of copy must be a group with a window, got True"),
    "no such group": (change("register", 5, -1), "group of register must be a group with a window, got -1"),
    "place": (change("take", 5, 10**9), "place must be <= 1, got 1000000000"),
    "fields": (change("take", slice(5, 6), []), "take must have 3 or 5 fields, got 4"),
    "one group": (ONE_GROUP, "group of take must be a group with a window, got 1"),
    "0 groups": (with_header(num_groups=0), "num_groups must be a number of groups from 1"),
    "many groups": (with_header(num_groups=10**6), "num_groups must be a number of groups from 1"),
    "window": (with_header(group_window=-1), "group_window must be an integer >= 0, got -1"),
    "tables": (with_state(window_tables=[[1, [[1]]]]), r"window_tables must be a list of \[sequence, block tables\]"),
    "owner": (with_state(window_tables=[[1, [[], []]]]), "window_tables must belong to sequences of the state, got 1"),
    "blocks": (with_state(window_cached=[[1, [0]]]), r"window_cached must be a list of \[serial, blocks\]"),
    "serial": (with_state(window_cached=[[1, [2]]]), "window_cached must have serial numbers of cached blocks, got 1"),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_groups_are_refused(name):
    lines, message = CORRUPT[name]
    with pytest.raises(ValueError, match=message):
        check_recording("bad.jsonl", lines)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (without(lambda event: event[0] == "give_back"), "blocks are free, the engine says"),
        (without(lambda event: event[0] == "take" and event[4:] == [2, 0]), "is taken, and block"),
        (without(lambda event: event[0] == "register" and event[5:] == [1]), "is evicted: True|the first free one"),
        (without(lambda event: event[0] == "copy" and event[4:] == [1]), "is in use|engine says|is taken"),
        (change("take", 4, 2), "has an entry 0 in group 2 already"),
        (change("copy", 2, 30), "does not write to block 30"),
        (change("give_back", 2, [1, 1]), "gives back block 1, and does not own it"),
    ],
)
def test_groups_that_contradict_themselves_are_noticed(lines, message):
    with pytest.raises(ReplayError, match=message):
        replay_all(lines)


def replay_all(lines):
    replay = Replay(lines[0])
    for event in events_of(lines):
        replay.apply(event)
