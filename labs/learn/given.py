"""What the exercises give: the programs of the ladder in `labs/`, whose parts are to be written."""

import ast
from pathlib import Path
from typing import Any

from labs.learn.exercise import find_functions


def slot_of(seq: Any, position: int, block_size: int) -> int:
    """Return the slot of a sequence's token: its address in the cache, by way of the block table."""
    return seq.block_table[position // block_size] * block_size + position % block_size


def read_program(name: str) -> str:
    """Return the source of a program of the ladder: `one_file`."""
    return (Path(__file__).parents[1] / f"{name}.py").read_text(encoding="utf-8")


def subclass_of(program: str, base: str, name: str, methods: tuple[str, ...], names: tuple[str, ...]) -> str:
    """Return an answer: a class `name`, derived from `base` of a program, with the program's own methods.

    names: what the methods use of the program besides `base`
    """
    source = read_program(program)
    found = dict(find_functions(source))
    imported = ", ".join(sorted({base, *names}))
    lines = [f"from labs.{program} import {imported}", "", ""]
    lines.append(f"class {name}({base}):")
    for i, method in enumerate(methods):
        text = ast.get_source_segment(source, found[f"{base}.{method}"], padded=True)
        assert text is not None
        lines += [""] * (i > 0) + [text]
    return "\n".join(lines) + "\n"
