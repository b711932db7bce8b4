"""Every demonstration and calculator has `--help`, and takes the options that its docstring and the pages name."""

import argparse
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_OPTIONS = {"labs.demos.padding"}  # takes no options yet
PROGRAMS = [
    f"labs.{folder}.{path.stem}"
    for folder in ("demos", "calculators")
    for path in sorted((ROOT / "labs" / folder).glob("*.py"))
    if "def main(" in path.read_text(encoding="utf-8")
]
COMMAND = re.compile(
    r"(?<!cog output\(\")(?<!cog sample\(\")python -m (labs\.(?:demos|calculators)\.[a-z]\w*)([^`\n#|>&)]*)"
)


class ParsedError(Exception):
    """Raised instead of running a program whose arguments are right."""


def named_commands():
    """Return (module, arguments) of each command that docstrings and pages show to be typed."""
    pages = [*(ROOT / "labs").rglob("*.py"), *(ROOT / "labs").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = {match.groups() for page in pages for match in COMMAND.finditer(page.read_text(encoding="utf-8"))}
    return sorted({(module, text.strip()) for module, text in found})


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NO_OPTIONS])
def test_help_lists_the_options_and_what_is_not_one_is_refused(name, monkeypatch, capsys):
    module = import_module(name)
    for arguments, status in ((["--help"], 0), (["--no-such-option"], 2)):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as end:
            module.main()
        assert end.value.code == status
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: ")
    assert "--no-such-option" in printed.err


def test_the_commands_of_docstrings_and_pages_are_accepted(monkeypatch, capsys):
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, *arguments):
        parse_args(self, *arguments)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    commands = named_commands()
    assert {module for module, _ in commands} == {*PROGRAMS}
    for name, text in [one for one in commands if one[0] not in NO_OPTIONS]:
        monkeypatch.setattr(sys, "argv", [name, *shlex.split(text)])
        try:
            import_module(name).main()
        except ParsedError:
            continue
        except SystemExit:
            pytest.fail(f"python -m {name} {text}: {capsys.readouterr().err}")
        pytest.fail(f"{name} does not read its arguments")
