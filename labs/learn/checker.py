"""Compare an answer with the right one: the first difference, the smallest run that shows it, and the mistake's name.

Final results do not suffice: many mistakes change no token, for example in the order in which blocks are freed. So each
run gives a list of observations, and the first that differs ends the comparison.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample

from labs.learn.answers import Raised, Stopped, load, observe
from labs.learn.differences import colon, draw_difference, mark_rows, shorten, show, unwrap
from labs.learn.findings import Drawing, Report
from labs.learn.limits import at_most, capture
from labs.learn.seen import Mistake, Seen, combine
from labs.learn.texts import Language, Text
from labs.learn.traffic import Traffic, drop_requests
from nanovllm_testing.interrupt import TimeIsOver

if TYPE_CHECKING:
    from labs.learn.exercise import Build

NUM_RANDOM = 150  # random cases
SEARCH_S = 1.2  # how long random cases are tried, in processor time like all limits: a busy machine tries as many
SEARCH_WALL_S = 10.0  # how long random cases are tried if the code waits
SHRINK_S = 0.4  # how long a failing case is made smaller
MISTAKE_S = 1.0  # how long one known mistake is tried
PAIRS_S = 0.5  # how long pairs of known mistakes are tried
PAIR_S = 0.2  # how long one pair is tried
NUM_COMPARED = 40  # cases in which an answer is compared with known mistakes
NUM_BEFORE = 8  # observations that are shown before the first difference


@dataclass(frozen=True)
class Difference:
    """The first observation that differs. `right` or `yours` is None if that run has ended."""

    index: int
    right: Seen | None
    yours: Seen | None


class Comparison:
    """Compares one answer with the right one, and remembers the results by case."""

    def __init__(self, exercise: "Build", answer: ModuleType, right: ModuleType | None = None) -> None:
        self.exercise = exercise
        self.answer = answer
        self.right = right or load(exercise.solution, "right answer")
        self.results: dict[str, tuple[Any, Difference | None]] = {}

    def with_answer(self, source: str) -> "Comparison":
        """Return a comparison of another answer with the same right one."""
        return Comparison(self.exercise, load(source, "known mistake"), self.right)

    def first_difference(self, case: Any) -> Difference | None:
        key = repr(case)
        if key not in self.results:
            with capture():
                self.results[key] = case, self._compare(case)
        return self.results[key][1]

    def printed(self, case: Any) -> str:
        """Return what the answer prints in a case, up to the first difference."""
        with capture() as printed:
            self._compare(case)
        return printed.getvalue()

    def _compare(self, case: Any) -> Difference | None:
        right, yours = observe(self.exercise, self.right, case), observe(self.exercise, self.answer, case)
        for index in range(10_000):
            a, b = next(right, None), next(yours, None)
            if a is not None and isinstance(a.value, Raised):
                raise RuntimeError(f"the right answer to {self.exercise.name} fails in {case!r}: {a.drawing}")
            if a is None and b is None:
                return None
            if a is None or b is None or not is_same(self.exercise, a, b):
                return Difference(index, a, b)
        raise RuntimeError(f"a run of {self.exercise.name} has no end: {case!r}")

    def behaves_like(self, other: "Comparison", case: Any) -> bool:
        """Return whether both answers differ from the right one in the same way, or not at all."""
        mine, its = self.first_difference(case), other.first_difference(case)
        if mine is None or its is None:
            return mine is its
        if mine.index != its.index:
            return False
        if mine.yours is None or its.yours is None:
            return mine.yours is its.yours
        return is_same(self.exercise, mine.yours, its.yours)


def is_same(exercise: "Build", a: Seen, b: Seen) -> bool:
    if isinstance(a.value, Raised) or isinstance(b.value, Raised):
        return isinstance(a.value, Raised) and isinstance(b.value, Raised) and str(a.value) == str(b.value)
    try:
        return bool(exercise.is_same(a.value, b.value))
    except Exception:  # the learner's value has another type or shape
        return False


def check_answer(exercise: "Build", file: Path, language: Language, num_random: int = NUM_RANDOM) -> Report:
    """Return whether an answer is right in all cases that are tried, and what is wrong in the smallest one found.

    num_random: how many random cases are tried after the planted ones, at most
    """
    comparison = Comparison(exercise, load(file.read_text(encoding="utf-8"), str(file)))
    case = find_failing_case(comparison, num_random)
    if case is None:
        text = Text("Right: the same as the solution in all runs tried.", "正确：试过的每次运行都与参考答案相同。")
        return Report(True, text.show(language))
    difference = comparison.first_difference(case)
    assert difference is not None
    if is_unwritten(difference):
        text = Text("A function is not written yet.", "还有函数没有写。")
        return Report(False, text.show(language), [seen.label.show(language) for seen in [difference.yours] if seen])
    return describe(comparison, case, difference, find_mistakes(comparison, case), language)


def is_unwritten(difference: Difference) -> bool:
    return difference.yours is not None and difference.yours.value == Raised("NotImplementedError")


def find_failing_case(comparison: Comparison, num_random: int) -> Any:
    """Return the smallest case found in which the answer is wrong, or None. The planted cases are tried first."""
    exercise = comparison.exercise
    planted = min((one for one in exercise.examples if comparison.first_difference(one)), key=length, default=None)
    smallest = planted
    failed_at: list[float] = [] if planted is None else [time.process_time()]
    end, end_wall = time.process_time() + SEARCH_S, time.monotonic() + SEARCH_WALL_S

    def fails(case: Any) -> bool:
        nonlocal smallest
        is_over = time.process_time() > (failed_at[0] + SHRINK_S if failed_at else end)
        if is_over or time.monotonic() > end_wall:
            raise TimeIsOver
        has_failed = comparison.first_difference(case) is not None
        if has_failed:
            smallest = case  # the search continues only with smaller cases
            failed_at.extend([] if failed_at else [time.process_time()])
        return has_failed

    with suppress(TimeIsOver):
        if num_random:
            search(exercise.cases, fails, num_random)
    found = smallest if planted is None else min(planted, smallest, key=length)
    if isinstance(found, Traffic):
        return drop_requests(found, lambda case: comparison.first_difference(case) is not None)
    return found


def length(case: Any) -> int:
    """Return how long a case is, as a measure of how hard it is to understand."""
    return len(repr(case))


def search(cases: Callable[[], Any], fails: Callable[[Any], bool], num_random: int) -> None:
    """Try random cases, and after the first that fails only smaller ones. The same cases are tried each time."""
    options = settings(
        max_examples=num_random,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    with suppress(NoSuchExample):
        find(cases(), fails, settings=options, random=Random(0))


def find_mistakes(comparison: Comparison, case: Any) -> tuple[Mistake, ...]:
    """Return the known mistake that behaves like the answer in all cases that were tried, or two of them together."""
    exercise = comparison.exercise
    tried = [case, *exercise.examples, *(one for one, _ in comparison.results.values())][:NUM_COMPARED]
    near = []  # mistakes that behave like the answer in the smallest case: they are probably one of two
    for mistake in exercise.mistakes:
        with at_most(MISTAKE_S):  # in a random case, a mistake can make a loop without an end
            wrong = comparison.with_answer(mistake.apply(exercise.solution))
            if comparison.behaves_like(wrong, case):
                if all(comparison.behaves_like(wrong, one) for one in tried):
                    return (mistake,)
                near.append(mistake)
    return find_pair(comparison, tried, near)


def find_pair(comparison: Comparison, cases: list[Any], near: list[Mistake]) -> tuple[Mistake, ...]:
    """Return two known mistakes that together behave like the answer. Those with one of `near` are tried first."""
    exercise = comparison.exercise
    pairs = combinations(exercise.mistakes, 2)
    end = time.process_time() + PAIRS_S
    for pair in sorted(pairs, key=lambda pair: not (pair[0] in near or pair[1] in near)):
        source = combine(*pair, exercise.solution)
        if time.process_time() > end:
            break
        with at_most(PAIR_S), suppress(Exception, Stopped):  # two mistakes can make a loop without an end
            if source is not None:
                wrong = comparison.with_answer(source)
                if all(comparison.behaves_like(wrong, one) for one in cases):
                    return pair
    return ()


def describe(
    comparison: Comparison, case: Any, difference: Difference, mistakes: tuple[Mistake, ...], language: Language
) -> Report:
    """Return the report of a wrong answer: the mistakes if they are known, the case, and the first difference."""
    exercise, index = comparison.exercise, difference.index
    right, yours = difference.right, difference.yours
    names = [mistake.name.show(language) for mistake in mistakes]
    name = " + ".join(names) or None
    headline = Text("Not yet right.", "还不对。").show(language) if name is None else name
    paragraphs = [mistake.why.show(language) for mistake in mistakes]
    if len(mistakes) > 1:
        paragraphs.insert(0, Text("Two mistakes at once.", "同时有两个错误。").show(language))
    paragraphs.append(exercise.describe(case).show(language))
    drawings = [draw_steps(comparison, case, difference, language)]
    drawings += [one for one in draw_states(case, right, yours, language) if one.lines]
    if exercise.draw is not None:
        drawings += mark_pair(exercise.draw(case, right, yours), language)
    traffic = list(case) if isinstance(case, Traffic) else None
    return Report(False, headline, paragraphs, drawings, name, comparison.printed(case), traffic=traffic, step=index)


def draw_states(case: Any, right: Seen | None, yours: Seen | None, language: Language) -> list[Drawing]:
    """Return what both observations have drawn: once if it is the same."""
    drawn = [one.drawing if one is not None and not isinstance(one.value, Raised) else "" for one in (right, yours)]
    after = Text(", after the step", "，这一步之后") if isinstance(case, Traffic) else Text("", "")
    titles = [Text("right", "正确"), Text("yours", "你的")]
    if drawn[0] == drawn[1]:
        titles, drawn = [Text("the state in both runs", "两次运行的状态相同")], drawn[:1]
    pairs = zip(titles, drawn, strict=True)
    return mark_pair([(Text(title.en + after.en, title.zh + after.zh), lines) for title, lines in pairs], language)


def mark_pair(drawn: list[tuple[Text, str]], language: Language) -> list[Drawing]:
    """Return drawings. In one that begins with "yours" and follows one of the right run, what differs is marked."""
    drawings: list[Drawing] = []
    for i, (title, lines) in enumerate(drawn):
        drawing = Drawing(title.show(language), lines.split("\n") if lines else [])
        if title.en.startswith("yours") and i and drawn[i - 1][0].en.startswith("right"):
            drawing.marks = mark_rows(drawing.lines, drawn[i - 1][1].split("\n")) if drawn[i - 1][1] else []
        drawings.append(drawing)
    return drawings


def draw_steps(comparison: Comparison, case: Any, difference: Difference, language: Language) -> Drawing:
    """Return the observations before the first difference, and what differs there."""
    before = list(islice(observe(comparison.exercise, comparison.right, case), difference.index))[-NUM_BEFORE:]
    lines = [
        f"  {seen.label.show(language)}{colon(language)}{shorten(show(unwrap(seen.value), language))}"
        for seen in before
    ]
    drawing = draw_difference(difference.right, difference.yours, language)
    drawing.title = Text("The first difference", "第一处不同").show(language)
    drawing.marks = [[len(lines) + line, start, end] for line, start, end in drawing.marks]
    drawing.lines = lines + drawing.lines
    return drawing
