"""Slots of recurrent states in recordings: what is replayed is what the block manager has, at every step."""

import copy
import functools
import json

import pytest

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.memory.block_manager import BlockManager
from nanovllm_extras.memory.slots import Slots
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.scheduling.scheduler import Scheduler
from nanovllm_extras.trace.check import check_recording
from nanovllm_extras.trace.recorder import Recorder
from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.trace.replay import Replay, ReplayError
from tests.extras.models.hybrid_checkpoints import make_config
from tests.extras.trace.slot_traffic import known_slots, random_slots
from tests.extras.trace_traffic import Lines

known_lines = functools.cache(known_slots)


def events_of(lines):
    return [event for line in lines[1:] for event in line["events"]]


def replay_all(lines):
    replay = Replay(lines[0])
    for event in events_of(lines):
        replay.apply(event)
    return replay


@pytest.mark.parametrize("kind", ["plain", "swap", "drafts", "drafts and swap", "overlap", "overlap and swap"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3))])
def test_replayed_slots_are_those_of_the_block_manager(seed, kind):
    for limit in (10**9, 9):
        codes = compare_with_replay(*random_slots(seed, limit, kind))
        assert codes >= {"slot", "snapshot", "drop", "roll_back"} or kind != "plain"


def test_states_are_swapped_and_drafts_accepted_and_recordings_begin_between():
    """What the traffic of the test above has: moves to host slots and back, and headers with host slots."""
    segments = [lines for seed in range(4) for lines in random_slots(seed, 9, "drafts and swap")[0]]
    events = [event for lines in segments for event in events_of(lines)]
    assert {event[2] > 0 for event in events if event[0] == "move"} == {True, False}
    assert any(event[3] < 0 for event in events if event[0] == "slot")
    assert any(slot < 0 for lines in segments if lines[0]["state"] for _, slot in lines[0]["state"]["slots"])


def compare_with_replay(segments, truth):
    """Compare the state at each step. Returns the codes of the events."""
    codes, num_compared = set(), 0
    for lines in segments:
        check_recording("run.jsonl", copy.deepcopy(lines))  # it changes lists of the state
        replay = Replay(lines[0])
        for event in events_of(lines):
            replay.apply(event)
            codes.add(event[0])
            if event[0] == "schedule":
                true = truth[replay.step]
                assert replay.slots == true["owners"]
                assert {slot: block for slot, (block, _) in replay.snapshots.items()} == true["snapshots"]
                outs, ins, copies = [[tuple(one) for one in moves] for moves in event[6]]
                assert copies == true["copies"]
                assert (outs, ins) == (true.get("outs", []), true.get("ins", []))
                num_compared += 1
    assert num_compared == len(truth) > 20
    return codes


def test_all_reasons_to_drop_a_snapshot_are_met():
    found = {event[2] for seed in range(8) for lines in random_slots(seed)[0] for event in events_of(lines)
             if event[0] == "drop"}  # fmt: skip
    assert found == {"evicted", "slot", "interval", "forgotten"}


def chunks_of(prompt_lens, budget):
    """Return [decodes, [[start, number of tokens, reason], …]] of each step; block size 4."""
    recorder = Recorder()
    blocks = BlockManager(20, 4, observer=recorder, states=Slots(4, 4, recorder))
    scheduler = Scheduler(blocks, 3, budget, 40)
    recorder.on_start(scheduler.block_manager)
    recorder.begin(Lines(), {"max_num_batched_tokens": budget})
    for i, length in enumerate(prompt_lens):
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        scheduler.add(Sequence(str(i), [100 * i + j for j in range(length)], params))
    while scheduler.running or scheduler.waiting:
        step = scheduler.schedule()
        scheduler.update(step, [7] * len(step.samples))
    recorder.close()
    decodes, found = [], []
    for event in events_of(recorder._sink.segments[0]):
        if event[0] == "schedule":
            decodes = event[3] or decodes if event[3] == 0 else event[3]
            found.append([decodes, [chunk[1:] for chunk in event[4]]])
    return found


def test_a_chunk_that_ends_at_a_snapshot_has_its_own_reason():
    assert chunks_of([10], budget=64) == [
        [[], [[0, 8, "snapshot"]]],
        [[], [[8, 2, "all"]]],
        [[1], []],
    ]
    # a chunk of one token before a snapshot is not a decode
    assert chunks_of([10], budget=7) == [
        [[], [[0, 7, "budget"]]],
        [[], [[7, 1, "snapshot"]]],
        [[], [[8, 2, "all"]]],
        [[1], []],
    ]
    # the budget ends where a snapshot is due: a larger one would compute no more
    assert chunks_of([10], budget=8)[0] == [[], [[0, 8, "snapshot"]]]
    assert chunks_of([10, 6], budget=10)[0] == [[], [[0, 8, "snapshot"], [0, 2, "budget"]]]


