"""Predict a number: the answer is a value, which is kept before the right one is shown."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanovllm.extras.learn.answers import load
from nanovllm.extras.learn.exercise import Exercise, make_header
from nanovllm.extras.learn.findings import Report
from nanovllm.extras.learn.texts import Language, Text


@dataclass(frozen=True)
class WrongNumber:
    """A value that people get if they forget something."""

    name: Text
    why: Text
    value: float


@dataclass(frozen=True)
class Predict(Exercise):
    """The learner sets `ANSWER`. It is right within `tolerance`, a share of the right value."""

    formula: str
    """The solution as source text: it sets `ANSWER`."""
    measure: Callable[[], float]
    """Returns the right value, by running what the question asks about, or from this project's own functions."""
    unit: Text
    explain: Callable[[float], Text]
    """(right value) -> where it comes from. Shown after each check."""
    mistakes: tuple[WrongNumber, ...]
    tolerance: float = 0.05

    @property
    def solution(self) -> str:
        return self.formula

    def make_starter(self, language: Language) -> str:
        note = Text("a number or an expression, in", "数字或表达式，单位：").show(language)
        return make_header(self, language) + f"ANSWER = None  # {note} {self.unit.show(language)}\n"

    def check(self, file: Path, language: Language) -> Report:
        answer = getattr(load(file.read_text(encoding="utf-8"), str(file)), "ANSWER", None)
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            text = Text(
                f"Set ANSWER to a number first: a wrong one is fine. It is {answer!r} now.",
                f"请先把 ANSWER 设为一个数字，错了也没关系。现在是 {answer!r}。",
            )
            return Report(False, text.show(language))
        right = self.measure()
        numbers = {"prediction": float(answer), "measured": right}
        both = Text(
            f"You predicted {answer:,.6g} {self.unit.en}; it is {right:,.6g}.",
            f"你的预测是 {answer:,.6g} {self.unit.zh}；实际是 {right:,.6g}。",
        )
        paragraphs = [both.show(language), self.explain(right).show(language)]
        if self.is_near(answer, right):
            return Report(True, Text("A good prediction.", "预测准确。").show(language), paragraphs, numbers=numbers)
        mistake = next((one for one in self.mistakes if self.is_near(answer, one.value)), None)
        if mistake is None:
            return Report(False, Text("Not yet right.", "还不对。").show(language), paragraphs, numbers=numbers)
        name = mistake.name.show(language)
        return Report(False, name, [mistake.why.show(language), *paragraphs], mistake=name, numbers=numbers)

    def is_near(self, answer: float, value: float) -> bool:
        return abs(answer - value) <= self.tolerance * abs(value)
