"""What a check finds: it is sent from the worker as JSON, and printed by `report_printing.py`."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Drawing:
    """Preformatted lines with a title, for example a pool of blocks or two columns of steps."""

    title: str
    lines: list[str]
    marks: list[list[int]] = field(default_factory=list)
    """[line, start, end]: what is highlighted, because it differs from the right run."""


@dataclass
class Report:
    """The result of one check, in the language of the learner."""

    passed: bool
    headline: str
    paragraphs: list[str] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    mistake: str | None = None
    """The name of a known mistake that behaves exactly like the answer."""
    printed: str = ""
    """What the learner's code has printed."""
    traffic: list[Any] | None = None
    """The requests of the smallest failing run (`traffic.py`), which `nanovllm learn view` shows."""
    step: int | None = None
    """The observation that differs first, counted from 0. In such a run it is the step."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Figures to keep in the progress file: a score, or the value that a prediction is compared with."""

    later: list[str] = field(default_factory=list)
    """More paragraphs, which are shown from the third check on: the number to predict."""
    counts: bool = True
    """Whether this was a check: not if there was no answer to check."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Report":
        drawings = [Drawing(**drawing) for drawing in values.pop("drawings")]
        return cls(drawings=drawings, **values)
