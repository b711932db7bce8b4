"""`nanovllm view` refuses what its page cannot replay, and names file, line and reason. What is recorded opens."""

import copy
import json
import time

import pytest

from nanovllm_extras.trace import check, view
from nanovllm_extras.trace.check import check_recording
from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.trace.replay import EVENTS, Replay, ReplayError
from tests.extras.trace_traffic import known_run, random_run

LINES, _ = known_run()  # a header, and the lines of the run


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def set_header(**fields):
    return lambda lines: lines[0].update(fields)


def set_line(**fields):
    return lambda lines: lines[1].update(fields)


def set_field(code, place, value):
    """In the first event with that code."""

    def change(lines):
        event = next(event for line in lines[1:] for event in line["events"] if event[0] == code)
        event[place] = value

    return change


def append(*event):
    return lambda lines: lines[1]["events"].append(list(event))


CORRUPT = {
    "no block_size": (lambda lines: lines[0].pop("block_size"), "line 1 .*block_size is missing"),
    "block_size 0": (set_header(block_size=0), "line 1 .*block_size must be a block size from 1 .*got 0"),
    "block_size true": (set_header(block_size=True), "block_size must be"),
    "num_blocks 0": (set_header(num_blocks=0), "line 1 .*num_blocks must be a number of blocks from 1 .*got 0"),
    "2e9 blocks": (set_header(num_blocks=2 * 10**9), "line 1 .*got 2000000000"),
    "config": (set_header(config=None), "line 1 .*config must be an object, got None"),
    "in_flight": (set_header(in_flight=[[1]]), "line 1 .*in_flight must be"),
    "state": (set_header(state={"free": []}), "line 1 .*cached is missing"),
    "table in state": (
        set_header(state={"free": [], "cached": [], "loaded": [], "seqs": [{"number": 1}]}),
        "line 1 .*request is missing",
    ),
    "events null": (set_line(events=None), "line 2 .*events must be a list, got None"),
    "t": (set_line(t="1"), "line 2 .*t must be a number, got '1'"),
    "texts": (set_line(texts={"1": 2}), "line 2 .*texts must be an object of strings"),
    "times": (set_line(times=3), "line 2 .*times must be an object of numbers"),
    "line": (lambda lines: lines.insert(1, [1]), r"line 2 .*the line must be an object, got \[1\]"),
    "event": (append(), r"line 2 .*unknown event \[\]"),
    "unknown event": (append("evict", 1), r"line 2 .*unknown event \['evict', 1\]"),
    "fields": (append("forget", 1, 2), "line 2 .*forget must have 1 fields, got 2"),
    "unknown sequence": (append("free", 77), "line 2 .*seq of free must be a known sequence, got 77"),
    "sequence true": (append("free", True), "seq of free must be a known sequence, got True"),
    "known sequence": (set_field("fork", 2, 1), "seq of fork must be a new sequence, got 1"),
    "block 9": (set_field("take", 2, 9), "block of take must be a block of the pool, got 9"),
    "block -1": (set_field("share", 2, -1), "block of share must be a block of the pool or 0, got -1"),
    "blocks of a tier": (append("load", 1, 4, {"disk": [0]}), "blocks of load must be an object of lists of blocks"),
    "no tier": (append("load", 1, 4, [1]), "blocks of load must be an object of lists of blocks"),
    "loaded in state": (
        set_header(state={"free": [], "cached": [], "loaded": [[1]], "seqs": []}),
        r"line 1 .*loaded must be a list of \[block, tier\]",
    ),
    "not cached": (append("forget", 8), r"line 2 .*\['forget', 8\] does not fit"),
    "reason": (set_field("finish", 2, "sleepy"), "reason of finish must be a reason to finish, got 'sleepy'"),
    "wait": (set_field("wait", 2, "rain"), "code of wait must be a reason to wait, got 'rain'"),
    "about": (set_field("add", 3, {"tokens": "abc"}), "line 2 .*request is missing"),
    "more about": (set_field("add", 3, None), "about of add must be an object, got None"),
    "long chunk": (
        set_field("schedule", 4, [[1, 0, 10**9, "all"]]),
        "line 2 .*the end of the chunk of sequence 1 .*<= 9",
    ),
    "long prefix": (set_field("admit", 3, 10**9), "line 2 .*num_computed of admit must be <= 9, got 1000000000"),
    "large number": (set_field("admit", 3, 10**400), "num_computed of admit must be an integer >= 0"),
    "step": (set_field("schedule", 1, 5), "line 2 .*step 1 comes next, got 5"),
    "not in flight": (set_field("update", 1, 9), "step 9 of update is not in flight"),
    "many drafts": (append("verify", 1, 65, 65, []), "num_drafts of verify must be <= "),
    "more right than drafts": (append("verify", 1, 0, 1, []), "num_accepted of verify must be <= 0, got 1"),
    "blocks of drafts": (append("verify", 1, 0, 0, [0]), "blocks of verify must be a list of blocks of the pool"),
    "drafts": (append("draft", 1, ["a"]), "token_ids of draft must be a list of integers"),
    "misses": (set_field("miss", 2, 3), "line 2 .*misses of miss must be a list of misses, got 3"),
    "a miss": (set_field("miss", 2, [{"start": 0, "end": 9}]), "misses of miss must be a list of misses"),
    "cached tokens": (
        set_field("miss", 2, [{"start": 0, "end": 9, "cause": "differs", "cached": ["a"]}]),
        "misses of miss must be a list of misses",
    ),
    "draws": (set_field("update", 3, []), "step 1 samples 3 tokens, got 0"),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_recording_is_refused_with_its_line(tmp_path, capsys, name):
    change, message = CORRUPT[name]
    lines = copy.deepcopy(LINES)
    change(lines)
    good, bad = write(tmp_path / "good.jsonl", LINES), write(tmp_path / "bad.jsonl", lines)
    with pytest.raises(ValueError, match=f"bad.jsonl, .*{message}"):
        check_recording(bad, read_recording(bad))
    with pytest.raises(SystemExit, match="2"):
        view.main([str(good), str(bad), "-o", str(tmp_path / "run.html")])
    assert "bad.jsonl, line " in capsys.readouterr().err
    assert not (tmp_path / "run.html").exists()


def test_what_contradicts_the_engine_is_left_to_the_page(tmp_path, capsys):
    for field in (("schedule", 7, 7), ("schedule", 8, 99), ("take", 2, 5), ("take", 3, 1), ("miss", 2, [])):
        lines = copy.deepcopy(LINES)
        set_field(*field)(lines)
        with pytest.raises(ReplayError):
            replay(lines)
        path = write(tmp_path / "run.jsonl", lines)
        assert view.main([str(path), "-o", str(tmp_path / "run.html")]) == 0
        with pytest.raises(SystemExit, match="2"):
            view.main([str(path), "--perfetto", str(tmp_path / "run.json")])
        assert "run.jsonl cannot be exported: step " in capsys.readouterr().err


def replay(lines):
    state = Replay(lines[0])
    for line in lines[1:]:
        for event in line["events"]:
            state.apply(event)


def test_all_that_is_recorded_is_opened():
    assert set(check.EVENTS) == EVENTS
    for seed, window in enumerate([None, None, None, 2, 5, None]):
        limit = (25, 10**9)[seed % 3 > 1]
        for segment in random_run(seed, limit, window, has_drafts=seed == 5).lines.segments:
            check_recording("run.jsonl", segment)


def test_large_pool_costs_nothing_until_it_is_used():
    """The shortest of three turns: 0.04 s of this thread, and seconds if something is made for each block."""
    seconds = []
    for _ in range(3):
        lines = copy.deepcopy(LINES)
        lines[0]["num_blocks"] = check.MAX_BLOCKS
        start = time.thread_time()
        check_recording("run.jsonl", lines)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.15
