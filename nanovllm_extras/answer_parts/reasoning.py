"""Split an answer into reasoning and content while it grows.

A reasoning model begins with its reasoning: `<think>\\n…\\n</think>\\n\\nanswer`. Some chat templates write the first
tag into the prompt. The parser gets the text in pieces; the result does not depend on how the text is cut.

    "<think>\\n2 + 2…\\n</think>\\n\\nFour."     reasoning "2 + 2…"     content "Four."
    "Four."                                    reasoning ""           content "Four."

White space next to the tags is dropped.
"""

import re
from typing import ClassVar, NamedTuple


class Parts(NamedTuple):
    """The new text of the reasoning and of the content. Both may be empty."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Parses one answer.

    starts_inside: the prompt ends with the first tag (`is_open`), so the answer begins with reasoning.
    call: two tags with which a tool call begins. A model may call a tool without ending its reasoning.
    """

    open: ClassVar[str] = "<think>"
    close: ClassVar[str] = "</think>"
    call_tags: ClassVar[tuple[str, str]] = ("<tool_call>", "<function=")
    """How these models begin a call without ending their reasoning, if they do: Qwen3.5."""
    has_special_tokens: ClassVar[bool] = False
    """Whether the tags are special tokens. If so, the text must contain special tokens."""
    always_starts_inside: ClassVar[bool] = False

    def __init__(self, starts_inside: bool = False, call: tuple[str, str] | None = None) -> None:
        starts_inside = starts_inside or self.always_starts_inside
        self._is_inside = self._is_trimming = starts_inside  # trimming: drop white space that follows
        self._may_open = True  # only white space so far, so the first tag may follow
        self._held = ""  # text whose part is not known yet
        self._call = call

    @classmethod
    def is_open(cls, prompt: str) -> bool:
        """Return whether a prompt ends with the first tag."""
        return prompt.rstrip().endswith(cls.open)

    def feed(self, text: str) -> Parts:
        """Read the next piece of the answer, and return the new text of both parts."""
        self._held += text
        if self._may_open:
            begins = begins_with(self._held, self.open)
            if begins is None:
                return Parts()
            self._may_open = False
            if begins:
                self._is_inside = self._is_trimming = True
                self._held = self._held.lstrip()[len(self.open) :]
        return self._take_reasoning() if self._is_inside else Parts(content=self._take_content())

    def finish(self) -> Parts:
        """Return the text that was held back. Call this at the end of the answer."""
        rest, self._held = self._held, ""
        if self._is_inside:
            return Parts(reasoning=rest.strip() if self._is_trimming else rest.rstrip())
        return Parts(content=rest)

    def _take_reasoning(self) -> Parts:
        self._trim()
        end, start_of_content = self._find_end()
        reasoning = self._held[:end].rstrip()
        if start_of_content is None:  # hold back white space, which may be next to the tag
            self._held = self._held[len(reasoning) :]
            return Parts(reasoning)
        self._held = self._held[start_of_content:]
        self._is_inside, self._is_trimming = False, True
        return Parts(reasoning, self._take_content())

    def _find_end(self) -> tuple[int, int | None]:
        """Return where the reasoning ends in the held text, and where the content begins.

        If the end is not in the held text, return where a tag may begin, and None.
        """
        close = self._held.find(self.close)
        undecided = len(self._held) - num_held_back(self._held, self.close)
        if self._call is not None:
            start, is_call = find_call(self._held, self._call)
            if is_call and not 0 <= close < start:
                return start, start
            undecided = min(undecided, start)
        return (undecided, None) if close < 0 else (close, close + len(self.close))

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


class Gemma4Reasoning(ReasoningParser):
    """The format of Gemma 4: `<|channel>thought\\n…<channel|>answer`. The label `thought` is not reasoning."""

    open, close = "<|channel>", "<channel|>"
    call_tags = ("<|tool_call>", "call:")
    has_special_tokens = True
    label: ClassVar[str] = "thought"

    def __init__(self, starts_inside: bool = False, call: tuple[str, str] | None = None) -> None:
        super().__init__(starts_inside, call)
        self._has_label = False  # whether the label has been found, or does not follow

    @classmethod
    def is_open(cls, prompt: str) -> bool:
        return super().is_open(prompt.rstrip().removesuffix(cls.label))

    def finish(self) -> Parts:
        if self._is_inside and not self._has_label and self._held.strip() == self.label:
            self._held = ""
        return super().finish()

    def _trim(self) -> None:
        super()._trim()
        if not self._is_inside or self._has_label:
            return
        after = self._held.removeprefix(self.label)
        if after != self._held and after.startswith(("\n", self.close)):
            self._held, self._is_trimming, self._has_label = after, True, True
            super()._trim()
        else:
            self._has_label = not self._may_be_label()

    def _find_end(self) -> tuple[int, int | None]:
        return super()._find_end() if self._has_label else (0, None)

    def _may_be_label(self) -> bool:
        """Return whether the held text may be the beginning of the label and of what follows it."""
        return any(f"{self.label}{after}".startswith(self._held) for after in ("\n", self.close))


REASONING_PARSERS: dict[str, type[ReasoningParser] | None] = {
    "qwen3": ReasoningParser,
    "deepseek_v3": ReasoningParser,
    "deepseek_r1": DeepSeekR1,
    "gemma4": Gemma4Reasoning,
    "openai_gptoss": None,
}
"""vLLM's names, which `Config` has too. None: `harmony.py` parses the whole answer."""


def begins_with(text: str, tag: str) -> bool | None:
    """Return whether a text begins with a tag, before which there may be white space; None if more text may say so."""
    beginning = text.lstrip()
    if len(beginning) < len(tag) and tag.startswith(beginning):
        return None
    return beginning.startswith(tag)


def find_call(text: str, tags: tuple[str, str]) -> tuple[int, bool]:
    """Return where the two tags of a call begin, and True; only white space may be between them.

    If they are not in the text, return where they may begin when more text follows, and False.
    """
    first, second = tags
    for found in re.finditer(rf"{re.escape(first)}\s*", text):
        beginning = text[found.end() : found.end() + len(second)]
        if second.startswith(beginning):
            return found.start(), beginning == second
    return len(text) - num_held_back(text, first), False


def num_held_back(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `tag`, but not the whole tag."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
