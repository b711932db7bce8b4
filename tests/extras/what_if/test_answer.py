"""A page's question gets the figures of the shell, and a run that the page can show; a bad one gets the reason."""

import json
import re
from pathlib import Path

import pytest

from nanovllm_extras.trace.check import check_recording
from nanovllm_extras.what_if.answer import answer
from nanovllm_extras.what_if.command import main
from nanovllm_extras.what_if.recorded_run import read_run
from nanovllm_extras.what_if.recording_file import read
from nanovllm_extras.what_if.run import replay

RECORDINGS = Path(__file__).resolve().parents[3] / "docs" / "book" / "recordings"
FRAGMENTATION, PREEMPTION = RECORDINGS / "fragmentation.jsonl", RECORDINGS / "preemption.jsonl"


@pytest.fixture(scope="module")
def recorded():
    return read(FRAGMENTATION)


@pytest.mark.parametrize(
    ("path", "options", "arguments"),
    [
        (FRAGMENTATION, {"block_size": 32}, ["--block-size", "32"]),
        (FRAGMENTATION, {"num_blocks": 60, "enable_prefix_caching": True}, ["--num-blocks", "60", "--prefix-caching",
                                                                            "on"]),
        (PREEMPTION, {"max_num_seqs": 1, "max_num_batched_tokens": 5}, ["--max-num-seqs", "1",
                                                                        "--max-num-batched-tokens", "5"]),
        (PREEMPTION, {}, []),
    ],
)  # fmt: skip
def test_an_answer_has_the_figures_of_the_shell_and_the_run_itself(path, options, arguments, capsys):
    found = answer(*read(path), {"options": options})
    assert main([str(path), *arguments, "--json"]) == 0
    assert found["figures"] == json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in found["recording"].splitlines()]
    check_recording(path, lines)  # the page can show it
    shown = replay(read_run(lines)).figures.describe(has_times=False)  # the core makes these steps again
    expected = found["figures"]["runs"][-1]["figures"]
    times = [name for name in expected if name.endswith("_s")]
    assert shown == {**expected, **dict.fromkeys(times)}
    assert lines[0]["config"]["has_times"] == found["figures"]["clock"]["is_good"] == (path == FRAGMENTATION)
    assert all(("times" in line) == (path == FRAGMENTATION) for line in lines[1:-1])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ([], "must be an object"),
        ({}, 'with the field "options"'),
        ({"options": [1]}, 'with the field "options"'),
        ({"options": {}, "extension": "own.py"}, "options only, got 'extension'"),
        ({"options": {"scheduler_cls": "os.system"}}, "options can be block_size, num_blocks, .* got 'scheduler_cls'"),
        ({"options": {"max_model_len": 8}}, "got 'max_model_len'"),
        ({"options": {"block_size": 0}}, "block_size must be an integer >= 1, got 0"),
        ({"options": {"block_size": 1000}}, "larger than the pool, which has 512 tokens"),
        ({"options": {"num_blocks": 10**12}}, "num_blocks must be an integer >= 1 and <= 10000000, got 1000000000000"),
        ({"options": {"max_num_seqs": 2.5}}, "max_num_seqs must be an integer >= 1, got 2.5"),
        ({"options": {"max_num_batched_tokens": "9"}}, "max_num_batched_tokens must be an integer >= 1, got '9'"),
        ({"options": {"enable_prefix_caching": 1}}, "enable_prefix_caching must be"),
    ],
)
def test_a_question_that_is_not_valid_gets_the_reason(recorded, request_, message):
    found = answer(*recorded, request_)
    assert list(found) == ["error"]
    assert re.search(message, found["error"])


def test_a_run_that_takes_too_long_is_stopped(recorded):
    assert "stopped in step 1: it took too long" in answer(*recorded, {"options": {"num_blocks": 60}}, 0.0)["error"]
