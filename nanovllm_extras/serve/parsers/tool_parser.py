"""Split an answer into content and tool calls while it grows. The formats differ in their tags and in their calls.

    Let me see. <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

The parser gets the text in pieces. When the name of a call is known, its arguments are returned as they arrive. The
result does not depend on how the text is cut, except that arguments may be cut elsewhere:

    Content("Let me see."), CallStart(0, "get_weather"), CallArguments(0, '{"city": '), CallArguments(0, '"Oslo"}')

White space between text and tags is dropped. If a tag is not followed by a call with a name, the tag is text.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from nanovllm_extras.answer_parts.events import CallArguments, CallStart, Content, Event
from nanovllm_extras.answer_parts.reasoning import num_held_back

if TYPE_CHECKING:
    from nanovllm_extras.serve.messages.protocol import Function

PIECE = 1024  # characters that are read at once: each tag copies the rest of them


class Call(ABC):
    """One call while it is read. `text` is the text of the call so far."""

    def __init__(self) -> None:
        self.text = ""
        self.name: str | None = None
        self.text_before = ""  # the tag that opens the call, and the white space before the tag

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the call has ended. If it has no name by then, it is text and not a call."""

    @abstractmethod
    def read(self, text: str) -> str:
        """Read the part of `text` that belongs to the call, and return the rest."""

    @abstractmethod
    def take_arguments(self) -> str:
        """Return the part of the arguments (JSON) that is new since the last time."""


class Spelling(NamedTuple):
    """The texts around the JSON arguments of a call, from which a grammar is made that forces calls."""

    head: str  # before the arguments; NAME is replaced by the function's name
    tail: str  # after the arguments
    between: str  # between two calls
    begin: str = ""  # before the first call
    end: str = ""  # after the last call


class ToolParser(ABC):
    """Parses one answer. Each format is a subclass that defines the tags and the calls."""

    open: ClassVar[str]
    """The tag before a call."""
    close: ClassVar[str]
    """The tag after a call."""
    skipped: ClassVar[tuple[str, ...]] = ()
    """Tags around all calls. They are dropped."""
    spelling: ClassVar[Spelling | None] = None
    """How to force calls by a grammar. None: forced calls have the format of Hermes."""
    has_special_tokens: ClassVar[bool] = False
    """Whether the tags may be special tokens. If so, the text must contain special tokens."""
    within_reasoning: ClassVar[tuple[str, str] | None] = None
    """Two tags with which a call begins. If they follow each other within the reasoning, they end the reasoning."""

    def __init__(self, functions: Sequence["Function"] = ()) -> None:
        self.functions = {function.name: function for function in functions}
        self.num_calls = 0  # number of calls whose name is known
        self.has_text = False  # whether there was any content
        self._held = ""  # text that may be a part of a tag
        self._call: Call | None = None  # the call that is being read
        self._is_after_call = False  # a call has ended: drop its closing tag and white space

    def feed(self, text: str) -> list[Event]:
        """Read the next piece of the answer, and return the new events."""
        events: list[Event] = []
        for start in range(0, len(text), PIECE):
            self._held += text[start : start + PIECE]
            while self._read_call(events) if self._call is not None else self._read_text(events):
                pass
        return events

    @property
    def is_within_call(self) -> bool:
        """Whether a call whose name is known has begun, and its end has not been read."""
        return self._call is not None and self._call.name is not None

    def finish(self) -> list[Event]:
        """Return the events for the text that was held back. Call this at the end of the answer.

        An incomplete call stays a call if its name is known; otherwise it is text.
        """
        rest, self._held = self._held, ""
        if self._call is not None:
            text = self._call.text_before + self._call.text
            return [Content(text)] if self._call.name is None and text else []
        if self._is_after_call and self.close.startswith(rest.strip()):
            return []
        return [Content(rest)] if rest else []

    def _read_text(self, events: list[Event]) -> bool:
        """Read up to the next call. Return False if more of the answer is needed."""
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
        """Return a call whose opening tag has been read."""

    def find_tag(self, text: str) -> tuple[int, str] | None:
        """Return the position and the text of the first tag that opens a call or is skipped; None if there is none."""
        found = [(text.find(tag), tag) for tag in (self.open, *self.skipped)]
        return min((one for one in found if one[0] >= 0), default=None)

    def num_undecided(self, text: str) -> int:
        """Return the number of characters at the end of `text` that may be the beginning of a tag."""
        return max(num_held_back(text, tag) for tag in (self.open, *self.skipped))

    def _skip_close(self) -> bool:
        """Skip closing tags and white space after a call. Return False if more of the answer is needed."""
        self._held = self._held.lstrip()
        while self._held.startswith(self.close):
            self._held = self._held[len(self.close) :].lstrip()
        return bool(self._held) and not self.close.startswith(self._held)

    def _read_call(self, events: list[Event]) -> bool:
        """Read a part of the call. Return False if more of the answer is needed."""
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
        if call.name is None:  # it is text and not a call
            if call.text_before:
                events.append(Content(call.text_before))
            self.has_text = True
            self._held = call.text + self._held
        return True
