"""What can be seen of a run, and mistakes: what an exercise compares answers with."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from nanovllm.extras.learn.texts import Text


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
        for old, new in self.replace:
            if solution.count(old) != 1:
                raise ValueError(f"the solution must have this text once, got {solution.count(old)} times: {old!r}")
            solution = solution.replace(old, new)
        return solution
