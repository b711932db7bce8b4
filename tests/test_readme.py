"""README says what is so: its commands are CI's, its links lead somewhere, and its map counts the files' real lines."""

import re
from pathlib import Path

import pytest

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


def test_links_lead_to_files():
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    local = [target for target in targets if not target.startswith("http")]
    assert len(local) > 15
    assert [target for target in local if not (ROOT / target).exists()] == []


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