def test_recording_of_an_engine_has_its_slots(tmp_path):
    pytest.importorskip("transformers.models.qwen3_5")
    config = make_config().to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"num_kv_blocks": 20, "block_size": 4, "max_num_seqs": 4, "attention_backend": "torch", "device": "cpu"}
    options |= {"load_format": "dummy", "skip_tokenizer_init": True, "state_snapshot_interval": 2}
    with LLM(tmp_path, trace=tmp_path / "run.jsonl", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
        for length in (14, 15):
            llm.generate([{"prompt_token_ids": list(range(5, 5 + length))}], params, use_tqdm=False)
        states = llm.get_stats().states
    lines = read_recording(tmp_path / "run.jsonl")
    check_recording(tmp_path / "run.jsonl", lines)
    assert lines[0]["num_slots"] == states.num_slots == 8
    assert lines[0]["config"]["bytes_per_slot"] == states.bytes_per_slot
    assert lines[0]["config"]["state_snapshot_interval"] == 2
    replay = replay_all(lines)
    assert len(replay.snapshots) == states.num_snapshots > 1
    assert [event[3] for event in events_of(lines) if event[0] == "admit"] == [0, 12]


def change(code, place, value, has_swap=False):
    changed = copy.deepcopy(known_lines(has_swap))
    next(event for event in events_of(changed) if event[0] == code)[place] = value
    return changed


def without(code, has_swap=False):
    changed = copy.deepcopy(known_lines(has_swap))
    for line in changed[1:]:
        line["events"] = [event for event in line["events"] if event[0] != code]
    return changed


def with_header(**fields):
    """A field that is `...` is left out."""
    header, *lines = known_lines()
    return [{name: value for name, value in {**header, **fields}.items() if value is not ...}, *lines]


def with_state(**fields):
    state = {"free": [1, 2, 3, 4, 5, 6], "cached": [], "loaded": [], "seqs": [], **fields}
    return with_header(state=state)[:1]


ONLY_COPIES = [[], [], [[1, 9]]], [[], [], [[-1, -2]]]
CORRUPT = {
    "slot 9": (change, ("slot", 2, 9), "slot of slot must be a slot, got 9"),
    "slot -1": (change, ("slot", 2, -1), "slot of slot must be a slot, got -1"),
    "source 9": (change, ("slot", 3, 9), "source of slot must be a slot, a host slot or 0, got 9"),
    "move 0": (change, ("move", 2, 0, True), "slot of move must be a slot or a host slot, got 0"),
    "block 0": (change, ("snapshot", 3, 0), "block of snapshot must be a block of the pool"),
    "tokens": (change, ("snapshot", 4, None), "num_tokens of snapshot must be an integer >= 0"),
    "moves": (change, ("schedule", 6, ONLY_COPIES[0]), "moves of schedule must be a list of moves"),
    "host": (change, ("schedule", 6, ONLY_COPIES[1]), "moves of schedule must be a list of moves"),
    "chunk": (change, ("schedule", 4, [[1, 0, 8, "rain"]]), "chunks of schedule must be a list of chunks"),
    "no slots": (with_header, {"num_slots": ...}, "slot of slot must be a slot, got 1"),
    "slots": (with_header, {"num_slots": 0}, "num_slots must be a number of slots from 1"),
    "owner": (with_state, {"slots": [[1, 2]]}, "slot 2 must belong to a sequence of the state, got 1"),
    "snapshots": (with_state, {"snapshots": [[1, 7, 4]]}, r"snapshots must be a list of \[slot, block, tokens\]"),
    "copies": (with_state, {"state_copies": [[1]]}, r"state_copies must be a list of \[slot, slot\]"),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_slots_are_refused(name):
    make, given, message = CORRUPT[name]
    lines = make(**given) if isinstance(given, dict) else make(*given)
    with pytest.raises(ValueError, match=message):
        check_recording("bad.jsonl", lines)


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (change, ("schedule", 6, [[], [], [[1, 2]]]), "nothing has asked"),
        (without, ("snapshot",), "nothing has asked"),
        (change, ("snapshot", 2, 1), "slot 1, which is in use"),
        (change, ("snapshot", 3, 6), "block 6, which is not cached"),
        (without, ("free",), "block 4 is taken, and block None is the first free one"),
        (without, ("move", True), "slot 4 is copied to slot -1, and nothing has asked"),
        (change, ("move", 2, -2, True), "slot 4 is copied to slot -1, and nothing has asked"),
        (change, ("slot", 3, -1, True), "takes a slot and owns slot 0"),
        (change, ("move", 2, 3, True), "moves to slot 3, which is in use"),
    ],
)
def test_slots_that_contradict_the_copies_are_noticed(make, given, message):
    with pytest.raises(ReplayError, match=message):
        replay_all(make(*given))


def test_a_copy_that_is_never_done_is_noticed():
    lines = copy.deepcopy(known_lines())
    for event in events_of(lines):
        if event[0] == "schedule":
            event[6][2] = []
    with pytest.raises(ReplayError, match="due are not done"):
        replay_all(lines)
