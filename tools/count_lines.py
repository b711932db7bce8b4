"""Count the files of the two packages, and their lines of code: without docstrings, comments and blank lines.

    python -m tools.count_lines            # the core, by file, and the totals of both packages
    python -m tools.count_lines --all      # every file of the extras too

The program parses the source with `ast` and `tokenize`, and imports none of it. A docstring is any string that is a
statement by itself, such as the one that describes a field.
"""

import argparse
import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("nanovllm", "nanovllm_extras")
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def count_code(text: str) -> int:
    """Return the number of lines that hold code.

    >>> count_code('"A docstring."\\n\\nx = 1  # counts\\n# does not count\\n')
    1
    """
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for token in tokens if token.type not in NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(code - docstrings)


def count_package(folder: Path) -> dict[str, int]:
    """Return the lines of code of each Python file below `folder`, by its path there."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    return {name: count_code(path.read_text(encoding="utf-8")) for name, path in files.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="list every file of the extras too")
    shows_all = parser.parse_args().all
    for package in PACKAGES:
        lines = count_package(ROOT / package)
        if shows_all or package == PACKAGES[0]:
            for name, number in sorted(lines.items(), key=lambda one: -one[1]):
                print(f"{number:8,}  {package}/{name}")
        print(f"{sum(lines.values()):8,}  {package}: {len(lines)} files, the longest {max(lines.values())}")


if __name__ == "__main__":
    main()
