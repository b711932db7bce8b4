"""Splits an answer into content and calls of tools, as it grows. The forms differ in their tags, and in their calls.

    Let me see. <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

The parser takes the text in pieces. When the name of a call is known, its arguments are handed on as they come. The
events add up to the same for any cut into pieces:

    Content("Let me see."), CallStart(0, "get_weather"), CallArguments(0, '{"city": '), CallArguments(0, '"Oslo"}')

White space between text and tags belongs to neither. A tag before anything but a call with a name is text.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from nanovllm.extras.serve.parsers.reasoning import num_held_back
from nanovllm.extras.serve.protocol import Function


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallStart:
    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    index: int
    text: str


Event = Content | CallStart | CallArguments


class Call(ABC):
    """One call while it is read. `text` is what has been read of it."""

    def __init__(self) -> None:
        self.text = ""
        self.name: str | None = None
        self.text_before = ""  # the tag that opens it, and white space before that

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Without a name by then, it was no call, but text."""

    @abstractmethod
    def read(self, text: str) -> str:
        """Take the part of `text` that belongs to the call, and return the rest."""

    @abstractmethod
    def take_arguments(self) -> str:
        """The part of the arguments, JSON, that is new since the last time."""


class Spelling(NamedTuple):
    """How a call is written when it is forced upon a model: what stands around its arguments, which are JSON."""

    head: str  # NAME stands for the function's name
    tail: str
    between: str  # two calls
    begin: str = ""  # before the first call
    end: str = ""  # after the last


class ToolParser(ABC):
    """Reads one answer. A form is a subclass, with its tags and its calls."""

    open: ClassVar[str]
    """The tag before a call."""
    close: ClassVar[str]
    """The tag after a call."""
    skipped: ClassVar[tuple[str, ...]] = ()
    """Tags around all calls, which are in no part."""
    spelling: ClassVar[Spelling | None] = None
    """None: calls are not forced in this form, but in Hermes'."""
    has_special_tokens: ClassVar[bool] = False
    """Whether the tags may be special tokens, which the text must then have."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        self.functions = {function.name: function for function in functions}
        self.num_calls = 0  # whose name is known
        self.has_text = False  # whether any content has come
        self._held = ""  # read, but not decided
        self._call: Call | None = None  # the call that is being read
        self._is_after_call = False  # a closing tag, and white space, belong to the call that has ended

    def feed(self, text: str) -> list[Event]:
        """The next piece of the answer."""
        self._held += text
        events: list[Event] = []
        while self._read_call(events) if self._call is not None else self._read_text(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """The text that was held back, at the end of the answer. A call whose name is known stays, cut off as it is."""
        rest, self._held = self._held, ""
        if self._call is not None:
            text = self._call.text_before + self._call.text
            return [Content(text)] if self._call.name is None and text else []
        if self._is_after_call and self.close.startswith(rest.strip()):
            return []
        return [Content(rest)] if rest else []

    def _read_text(self, events: list[Event]) -> bool:
        """Read up to the next call; False if more of the answer is needed."""
        if self._is_after_call and not self._skip_close():
            return False
        found = self.find_tag(self._held)
        end = len(self._held) - self.num_undecided(self._held) if found is None else found[0]
        text = self._held[:end].rstrip()  # white space may be next to a tag
        if text:
            events.append(Content(text))
            self.has_text, self._is_after_call = True, False
        if found is None:
            self._held = self._held[len(text) :]
            return False
        start, tag = found
        before, self._held = self._held[len(text) : start + len(tag)], self._held[start + len(tag) :]
        if tag not in self.skipped:
            self._call = self.new_call()
            self._call.text_before = before
        return True

    @abstractmethod
    def new_call(self) -> Call:
        """A call whose tag has been read."""

    def find_tag(self, text: str) -> tuple[int, str] | None:
        """Where the first tag is that opens a call, or is skipped, and which."""
        found = [(text.find(tag), tag) for tag in (self.open, *self.skipped)]
        return min((one for one in found if one[0] >= 0), default=None)

    def num_undecided(self, text: str) -> int:
        """Characters at the end of `text`, without a tag, that may become one."""
        return max(num_held_back(text, tag) for tag in (self.open, *self.skipped))

    def _skip_close(self) -> bool:
        """Skip closing tags and white space after a call; False if it is not known yet what comes."""
        self._held = self._held.lstrip()
        while self._held.startswith(self.close):
            self._held = self._held[len(self.close) :].lstrip()
        return bool(self._held) and not self.close.startswith(self._held)

    def _read_call(self, events: list[Event]) -> bool:
        """Read on in the call; False if more of the answer is needed."""
        call = self._call
        assert call is not None
        was_known = call.name is not None
        self._held = call.read(self._held)
        if call.name is not None:
            if not was_known:
                events.append(CallStart(self.num_calls, call.name))
                self.num_calls += 1
            if arguments := call.take_arguments():
                events.append(CallArguments(self.num_calls - 1, arguments))
        if not call.has_ended:
            return False
        self._call, self._is_after_call = None, call.name is not None
        if call.name is None:  # not a call after all
            if call.text_before:
                events.append(Content(call.text_before))
            self.has_text = True
            self._held = call.text + self._held
        return True
