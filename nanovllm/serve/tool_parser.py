"""Splits an answer into text and calls of tools, as it grows.

Qwen, Hermes and others write a call as JSON between tags:

    Let me see. <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

The parser takes the text in pieces. When the name of a call is known, its arguments are handed on as they come, in the
model's own spelling. The events add up to the same for any cut into pieces:

    Content("Let me see."), CallStart(0, "get_weather"), CallArguments(0, '{"city": '), CallArguments(0, '"Oslo"}')

White space between text and tags belongs to neither. `<tool_call>` before anything but an object with a name is text.

`ObjectScanner` finds the values of a JSON object that is still growing. It knows the members of the outermost object;
inside their values it only counts brackets outside of strings.
"""

import json
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from nanovllm.serve.reasoning_parser import num_held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
WHITE = " \t\n\r"
ARGUMENTS = ("arguments", "parameters")  # names that models give them


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


class ToolParser:
    """One answer."""

    def __init__(self) -> None:
        self.num_calls = 0  # whose name is known
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
            return [] if self._call.name is not None else [Content(self._call.text_before + OPEN + self._call.text)]
        if self._is_after_call and CLOSE.startswith(rest.strip()):
            return []
        return [Content(rest)] if rest else []

    def _read_text(self, events: list[Event]) -> bool:
        """Read up to the next call; False if more of the answer is needed."""
        if self._is_after_call and not self._skip_close():
            return False
        start = self._held.find(OPEN)
        end = start if start >= 0 else len(self._held) - num_held_back(self._held, OPEN)
        text = self._held[:end].rstrip()  # white space may be next to a tag
        if text:
            events.append(Content(text))
            self._is_after_call = False
        if start < 0:
            self._held = self._held[len(text) :]
            return False
        self._call = Call(self._held[len(text) : start])
        self._held = self._held[start + len(OPEN) :]
        return True

    def _skip_close(self) -> bool:
        """Skip closing tags and white space after a call; False if it is not known yet what comes."""
        self._held = self._held.lstrip()
        while self._held.startswith(CLOSE):
            self._held = self._held[len(CLOSE) :].lstrip()
        return bool(self._held) and not CLOSE.startswith(self._held)

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
            events.append(Content(call.text_before + OPEN))
            self._held = call.text + self._held
        return True


class Call:
    """One call while it is read. `text_before` is the white space before its tag, `text` what has been read of it."""

    def __init__(self, text_before: str) -> None:
        self.text_before = text_before
        self.text = ""
        self.name: str | None = None
        self._scanner = ObjectScanner()
        self._num_taken = 0  # characters of the arguments

    @property
    def has_ended(self) -> bool:
        return self._scanner.state in (State.DONE, State.WRONG)

    def read(self, text: str) -> str:
        """Take the part of `text` that belongs to the object, and return the rest."""
        num_used = self._scanner.feed(text)
        self.text += text[:num_used]
        name = self._scanner.value_of("name") if self.name is None else None
        if isinstance(name, str):
            self.name = name
        return text[num_used:]

    def take_arguments(self) -> str:
        """The part of the arguments that has come since the last call; of anything but an object, when it is complete.

        Arguments that are JSON within a string lose the string. Missing arguments are an empty object.
        """
        key = next((key for key in self._scanner.raw if key in ARGUMENTS), "")
        raw = self._scanner.raw.get(key, "")
        if not raw.startswith("{"):
            if not self.has_ended:
                return ""
            value = self._scanner.value_of(key)
            raw = value if isinstance(value, str) else "{}" if value is None else raw
        text = raw[self._num_taken :]
        self._num_taken = len(raw)
        return text


# ---- JSON that is still growing


class State(Enum):
    START = auto()  # before the object's brace
    KEY = auto()  # before a key
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    AFTER = auto()  # after a value
    DONE = auto()  # after the object's brace
    WRONG = auto()  # not an object after all


class ObjectScanner:
    """Reads one object. `raw` has the text of the values so far, each in the spelling of the source."""

    def __init__(self) -> None:
        self.state = State.START
        self.raw: dict[str, str] = {}  # by key; the value that is being read is in it already
        self.complete: set[str] = set()  # keys whose value has ended
        self._key = ""  # the raw key that is being read, then the key
        self._in_string = self._is_escaped = False
        self._depth = 0  # brackets that are open in the value

    def feed(self, text: str) -> int:
        """Read on; returns how many characters belong to the object: not all where it ends or is wrong."""
        start = 0  # of the part of `text` that belongs to the value being read
        for i, char in enumerate(text):
            before = self.state
            if before is State.IN_VALUE:
                if self._ends_before(char):  # a number, true, false, null
                    self._end_value(text[start:i])
                    self._read_between(char)
                elif self._ends_with(char):
                    self._end_value(text[start : i + 1])
            elif before is State.IN_KEY:
                self._read_key(char)
            else:
                self._read_between(char)
                if self.state is State.IN_VALUE:
                    start = i
                    self._begin_value(char)
            if self.state is State.DONE:
                return i + 1
            if self.state is State.WRONG:
                return i
        if self.state is State.IN_VALUE:
            self._add(text[start:])
        return len(text)

    def value_of(self, key: str) -> Any:
        """The value of a key; None while it is incomplete, or if it is not JSON."""
        if key not in self.complete:
            return None
        try:
            return json.loads(self.raw[key])
        except (ValueError, RecursionError):
            return None

    def _read_between(self, char: str) -> None:
        """A character outside of keys and values."""
        if char in WHITE:
            return
        following = {
            State.START: {"{": State.KEY},
            State.KEY: {'"': State.IN_KEY, "}": State.DONE},
            State.COLON: {":": State.VALUE},
            State.AFTER: {",": State.KEY, "}": State.DONE},
        }
        if self.state is State.VALUE:
            self.state = State.WRONG if char in ",:}]" else State.IN_VALUE
        else:
            self.state = following[self.state].get(char, State.WRONG)

    def _read_key(self, char: str) -> None:
        if char == '"' and not self._is_escaped:
            try:
                self._key = json.loads(f'"{self._key}"')
                self.state = State.COLON
            except ValueError:
                self.state = State.WRONG
            return
        self._is_escaped = char == "\\" and not self._is_escaped
        self._key += char

    def _begin_value(self, char: str) -> None:
        self._in_string, self._is_escaped = char == '"', False
        self._depth = int(char in "{[")

    def _ends_before(self, char: str) -> bool:
        return not self._in_string and not self._depth and char in WHITE + ",}]"

    def _ends_with(self, char: str) -> bool:
        """Whether the value ends with this character, which belongs to it."""
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
            return not self._in_string and not self._depth
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return char in "}]" and not self._depth

    def _add(self, text: str) -> None:
        """More of the value that is being read; of values with the same key the first counts."""
        if self._key not in self.complete:
            self.raw[self._key] = self.raw.get(self._key, "") + text

    def _end_value(self, text: str) -> None:
        self._add(text)
        self.complete.add(self._key)
        self._key, self.state = "", State.AFTER
