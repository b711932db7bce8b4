"""The simulation runs where there is no torch and no NumPy, as in a browser, and answers the same."""

import json
import subprocess
import sys
from pathlib import Path

from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.what_if.comparison import compare
from nanovllm_extras.what_if.recorded_run import read_run

ROOT = Path(__file__).resolve().parents[3]
RECORDING = ROOT / "docs" / "book" / "recordings" / "fragmentation.jsonl"
CHANGES = [{"block_size": 8}, {"num_blocks": 60}]
PROGRAM = """
import json, sys, types

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "transformers"):
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Refuse())
root, recording, changes = sys.argv[1:]
for name in ("nanovllm", "nanovllm_extras"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [f"{root}/{name}"]

from nanovllm_extras.what_if.comparison import compare
from nanovllm_extras.what_if.journal import Journal
from nanovllm_extras.what_if.recorded_run import read_run

lines = [json.loads(line) for line in open(recording, encoding="utf-8")]
print(json.dumps(compare(read_run(lines), json.loads(changes))))
"""


def test_a_process_without_torch_and_numpy_gives_the_same_figures():
    command = [sys.executable, "-c", PROGRAM, str(ROOT), str(RECORDING), json.dumps(CHANGES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == compare(read_run(read_recording(RECORDING)), CHANGES)
