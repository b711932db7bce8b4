"""Find the values of a JSON object that is still growing.

The scanner parses the members of the outermost object. Within their values it only counts brackets outside strings.
"""

import json
from enum import Enum, auto

WHITE = " \t\n\r"


class State(Enum):
    """The position of the scanner."""

    START = auto()  # before the object's brace
    KEY = auto()  # before a key
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    AFTER = auto()  # after a value
    DONE = auto()  # after the object's brace
    WRONG = auto()  # the text is not an object


class ObjectScanner:
    """Reads one object. `raw` has the text of the values so far, exactly as in the source."""

    def __init__(self) -> None:
        self.state = State.START
        self.raw: dict[str, str] = {}  # by key; this includes the value that is being read
        self.complete: set[str] = set()  # keys whose value is complete
        self._key = ""  # while a key is read, its raw text; then the key
        self._in_string = self._is_escaped = False
        self._depth = 0  # brackets that are open in the value

    def feed(self, text: str) -> int:
        """Read text, and return how many of its characters belong to the object.

        This is less than the length of `text` if the object ends, or if the text is not an object.
        """
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

    def value_of(self, key: str) -> object:
        """Return the value of a key; None while it is incomplete, or if it is not JSON."""
        if key not in self.complete:
            return None
        try:
            return json.loads(self.raw[key])
        except (ValueError, RecursionError):
            return None

    def _read_between(self, char: str) -> None:
        """Read a character outside keys and values."""
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
        """Read a character of the value, and return whether the value ends with it."""
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
            return not self._in_string and not self._depth
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return char in "}]" and not self._depth

    def _add(self, text: str) -> None:
        """Append text to the value that is being read. If a key occurs twice, only its first value is kept."""
        if self._key not in self.complete:
            self.raw[self._key] = self.raw.get(self._key, "") + text

    def _end_value(self, text: str) -> None:
        self._add(text)
        self.complete.add(self._key)
        self._key, self.state = "", State.AFTER
