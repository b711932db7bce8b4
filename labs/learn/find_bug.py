"""Find the bug: the learner's file is `labs/one_file.py` with a bug that a real engine had."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from labs.learn.exercise import Build, Mistake, Seen, make_header
from labs.learn.given import read_program
from labs.learn.near_repairs import NEAR_REPAIRS
from labs.learn.simulation import EXAMPLES, Parts, Request, Simulation, Traffic, describe_traffic, traffics
from labs.learn.texts import Language, Text

WITH_ANSWERS = (  # several answers to a prompt: forks, copies, and the last owner, who needs none
    Traffic(8, 4, 8, (Request((0, 1, 2, 1, 1, 1), 5, n=3),)),
    Traffic(7, 2, 8, (Request((0, 1, 2), 4, n=2), Request((0, 1, 2, 0), 3, arrival=2))),
    Traffic(9, 4, 16, (Request((1, 2, 0, 1, 1), 3, n=2), Request((2, 2, 1), 4, n=2))),
)
WHOLE_PROMPT = Traffic(9, 2, 16, (Request((0, 1, 2, 0), 3), Request((0, 1, 2, 0), 3, arrival=2)))
FREED_FIRST = Traffic(
    5, 2, 16, (Request((0, 1, 2, 0, 1), 2), Request((2, 2, 1), 2, arrival=3), Request((0, 1, 2, 0, 1), 2, arrival=6))
)
CHUNKED = Traffic(12, 2, 3, (Request((0, 1, 2, 0, 1, 2), 3), Request((0, 1, 2, 0, 1, 2), 3, arrival=4)))
PARTLY_FILLED = Traffic(6, 3, 8, (Request((0, 0), 6), Request((0, 0, 0, 0), 5), Request((0, 0, 1), 3)))
LARGE_IDS = tuple(  # alike in the last byte, in the last two bytes, above 255, and in their digits
    Traffic(9, 2, 16, (Request(first, 2), Request(second, 2, arrival=3)))
    for first, second in (
        ((1, 2, 3), (257, 2, 3)),
        ((1, 2, 3), (65537, 2, 3)),
        ((257, 2, 3), (258, 2, 3)),
        ((1, 12, 3), (11, 2, 3)),
    )
)
RESUMED = Traffic(5, 1, 9, (Request((0,), 3), Request((0, 0, 0), 2)))  # finds blocks, but does not fit at first
ONE_REQUEST = Traffic(1, 2, 9, (Request((0,), 1),))
ANSWERED_TWICE = Traffic(2, 2, 9, (Request((0,), 2, n=2), Request((0, 0), 2)))  # two requests make the same full block
EXAMPLES_OF_ENGINE = (
    *EXAMPLES,
    *WITH_ANSWERS,
    *LARGE_IDS,
    WHOLE_PROMPT,
    FREED_FIRST,
    CHUNKED,
    PARTLY_FILLED,
    RESUMED,
    ANSWERED_TWICE,
    ONE_REQUEST,
)
"""Planted runs of the whole engine, which together show all bugs."""


@dataclass(frozen=True)
class FindBug(Build):
    """The whole engine in one file, with a bug. The answer is right if each step is that of the original."""

    bug: tuple[tuple[str, str], ...] = ()
    """(old, new): what makes the bug."""

    def make_starter(self, language: Language) -> str:
        mistake = Mistake(self.title, self.task, self.bug)
        return make_header(self, language) + mistake.apply(self.answer)


def read_engine() -> str:
    """Return `labs/one_file.py` without its docstring."""
    source = read_program("one_file")
    docstring = ast.parse(source).body[0]
    return "\n".join(source.split("\n")[docstring.end_lineno :]).lstrip("\n")


ENGINE = read_engine()
"""The right engine, which all bugs are put into."""


def run(answer: ModuleType, case: Any) -> Iterator[Seen]:
    return Simulation(Parts(answer.Sequence, answer.BlockManager, answer.Scheduler), case).run()


def make_bug(name: str, about: str, title: Text, task: Text, hints: Any, bug: Any) -> FindBug:
    """Return the exercise for one bug. The check finds the smallest run in which a step is not as it should be.

    about: the page of the book that explains the code with the bug. The exercise is one of chapter 9 all the same,
    because its file shows solutions of the exercises up to there.

    `NEAR_REPAIRS` has what people often write to mend it, and what is still wrong then.
    """
    still = Text("The bug is still there", "bug 还在")
    why = Text(
        "This is the smallest run found in which a step differs from the right engine's.",
        "这是找到的最小的运行，其中有一步与正确的引擎不同。",
    )
    page = Text(f"The code with the bug belongs to docs/book/{about}.md.", f"出错的代码属于 docs/book/zh/{about}.md。")
    return FindBug(
        name=name,
        chapter="09_when_memory_is_full",
        title=title,
        task=Text(f"{task.en}\n{page.en}", f"{task.zh}\n{page.zh}"),
        hints=hints,
        answer=ENGINE,
        holes=(),
        run=run,
        examples=EXAMPLES_OF_ENGINE,
        cases=lambda: traffics(max_n=2),
        describe=describe_traffic,
        mistakes=(Mistake(still, why, bug), *NEAR_REPAIRS[name]),
        bug=bug,
    )
