"""The ledger of optimisations: each entry has all of its lines, commands that exist, and results that are committed."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEDGER = (ROOT / "docs" / "optimisations.md").read_text(encoding="utf-8")
LINES = ["invariant", "hypothesis", "loses", "fallback", "trap", "measure", "measured"]
ENTRIES = re.findall(r"^### (.+)\n\n\| \| \|\n\|---\|---\|\n((?:\|.*\n)+)", LEDGER, re.MULTILINE)


@pytest.mark.parametrize(("name", "table"), ENTRIES, ids=[name for name, _ in ENTRIES])
def test_an_entry_has_all_lines_commands_that_exist_and_files_that_are_there(name, table):
    rows = dict(re.findall(r"^\| (\w+) \| (.+) \|$", table, re.MULTILINE))
    assert list(rows) == LINES
    modules = re.findall(r"python -m ([\w.]+)", rows["measure"])
    assert modules or "python bench.py" in rows["measure"]
    for module in modules:
        assert importlib.util.find_spec(module), module
    files = re.findall(r"`([\w-]+\.json)`", table)
    assert files or re.search(r"no file|[Nn]ot measured|counts|chapter", rows["measured"])
    for file in files:
        json.loads((ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8"))


def test_every_heading_is_an_entry():
    assert len(ENTRIES) == LEDGER.count("\n### ") > 10
