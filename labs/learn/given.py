"""What the exercises give: the programs of the ladder in `labs/`, whose parts are to be written.

In a checkout `labs/` is beside the package; an installed package has a copy in `programs/`. Importing this module lets
Python find it, so that a learner's file can be run by itself too:

    import nanovllm_extras.learn.given
    from labs.one_file import BlockManager, Sequence
"""

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from nanovllm import TINY_QWEN3
from nanovllm_extras.learn.exercise import find_functions

ROOTS = (Path(__file__).parents[2], Path(__file__).parent / "programs")
ROOT = next((root for root in ROOTS if (root / "labs" / "one_file.py").exists()), ROOTS[0])
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

model: Any = import_module("labs.model")
model.TINY_QWEN3 = TINY_QWEN3  # a copy of labs/ in an installed package is not beside it
one_file: Any = import_module("labs.one_file")
mixed_batches: Any = import_module("labs.mixed_batches")


def slot_of(seq: Any, position: int, block_size: int) -> int:
    """Return the slot of a sequence's token: its address in the cache, by way of the block table."""
    return seq.block_table[position // block_size] * block_size + position % block_size


def read_program(name: str) -> str:
    """Return the source of a program of the ladder: `one_file`."""
    return (ROOT / "labs" / f"{name}.py").read_text(encoding="utf-8")


def subclass_of(program: str, base: str, name: str, methods: tuple[str, ...], names: tuple[str, ...]) -> str:
    """Return an answer: a class `name`, derived from `base` of a program, with the program's own methods.

    names: what the methods use of the program besides `base`
    """
    source = read_program(program)
    found = dict(find_functions(source))
    imported = ", ".join(sorted({base, *names}))
    lines = ["import nanovllm_extras.learn.given  # finds labs", f"from labs.{program} import {imported}", "", ""]
    lines.append(f"class {name}({base}):")
    for i, method in enumerate(methods):
        text = ast.get_source_segment(source, found[f"{base}.{method}"], padded=True)
        assert text is not None
        lines += [""] * (i > 0) + [text]
    return "\n".join(lines) + "\n"
