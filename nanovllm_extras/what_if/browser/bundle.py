"""The Python files that the page's worker gets: those that the simulation imports, as they are in this repository."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]  # the folder of both packages
ENTRY = "nanovllm_extras.what_if.browser.answer"
STAND_IN = {"xxhash.py": "nanovllm_extras/what_if/browser/xxh3.py"}
"""A path in the browser -> the file here. The library is compiled, and the page works without its wheel."""
EMPTY = ("nanovllm", "nanovllm_extras")
"""Packages whose own `__init__` would import torch. The worker makes empty ones."""


def make_bundle() -> dict[str, str]:
    """Return the text of each file, by its path."""
    paths = {path: path for path in sorted(find_files(ENTRY, set()))} | STAND_IN
    return {name: (ROOT / path).read_text(encoding="utf-8") for name, path in paths.items()}


def find_files(module: str, seen: set[str]) -> Iterator[str]:
    """Yield the path of a module, of the packages around it, and of all modules that it imports."""
    package = module.rpartition(".")[0]
    if module in seen or module in EMPTY or module.partition(".")[0] not in EMPTY:
        return
    seen.add(module)
    yield from find_files(package, seen)
    place = ROOT / module.replace(".", "/")
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not path.exists():  # `module` is a name in `package`
        return
    yield path.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for one in node.names:
                yield from find_files(one.name, seen)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from find_files(node.module, seen)
            for one in node.names:
                yield from find_files(f"{node.module}.{one.name}", seen)
