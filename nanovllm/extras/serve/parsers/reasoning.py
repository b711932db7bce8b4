"""Splits an answer into reasoning and content, as it grows.

A reasoning model begins with its thoughts: `<think>\\n…\\n</think>\\n\\nanswer`. Some chat templates write the first
tag into the prompt already. The parser takes the text in pieces; its parts add up to the same for any cut into pieces.

    "<think>\\n2 + 2…\\n</think>\\n\\nFour."     reasoning "2 + 2…"     content "Four."
    "Four."                                    reasoning ""           content "Four."

White space next to the tags belongs to neither part.
"""

from typing import ClassVar, NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Parts(NamedTuple):
    """New text of each part; either may be empty."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """One answer. `starts_inside`: the prompt ends with `<think>`, so the answer begins with thoughts."""

    always_starts_inside: ClassVar[bool] = False

    def __init__(self, starts_inside: bool = False) -> None:
        starts_inside = starts_inside or self.always_starts_inside
        self._is_inside = self._is_trimming = starts_inside  # trimming: white space that comes next is in no part
        self._may_open = True  # no text but white space yet, so `<think>` may come
        self._held = ""  # read, but it is not known yet to which part it belongs, if to any

    def feed(self, text: str) -> Parts:
        """The next piece of the answer."""
        self._held += text
        if self._may_open:
            beginning = self._held.lstrip()
            if len(beginning) < len(OPEN) and OPEN.startswith(beginning):
                return Parts()
            self._may_open = False
            if beginning.startswith(OPEN):
                self._is_inside = self._is_trimming = True
                self._held = beginning[len(OPEN) :]
        return self._take_reasoning() if self._is_inside else Parts(content=self._take_content())

    def finish(self) -> Parts:
        """The text that was held back, at the end of the answer."""
        rest, self._held = self._held, ""
        if self._is_inside:
            return Parts(reasoning=rest.strip() if self._is_trimming else rest.rstrip())
        return Parts(content=rest)

    def _take_reasoning(self) -> Parts:
        self._trim()
        end = self._held.find(CLOSE)
        if end >= 0:
            reasoning, self._held = self._held[:end].rstrip(), self._held[end + len(CLOSE) :]
            self._is_inside, self._is_trimming = False, True
            return Parts(reasoning, self._take_content())
        # keep what may be the beginning of the tag, and white space, which may be next to the tag
        safe = self._held[: len(self._held) - num_held_back(self._held, CLOSE)].rstrip()
        self._held = self._held[len(safe) :]
        return Parts(reasoning=safe)

    def _take_content(self) -> str:
        self._trim()
        content, self._held = self._held, ""
        return content

    def _trim(self) -> None:
        if self._is_trimming:
            self._held = self._held.lstrip()
            self._is_trimming = not self._held


class DeepSeekR1(ReasoningParser):
    """DeepSeek-R1 thinks before each answer, and may leave the first tag out."""

    always_starts_inside = True


def num_held_back(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a beginning of `tag`, and not all of it."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
