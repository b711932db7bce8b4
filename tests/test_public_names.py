"""`from nanovllm import …` without extras: the package exports the core's own classes.

Oracle: a copy of the package alone, imported in a process of its own. `tests/extras/test_exported_names.py`
has the names that extras add.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm
from nanovllm.__main__ import main

PACKAGE = Path(nanovllm.__file__).parent
EXPORTED = {
    "LLM": "llm",
    "CompletionOutput": "request",
    "Config": "config",
    "LLMEngine": "engine",
    "RequestOutput": "request",
    "SamplingParams": "sampling_params",
}
"""Name -> module that has it."""

WITHOUT_EXTRAS = """
import json
import sys
# an editable install would find the files that this copy lacks
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
import nanovllm

def error_of(ask):
    try:
        ask()
    except Exception as error:
        return [type(error).__name__, str(error)]

def import_name():
    from nanovllm import EngineArgs

values = [value for name, value in vars(nanovllm).items() if isinstance(value, type) and name != "Path"]
print(json.dumps({
    "exported": {value.__name__: value.__module__ for value in values},
    "model": nanovllm.TINY_QWEN3.name,
    "an unknown name": error_of(lambda: nanovllm.NoSuchName),
    "a name of extras": error_of(import_name),
    "an option of extras": error_of(lambda: nanovllm.Config("a-model", tensor_parallel_size=2)),
    "a request's option of extras": error_of(lambda: nanovllm.SamplingParams(min_tokens=1)),
    "a wrong value": error_of(lambda: nanovllm.Config("a-model", max_num_seqs=0)),
    "loaded": [name for name in sys.modules if name.startswith("nanovllm_extras")],
}))
"""


def test_without_extras_the_cores_own_classes_are_exported(tmp_path):
    ignored = shutil.ignore_patterns("extras", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "nanovllm", ignore=ignored)
    run = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["exported"] == {name: f"nanovllm.{module}" for name, module in EXPORTED.items()}
    assert (found["model"], found["loaded"]) == ("tiny-qwen3", [])
    assert found["an unknown name"] == ["AttributeError", "module 'nanovllm' has no attribute 'NoSuchName'"]
    kind, says = found["a name of extras"]
    assert kind == "ImportError"
    assert says.startswith("cannot import name 'EngineArgs' from 'nanovllm'")
    kind, says = found["an option of extras"]
    assert (kind, "tensor_parallel_size" in says) == ("TypeError", True)
    kind, says = found["a request's option of extras"]
    assert (kind, "min_tokens" in says) == ("TypeError", True)
    assert found["a wrong value"] == ["ValueError", "max_num_seqs must be an integer >= 1, got 0"]


def test_the_command_asks_the_bundled_model(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nanovllm", "What is 27 + 58?"])
    assert main() == 0
    assert capsys.readouterr().out == "27 + 58 = 85.\n"


def test_a_command_of_the_other_package_is_named(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nanovllm", "serve"])
    with pytest.raises(SystemExit):
        main()
    assert "got 'serve'" in (says := capsys.readouterr().err)
    assert "python -m nanovllm_extras" in says
