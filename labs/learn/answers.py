"""Load an answer from its source, and observe its run: exceptions are observations too."""

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from labs.learn.seen import Seen
from labs.learn.texts import Text

if TYPE_CHECKING:
    from labs.learn.exercise import Build

EXITED = Text("The code ended the program (`exit`).", "代码结束了程序（`exit`）。")
OUT_OF_MEMORY = Text("The code ran out of memory.", "代码耗尽了内存。")


class Raised(str):
    """The observed value of a run that an exception has ended: the exception's type."""

    def __repr__(self) -> str:
        return f"raised {self}"


class Stopped(BaseException):
    """The checker ends the learner's code. `except Exception` does not catch it."""

    def __init__(self, why: Text) -> None:
        super().__init__(why.en)
        self.why = why


def load(source: str, file: str) -> ModuleType:
    """Run `source` as a module. `file` is the name that tracebacks give."""
    module = ModuleType("answer_" + "".join(c if c.isalnum() else "_" for c in Path(file).stem))
    module.__file__ = file
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source, file, "exec"), module.__dict__)
    return module


def observe(exercise: "Build", answer: ModuleType, case: Any) -> Iterator[Seen]:
    """Yield what can be seen of an answer. An exception gives a last observation, with the line that raised it."""
    run = exercise.run(answer, case)
    while True:
        try:
            seen = next(run)
        except StopIteration:
            return
        except (SystemExit, KeyboardInterrupt) as error:
            raise Stopped(EXITED) from error
        except MemoryError as error:
            raise Stopped(OUT_OF_MEMORY) from error
        except Exception as raised:
            # Python turns a StopIteration that leaves a generator into a RuntimeError
            found = raised.__cause__ if isinstance(raised.__cause__, StopIteration) else raised
            where = find_line(found, answer.__file__ or "")
            yield Seen(where, Raised(type(found).__name__), describe_error(found))
            return
        yield seen


def find_line(error: BaseException, file: str) -> Text:
    """Return the last line of the learner's file that an exception came through, in words."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not frames:
        return Text("an exception", "异常")
    number, line = frames[-1].lineno, frames[-1].line
    en, zh = (f": `{line}`", f"：`{line}`") if line else ("", "")
    return Text(f"in line {number}{en}", f"第 {number} 行{zh}")


def describe_error(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()
