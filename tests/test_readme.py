"""README says what is so: its commands are CI's, its code runs, its links lead somewhere, and its map counts the files'
real lines. And so do the documents that it leads to.
"""

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


def map_rows():
    """| [`file`](path) | lines | question |"""
    return re.findall(r"^\| \[`[^`]+`\]\(([^)]+)\) \| (\d+) \|", README, re.MULTILINE)


def test_the_map_holds_the_whole_core():
    core = [*ROOT.glob("nanovllm/*.py"), *ROOT.glob("nanovllm/layers/*.py"), *ROOT.glob("nanovllm/models/*.py")]
    names = {str(path.relative_to(ROOT)) for path in core if path.stat().st_size}
    assert {path for path, _ in map_rows()} == names


@pytest.mark.parametrize(("path", "lines"), map_rows())
def test_the_map_counts_lines(path, lines):
    assert int(lines) == len((ROOT / path).read_text(encoding="utf-8").splitlines())
