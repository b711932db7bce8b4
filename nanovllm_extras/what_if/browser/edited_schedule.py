"""A scheduler whose method `schedule` is a text that one edits in the page, and where an error in it is."""

import ast
import textwrap
import traceback
from types import TracebackType

from nanovllm import scheduler
from nanovllm.scheduler import Scheduler

FILE = "schedule"
"""The name of the text in tracebacks."""
HEADER = "class EditedScheduler(Scheduler):\n"


class EditError(ValueError):
    """The text is not a method `schedule`. `line` is where, from 1, if one line is to blame."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


def make_scheduler(source: str) -> type[Scheduler]:
    """Return the core's scheduler with the methods of `source`, one of which is `schedule`.

    The text sees the names of nanovllm/scheduler.py, whose own classes it cannot change.

    Raises EditError if it is not Python, or has no `schedule`.
    """
    text = textwrap.dedent(source)
    try:
        tree = ast.parse(HEADER + textwrap.indent(text, "    "), FILE)
    except SyntaxError as error:
        raise EditError(f"{type(error).__name__}: {error.msg}", (error.lineno or 2) - 1) from None
    ast.increment_lineno(tree, -1)  # the first line is `HEADER`
    names = dict(vars(scheduler))
    try:
        exec(compile(tree, FILE, "exec"), names)
    except Exception as error:
        raise EditError(describe_error(error), line_of(error.__traceback__)) from None
    made: type[Scheduler] = names["EditedScheduler"]
    if "schedule" not in vars(made):
        raise EditError("the text must define the method schedule(self), which returns a Step", None)
    return made


def line_of(trace: TracebackType | None) -> int | None:
    """Return the line of the text that was called last, None if none was."""
    lines = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == FILE]
    return lines[-1] if lines else None


def describe_error(error: BaseException) -> str:
    """Return the kind of an error, its message, and where it was raised: "KeyError: 3 (block_manager.py, line 71)"."""
    frames = traceback.extract_tb(error.__traceback__)
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not frames or frames[-1].filename == FILE:
        return words
    last = frames[-1]
    name = last.filename.rpartition("/")[2]
    asserted = f" ({last.line})" if isinstance(error, AssertionError) and not str(error) else ""
    return f"{words}{asserted} in {name}, line {last.lineno}"
