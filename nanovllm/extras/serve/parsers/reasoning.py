"""Split an answer into reasoning and content while it grows.

A reasoning model begins with its reasoning: `<think>\\n…\\n</think>\\n\\nanswer`. Some chat templates write the first
tag into the prompt. The parser gets the text in pieces; the result does not depend on how the text is cut.

    "<think>\\n2 + 2…\\n</think>\\n\\nFour."     reasoning "2 + 2…"     content "Four."
    "Four."                                    reasoning ""           content "Four."

White space next to the tags is dropped.
"""

from typing import ClassVar, NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Parts(NamedTuple):
    """The new text of the reasoning and of the content. Both may be empty."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Parses one answer. starts_inside: the prompt ends with `<think>`, so the answer begins with reasoning."""

    always_starts_inside: ClassVar[bool] = False

    def __init__(self, starts_inside: bool = False) -> None:
        starts_inside = starts_inside or self.always_starts_inside
        self._is_inside = self._is_trimming = starts_inside  # trimming: drop white space that follows
        self._may_open = True  # only white space so far, so `<think>` may follow
        self._held = ""  # text whose part is not known yet

    def feed(self, text: str) -> Parts:
        """Read the next piece of the answer, and return the new text of both parts."""
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
        """Return the text that was held back. Call this at the end of the answer."""
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
        # hold back text that may be the beginning of the tag, and white space, which may be next to the tag
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
    """The format of DeepSeek-R1, which begins each answer with reasoning, and may omit the first tag."""

    always_starts_inside = True


def num_held_back(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `tag`, but not the whole tag."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
