"""What an exercise is: a file with functions to write, a right answer, and the mistakes that people make.

solution  a right answer, as source text      →  starter: the same with `raise NotImplementedError` in the holes
run       answer, case  →  what can be seen   →  compared with the right answer, step by step
mistakes  the solution with a few words replaced, and an explanation: if the learner's answer behaves like one of
          them in all cases, the checker gives that explanation
"""

import ast
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hypothesis.strategies import SearchStrategy

from labs.learn.checker import check_answer
from labs.learn.chinese_contracts import translate
from labs.learn.findings import Report
from labs.learn.given_names import list_names
from labs.learn.seen import Mistake, Seen
from labs.learn.texts import Language, Text

CHECKOUT = Path(__file__).resolve().parents[2]
FIND_LABS = f"import site\n\nsite.addsitedir({str(CHECKOUT)!r})  # finds labs\n\n"
"""What lets a learner's file be run by itself, from any folder."""
NOT_WRITTEN = "raise NotImplementedError  # write this function"


@dataclass(frozen=True)
class Exercise(ABC):
    """What all kinds of exercise have."""

    name: str
    """Of the exercise, and of the learner's file: `grow_table`."""
    chapter: str
    """The page of the book: `05_blocks_and_tables`."""
    title: Text
    task: Text
    hints: tuple[Text, Text, Text]
    """Each says more than the one before."""

    @property
    @abstractmethod
    def solution(self) -> str:
        """Return a right answer as source text."""

    @abstractmethod
    def make_starter(self, language: Language) -> str:
        """Return the learner's file as it is at the start."""

    def make_file(self, folder: Path, language: Language) -> str:
        """Return the learner's file as it is at the start in `folder`, which may have answers to other exercises."""
        return self.make_starter(language)

    @abstractmethod
    def check(self, file: Path, language: Language) -> Report:
        """Check an answer. It runs in a process of its own."""


@dataclass(frozen=True)
class Build(Exercise):
    """Write one or a few functions. `run` observes them in a case; cases come from `examples` and `cases`."""

    answer: str
    """The solution as source text, without a module docstring."""
    holes: tuple[str, ...]
    """Functions to write: `grow`, or `Blocks.grow` for a method. Their docstrings stay."""
    run: Callable[[ModuleType, Any], Iterator[Seen]]
    """(answer as a module, case) -> observations. An exception that ends the run is an observation too."""
    examples: tuple[Any, ...]
    """Cases that are tried first. Together they show each of the mistakes."""
    cases: Callable[[], SearchStrategy[Any]]
    """Random cases, which Hypothesis makes smaller when an answer fails."""
    mistakes: tuple[Mistake, ...]
    describe: Callable[[Any], Text]
    """The case in words: "3 blocks of 4 tokens; A has 5 tokens and grows by 4"."""
    is_same: Callable[[Any, Any], bool] = operator.eq
    """Whether two observed values are equal, for example up to rounding."""
    engine_parts: tuple[tuple[str, str], ...] = ()
    """(function of the answer, method of `labs/one_file.py` that it replaces in `whole_engine`)."""
    names: tuple[str, ...] = ()
    """What the answer can use of the program that it continues: names of `given_names.MEANINGS`."""
    draw: Callable[[Any, Seen | None, Seen | None], list[tuple[Text, str]]] | None = None
    """(case, right, yours) at the first difference -> more drawings: (title, lines). None where a run has ended."""

    @property
    def solution(self) -> str:
        return self.answer

    def make_starter(self, language: Language) -> str:
        return make_header(self, language) + translate(dig_holes(self.answer, self.holes), language)

    def check(self, file: Path, language: Language) -> Report:
        return check_answer(self, file, language)


def make_header(exercise: Exercise, language: Language) -> str:
    """Return what a learner's file begins with: a docstring with the task and how to check the answer.

    If the answer continues a program of `labs/`, two lines below the docstring let Python find it.
    """
    check = Text("Check it with", "检查：").show(language)
    lines = [
        exercise.title.show(language),
        "",
        exercise.task.show(language).strip(),
        "",
        *show_names(exercise, language),
        Text("Chapter:", "章节：").show(language)
        + f" docs/book/{'zh/' if language == 'zh' else ''}{exercise.chapter}.md",
        f"{check} nanovllm learn check {exercise.name}",
    ]
    text = "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    find_labs = translate(FIND_LABS, language) if "from labs." in exercise.solution else ""
    return f'"""{text}\n"""\n\n{find_labs}'


def show_names(exercise: Exercise, language: Language) -> list[str]:
    """Return lines of the header that say what the answer can use."""
    if not isinstance(exercise, Build) or not exercise.names:
        return []
    return [Text("You can use:", "可以使用：").show(language), *list_names(exercise.names, language), ""]


def dig_holes(source: str, holes: tuple[str, ...]) -> str:
    """Return `source` with the bodies of the functions `holes` replaced. Their docstrings stay."""
    lines = source.strip("\n").split("\n")
    found = dict(find_functions(source.strip("\n")))
    if missing := [name for name in holes if name not in found]:
        raise ValueError(f"the solution has no function {missing[0]!r}; it has {', '.join(found)}")
    for name in sorted(holes, key=lambda name: -found[name].lineno):  # the last one first: line numbers stay right
        body = found[name].body
        keeps_docstring = ast.get_docstring(found[name]) is not None
        first = body[1] if keeps_docstring and len(body) > 1 else body[0]
        indent = " " * first.col_offset
        lines[first.lineno - 1 : body[-1].end_lineno] = [indent + NOT_WRITTEN]
    return "\n".join(lines) + "\n"


def find_functions(source: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield (name, function) of the functions of a module and the methods of its classes: `f`, `C.f`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for one in node.body:
                if isinstance(one, ast.FunctionDef):
                    yield f"{node.name}.{one.name}", one
