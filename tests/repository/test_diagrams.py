"""Drawings of text fit the site's column and a phone held sideways: no line is wider than 76 columns."""

import re
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("**/*.md"), *(ROOT / "labs").glob("*.md")])
WIDTH = 76
INSERTED = re.compile(r"\[\[\[cog .*?\]\]\] -->.*?<!-- \[\[\[end\]\]\] -->", re.DOTALL)  # outputs of commands
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def width_of(line):
    """Columns of a line: a Chinese character takes two."""
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in line)


def wide_lines(text):
    """Lines of drawings that are too wide. A block that begins with `$`, or has one line, is an output."""
    blocks = [block for language, block in BLOCK.findall(INSERTED.sub("", text)) if language in ("", "text")]
    lines = [
        line for block in blocks if not block.startswith("$ ") for line in block.splitlines() if "\n" in block[:-1]
    ]
    return [line for line in lines if width_of(line) > WIDTH]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_drawings_are_narrow(page):
    assert wide_lines(page.read_text(encoding="utf-8")) == []


def test_a_wide_drawing_is_found():
    wide = "块" * 38 + "│"
    page = f"```python\n{'x' * 90}\n```\n\n```text\n┌\n{wide}\n```\n\n```\n{'─' * 76}\n└\n```\n"
    assert wide_lines(page) == [wide]
