"""README says what is so: its commands are CI's, its code runs, its links lead somewhere, its map names every file and
counts the lines of the heart, which stays small. And so do the documents that it leads to.
"""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from nanovllm import Config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

RUN_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/python example.py"
TEST_COMMAND = 'python3 -m venv .venv && .venv/bin/pip install -e ".[test]" && .venv/bin/pytest'


def test_readme_leads_with_exactly_two_commands():
    first_block = re.search(r"```(?:bash|sh)\n(.*?)```", README, re.DOTALL)
    assert first_block is not None
    assert first_block.group(1).splitlines() == [RUN_COMMAND, TEST_COMMAND]


def test_ci_runs_readme_test_command_word_for_word():
    assert TEST_COMMAND in CI.splitlines()


def test_the_code_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    exec("\n".join(blocks), {})
    printed = capsys.readouterr().out
    assert "EngineStats(" in printed
    assert "attention_backend=" in printed
    steps = re.findall(r"(\d+) tokens of prompts, (\d+) decodes: (.*)", printed)
    assert any(prefill != "0" != decodes for prefill, decodes, _ in steps), "a prompt is prefilled beside a decode"
    assert any("A block table is" in texts and "Paged attention stores" in texts for _, _, texts in steps)


@pytest.mark.parametrize("path", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))])
def test_links_lead_to_files(path):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / path).read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith("http")]
    assert len(local) > (15 if path == "README.md" else 0)
    assert [target for target in local if not (ROOT / path).parent.joinpath(target).exists()] == []


def test_all_options_are_compared():
    options = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([^`]+)` \|", options, re.MULTILINE)
    assert named == [field.name for field in dataclasses.fields(Config)]


# ---- the map, and the size of the heart

HEART = {  # in reading order; the most lines that each may have, docstrings included
    "engine/engine.py": 250,
    "scheduling/sequence.py": 175,
    "scheduling/step.py": 75,
    "scheduling/scheduler.py": 185,
    "scheduling/block_manager.py": 185,
    "execution/batch.py": 120,
    "models/qwen3.py": 130,
    "layers/attention.py": 140,
    "execution/model_runner.py": 110,
    "execution/sampler.py": 170,
    "execution/kv_cache.py": 85,
}
MAX_HEART_LINES = 1650
MAX_FUNCTION_LINES = 40

MAP = README[README.index("## The map") : README.index("## How it is tested")]
COUNTED = re.findall(r"^\| \[`([^`]+)`\]\(nanovllm/\1\) \| (\d+) \|", MAP, re.MULTILINE)  # | [`file`](path) | lines | …
NAMED = re.findall(r"^\| \[`[^`]+`\]\(nanovllm/([^)]+\.py)\) \|", MAP, re.MULTILINE)


def num_lines(file):
    return len((ROOT / "nanovllm" / file).read_text(encoding="utf-8").splitlines())


def test_the_map_names_every_file_once():
    files = {path.relative_to(ROOT / "nanovllm") for path in ROOT.glob("nanovllm/**/*.py")}
    wanted = {str(file) for file in files if file.name != "__init__.py" and file.parts[0] != "kernels"}
    assert sorted(NAMED) == sorted(wanted)


def test_the_map_begins_with_the_heart():
    assert [file for file, _ in COUNTED] == list(HEART)


@pytest.mark.parametrize(("file", "lines"), COUNTED)
def test_the_map_counts_lines(file, lines):
    assert int(lines) == num_lines(file)


@pytest.mark.parametrize("file", HEART)
def test_the_heart_stays_small(file):
    assert num_lines(file) <= HEART[file]
    tree = ast.parse((ROOT / "nanovllm" / file).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {function.name: function.end_lineno - function.lineno + 1 for function in functions}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_the_whole_heart_stays_small():
    assert sum(map(num_lines, HEART)) <= MAX_HEART_LINES
