"""What the page's worker runs, without a browser: only the bundled files, with a plain XXH3 in place of xxhash."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from nanovllm import scheduler
from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.what_if.browser.answer import reply
from nanovllm_extras.what_if.browser.bundle import make_bundle
from nanovllm_extras.what_if.browser.xxh3 import xxh3_64_intdigest
from nanovllm_extras.what_if.comparison import compare
from nanovllm_extras.what_if.recorded_run import read_run

ROOT = Path(__file__).resolve().parents[3]
RECORDING = ROOT / "docs" / "book" / "recordings" / "preemption.jsonl"
SEEDS = (0, 1, 2**64 - 1, 2**255 + 7)  # the last one is the root of requests with a salt: its lowest bits count
REQUEST = {"prompt": 40, "answer": 8, "arrival": 0, "n": 1, "shared": 32}
PROGRAM = """
import sys, types
folder = sys.argv[1]
sys.path[:] = [folder, *[path for path in sys.path if "site-packages" not in path]]
for name in ("nanovllm", "nanovllm_extras"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [f"{folder}/{name}"]
from nanovllm_extras.what_if.browser.answer import reply
print(reply(sys.stdin.read()))
"""


def ask(**request):
    return json.loads(reply(json.dumps({"recording": RECORDING.read_text(encoding="utf-8"), "options": {}, **request})))


def test_every_length_and_random_seeds_give_the_hash_of_the_library():
    generator = random.Random(0)
    lengths = [*range(600), *(1024 * i + d for i in (1, 2, 4, 5) for d in (-1, 0, 1, 63, 64, 65))]
    for length in lengths:
        data = generator.randbytes(length)
        for seed in (*SEEDS, generator.getrandbits(64)):
            assert xxh3_64_intdigest(data, seed=seed) == xxhash.xxh3_64_intdigest(data, seed=seed), (length, seed)


def test_bundled_files_answer_by_themselves(tmp_path):
    """In a process that has the standard library only."""
    bundle = make_bundle()
    assert {f"{Path(path).parent}/__init__.py" for path in bundle if path.count("/") > 1} <= bundle.keys()
    for path, text in bundle.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    changes = {"block_size": 2}
    request = json.dumps({"recording": RECORDING.read_text(encoding="utf-8"), "options": changes})
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, input=request, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).get("figures") == compare(read_run(read_recording(RECORDING)), [changes])


def test_edited_schedule_decides_and_leaves_the_cores_module_as_it_was():
    one_at_a_time = "def schedule(self):\n    self.max_num_seqs = 1\n    return super().schedule()\n"
    before = {**vars(scheduler)}
    edited = ask(schedule=one_at_a_time)["figures"]
    assert vars(scheduler) == before
    assert edited["parts"] == {"scheduler_cls": "EditedScheduler"}
    assert edited["runs"][1]["figures"] == ask(options={"max_num_seqs": 1})["figures"]["runs"][1]["figures"]
    assert edited["runs"][0]["figures"]["steps"] < edited["runs"][1]["figures"]["steps"]


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        (
            "    def schedule(self):\n        return self.nothing\n",
            2,
            "AttributeError: 'EditedScheduler' object",
        ),
        ("def schedule(self:\n", 1, "SyntaxError"),
        ("def schedule(self):\n  x = 1\n return x\n", 3, "IndentationError"),
        ("@missing\ndef schedule(self):\n    pass\n", 1, "NameError: name 'missing' is not defined"),
        ("def schedule(self):\n    raise ValueError('no')\n", 2, "ValueError: no"),
        ("def schedule(self):\n    self.block_manager.free(None)\n", 2, "in block_manager.py, line "),
        ("def schedule(self):\n    return None\n", None, "schedule must return a Step, got None"),
        ("def schedule(self):\n    return Step()\n", None, "computes nothing, although"),
    ],
)
def test_error_of_an_edited_schedule_names_its_line(source, line, message):
    answer = ask(schedule=source)
    assert (message in answer["error"], answer["line"]) == (True, line), answer


def test_own_requests_share_the_prefix_and_arrive_in_order():
    rows = [{**REQUEST, "arrival": 0.5, "n": 2}, REQUEST, {**REQUEST, "shared": 0, "arrival": 0.5}]
    recording = json.loads(reply(json.dumps({"requests": rows})))["recording"]
    run = read_run([json.loads(line) for line in recording.splitlines()])
    assert [(one.request_id, one.arrival_s, len(one.answers)) for one in run.requests] == [
        ("r2", 0.0, 1),
        ("r1", 0.5, 2),
        ("r3", 0.5, 1),
    ]
    first, second, third = (set(one.prompt) for one in run.requests)
    assert (len(first & second), len((first | second) & third)) == (32, 0)
    found = json.loads(reply(json.dumps({"recording": recording, "options": {"enable_prefix_caching": False}})))
    own, without = (one["figures"] for one in found["figures"]["runs"])
    assert (own["scheduled_tokens"] - without["scheduled_tokens"], without["hit_rate"]) == (-32, 0)
    assert found["figures"]["clock"]["kind"] == "machine"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "requests must be a list of 1 to 200 requests"),
        ([REQUEST, {**REQUEST, "prompt": 0}], "request 2: prompt must be an integer >= 1"),
        ([{**REQUEST, "shared": 41}], "request 1: shared must be an integer >= 0 and <= 40"),
        ([{**REQUEST, "arrival": None}], "request 1: arrival must be a finite number"),
        ([{**REQUEST, "m": 1}], "request 1 must have the fields prompt, answer, arrival, n, shared"),
        ([{**REQUEST, "answer": 300}] * 200, "the requests have 68000 tokens; at most 50000"),
    ],
)
def test_bad_requests_are_refused_by_name(rows, message):
    assert message in json.loads(reply(json.dumps({"requests": rows})))["error"]
