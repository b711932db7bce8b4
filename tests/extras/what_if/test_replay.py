"""A recording that the core can make is repeated event by event; what the core lacks is refused by name."""

import io
import json
import random
from pathlib import Path

import pytest

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.trace.check import check_recording
from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.what_if.comparison import compare
from nanovllm_extras.what_if.journal import Journal
from nanovllm_extras.what_if.recorded_run import read_run
from nanovllm_extras.what_if.run import replay

ROOT = Path(__file__).resolve().parents[3]
RECORDINGS = [*sorted(ROOT.glob("docs/book/recordings/*.jsonl")), ROOT / "nanovllm_extras" / "trace" / "story.jsonl"]
REFUSED = {
    "beam_search": "beams",
    "kv_store": "a K/V store",
    "speculation": "drafts",
    "states": "recurrent states",
}
PLACE_OF_TIME = {"add": 2, "schedule": 2, "update": 2, "fork": 6, "finish": 5}


def events_of(lines):
    """All events without their times, and without what only the engine with all options adds."""
    found = []
    for event in [event for line in lines[1:] for event in line["events"] if event[0] != "miss"]:
        plain = [value for place, value in enumerate(event) if place != PLACE_OF_TIME.get(event[0])]
        if event[0] == "add":
            plain[-1] = {name: value for name, value in plain[-1].items() if name not in ("params", "cache_salt")}
        found.append(plain)
    return found


def repeat(path):
    """Return the lines of a recording, and those that the journal of its replay has."""
    lines = read_recording(path)
    run, file = read_run(lines), io.StringIO()
    journal = Journal(file, run.options, run.model, {})
    replay(run, figures=journal)
    journal.close()
    return lines, [json.loads(line) for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("path", [path for path in RECORDINGS if path.stem not in REFUSED], ids=lambda path: path.stem)
def test_each_committed_recording_is_repeated_event_by_event(path):
    """Blocks taken, shared, copied and freed, hashes, chunks, samples, tokens, ends: all that the recorder has seen."""
    recorded, repeated = repeat(path)
    assert events_of(repeated) == events_of(recorded)
    assert (repeated[0]["num_blocks"], repeated[0]["block_size"]) == (
        recorded[0]["num_blocks"],
        recorded[0]["block_size"],
    )
    check_recording(path, repeated)  # the page can show it


@pytest.mark.parametrize("path", [path for path in RECORDINGS if path.stem in REFUSED], ids=lambda path: path.stem)
def test_what_the_core_lacks_is_refused_by_name(path):
    with pytest.raises(ValueError, match=f"cannot make this run: it has {REFUSED[path.stem]}"):
        read_run(read_recording(path))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("enable_overlap", True, "overlap"),
        ("num_swap_blocks", 3, "swap"),
        ("scheduling_policy", "sjf", "policy 'sjf'"),
        ("long_prefill_token_threshold", 8, "long_prefill_token_threshold"),
        ("has_own_blocks", True, "of one's own"),
    ],
)
def test_options_that_the_core_lacks_are_refused_by_name(name, value, message):
    lines = read_recording(RECORDINGS[1])
    lines[0]["config"][name] = value
    with pytest.raises(ValueError, match=message):
        read_run(lines)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("update", "token id above 2147483647"),
        ("add", "sample of request 'A' without the request"),
    ],
)
def test_a_recording_that_the_page_accepts_but_no_engine_writes_is_refused(code, message):
    lines = read_recording(ROOT / "docs/book/recordings/preemption.jsonl")
    event = next(event for line in lines[1:] for event in line["events"] if event[0] == code)
    if code == "update":
        event[3][0] = 2**31
    else:
        event[3]["sample"] = 1
    check_recording(Path("damaged.jsonl"), lines)
    with pytest.raises(ValueError, match=message):
        read_run(lines)


def test_a_run_of_another_scheduler_is_refused_at_its_first_step_that_differs():
    run = read_run(read_recording(ROOT / "docs/book/recordings/preemption.jsonl"))
    assert run.steps[3].chunks == [(1, 12, 1), (2, 12, 1)]
    run.steps[3].chunks.reverse()
    with pytest.raises(ValueError, match=r"in step 4, its chunks .* are \[\(1, 12, 1\), \(2, 12, 1\)\]"):
        replay(run)


def test_a_run_of_everything_is_repeated(tmp_path):
    """Samples, aborts of running and waiting requests, stop strings, stop tokens, salts, preemption, prefix hits."""
    rng, path = random.Random(3), tmp_path / "run.jsonl"
    sizes = {"block_size": 4, "num_kv_blocks": 20, "max_num_batched_tokens": 24, "max_num_seqs": 5}
    options = {"attention_backend": "torch", "enforce_eager": True, "device": "cpu"}
    with LLM(TINY_QWEN3, trace=path, **sizes, **options) as llm:
        engine = llm.engine
        for i in range(60):
            if i < 40:
                prompt = [100 + rng.randrange(2)] * rng.randrange(1, 20) + [rng.randrange(1000) for _ in range(3)]
                limits = {"max_tokens": rng.randrange(1, 25), "ignore_eos": rng.random() < 0.5, "seed": i}
                params = rng.choice(
                    [
                        SamplingParams(n=rng.randrange(1, 4), **limits),
                        SamplingParams(temperature=0, stop=["e", " a"], **limits),
                        SamplingParams(temperature=2.0, stop_token_ids=list(range(0, 2000, 9)), **limits),
                    ]
                )
                salted = {"prompt_token_ids": prompt, "cache_salt": str(rng.randrange(2))}
                engine.add_request(str(i), salted if rng.random() < 0.3 else prompt, params)
            if i % 4 == 3:
                engine.abort_request(str(rng.randrange(i)))
            engine.step()
        while engine.has_unfinished_requests():
            engine.step()
        num_preemptions = llm.get_stats().num_preemptions
    recorded, repeated = repeat(path)
    hashes = {"register": 3}  # salts are secrets: a recording numbers them
    without = [
        [[value for place, value in enumerate(event) if place != hashes.get(event[0])] for event in events_of(lines)]
        for lines in (recorded, repeated)
    ]
    assert without[1] == without[0]
    ends = [event[2:4] for event in events_of(recorded) if event[0] == "finish"]
    assert num_preemptions > 3
    assert {reason for reason, _ in ends} == {"stop", "length", "abort"}
    assert {type(stop) for _, stop in ends} == {int, str, type(None)}
    assert sum(event[0] == "copy" for event in events_of(recorded)) > 3


def test_what_cannot_be_known_is_said():
    """Four answers of this recording were aborted. With other options, they end where their recorded tokens end."""
    run = read_run(read_recording(ROOT / "docs/book/recordings/long_prompt.jsonl"))
    found = compare(run, [{"max_num_batched_tokens": 64}])
    assert [one["figures"]["unknown_answers"] for one in found["runs"]] == [4, 4]
    assert found["recorded"]["unknown_answers"] == 4
