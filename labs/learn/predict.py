"""Predict a number: the answer is a value. The right one is shown when it is found, or at the third check.

A miss before says whether the prediction is too large or too small, and explains it if it is a known wrong value.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labs.learn.answers import load
from labs.learn.exercise import Exercise, make_header
from labs.learn.findings import Report
from labs.learn.texts import Language, Text


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
    """(right value) -> where it comes from. Shown with the right value."""
    mistakes: tuple[WrongNumber, ...]
    tolerance: float = 0.05

    @property
    def solution(self) -> str:
        return self.formula

    def make_starter(self, language: Language) -> str:
        note = Text("a number or an expression, in", "数字或表达式，单位：").show(language)
        first = Text(
            "# Predict it before you read on in the chapter, which may have the number.",
            "# 先预测，再接着读章节：后面可能有答案。",
        )
        line = f"ANSWER = None  # {note} {self.unit.show(language)}"
        return f"{make_header(self, language)}{first.show(language)}\n{line}\n"

    def check(self, file: Path, language: Language) -> Report:
        answer = getattr(load(file.read_text(encoding="utf-8"), str(file)), "ANSWER", None)
        if isinstance(answer, bool) or not isinstance(answer, int | float) or not math.isfinite(answer):
            return Report(False, self.refuse(answer).show(language), counts=False)
        right = self.measure()
        numbers = {"prediction": float(answer), "measured": right}
        found = self.explain(right).show(language)
        if self.is_near(answer, right):
            both = self.write_both(answer, right).show(language)
            return Report(True, Text("A good prediction.", "预测准确。").show(language), [both, found], numbers=numbers)
        later = [
            Text(f"It is {right:,.6g} {self.unit.en}.", f"实际是 {right:,.6g} {self.unit.zh}。").show(language),
            found,
        ]
        size = Text("too small", "太小") if answer < right else Text("too large", "太大")
        shown = f"{answer:,.6g}"
        paragraphs = [
            Text(f"{shown} {self.unit.en}: {size.en}.", f"{shown} {self.unit.zh}：{size.zh}。").show(language)
        ]
        mistake = next((one for one in self.mistakes if self.is_near(answer, one.value)), None)
        if mistake is None:
            headline = Text("Not yet right.", "还不对。").show(language)
            return Report(False, headline, paragraphs, numbers=numbers, later=later)
        name = mistake.name.show(language)
        paragraphs.append(mistake.why.show(language))
        return Report(False, name, paragraphs, mistake=name, numbers=numbers, later=later)

    def refuse(self, answer: object) -> Text:
        """Return why this is not a prediction."""
        if isinstance(answer, str):
            return Text(
                f"ANSWER is text, {answer!r}. Give a number, in {self.unit.en}, without the unit.",
                f"ANSWER 是文本 {answer!r}。请给一个数字，不带单位，单位是{self.unit.zh}。",
            )
        return Text(
            f"Set ANSWER to a number first: a wrong one is fine. It is {answer!r} now.",
            f"请先把 ANSWER 设为一个数字，错了也没关系。现在是 {answer!r}。",
        )

    def write_both(self, answer: float, right: float) -> Text:
        return Text(
            f"You predicted {answer:,.6g} {self.unit.en}; it is {right:,.6g}.",
            f"你的预测是 {answer:,.6g} {self.unit.zh}；实际是 {right:,.6g}。",
        )

    def complete(self, report: Report, first: float | None, is_revealed: bool, language: Language) -> None:
        """Add what the progress knows to a report: the first prediction, and the number if it may be shown.

        is_revealed: whether the number has been shown, or is shown now
        """
        if report.passed and is_revealed:
            report.headline = Text("Right, after the number was shown.", "正确（数字已经显示过）。").show(language)
        elif is_revealed:
            report.paragraphs += report.later
        elif report.later:
            text = Text(
                "Think again, change ANSWER, and check again. The third check shows the number.",
                "再想一想，改 ANSWER，再检查一次。第三次检查会显示这个数字。",
            )
            report.paragraphs.append(text.show(language))
        if first is not None and report.counts:
            text = Text(f"First prediction: {first:,.6g} {self.unit.en}", f"第一次预测：{first:,.6g} {self.unit.zh}")
            report.paragraphs.append(text.show(language))

    def is_near(self, answer: float, value: float) -> bool:
        return abs(answer - value) <= self.tolerance * abs(value)
