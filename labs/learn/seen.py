"""What can be seen of a run, and mistakes: what an exercise compares answers with."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from labs.learn.texts import Text


class Seen(NamedTuple):
    """One observation of a run. Two runs are compared by their values."""

    label: Text
    """What happens here: "A grows to 9 tokens"."""
    value: Any
    """What an answer decides. Values of right answers are equal."""
    drawing: str = ""
    """The state, to show beside the other answer's. By default the value is shown."""


@dataclass(frozen=True)
class Mistake:
    """A mistake that people make. `replace` turns the solution into an answer with this mistake."""

    name: Text
    why: Text
    """What is wrong, and what would be right, in one to four sentences."""
    replace: tuple[tuple[str, str], ...]
    """(old, new): each `old` occurs exactly once in the solution."""

    def apply(self, solution: str) -> str:
        return replace_all(solution, self.replace)


def replace_all(source: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """Return `source` with each `old` replaced by its `new`, one after the other."""
    for old, new in pairs:
        if source.count(old) != 1:
            raise ValueError(f"the solution must have this text once, got {source.count(old)} times: {old!r}")
        source = source.replace(old, new)
    return source


def combine(first: Mistake, second: Mistake, solution: str) -> str | None:
    """Return the solution with both mistakes, or None if they change the same place."""
    try:
        one = replace_all(first.apply(solution), second.replace)
        other = replace_all(second.apply(solution), first.replace)
    except ValueError:  # a text is not there any more, or it is there twice
        return None
    return one if one == other else None
