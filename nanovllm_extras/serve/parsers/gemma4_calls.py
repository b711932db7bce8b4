"""Parse the tool calls of Gemma 4: keys have no quotes, and a special token, here written as `"`, delimits strings.

    <|tool_call>call:get_weather{city:"Oslo",days:[1,2],units:{wind:"m/s"}}<tool_call|>

The arguments are converted to JSON as they arrive: `{"city": "Oslo", "days": [1, 2], "units": {"wind": "m/s"}}`.
Strings have no escapes, and end at `<tool_call|>` if the last quote is missing. Malformed parts are skipped or become
strings, so the arguments of a complete call are JSON.
"""

import json
import re
from dataclasses import dataclass

from nanovllm_extras.answer_parts.reasoning import Gemma4Reasoning, num_held_back
from nanovllm_extras.serve.parsers.tool_parser import Call, ToolParser

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = "call:"
HEAD = re.compile(r"\s*call:\s*([^\s{}<>]{1,200})\s*\{")
MAX_HEAD = 256  # characters before the arguments
PART = re.compile(r"[^]{}[,:<]+|.", re.DOTALL)  # text, or one character that may end it
STRING_END = re.compile(rf"{re.escape(QUOTE)}|(?={re.escape(CLOSE)})")  # a model may omit the last quote
CLOSING = {"{": "}", "[": "]"}
WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


class Gemma4(ToolParser):
    """The format of Gemma 4."""

    open, close = OPEN, CLOSE
    has_special_tokens = True
    within_reasoning = Gemma4Reasoning.call_tags

    def new_call(self) -> "Gemma4Call":
        return Gemma4Call()


class Gemma4Call(Call):
    """A call with arguments in Gemma's notation."""

    def __init__(self) -> None:
        super().__init__()
        self._held = ""  # text that has not been parsed
        self._arguments = Notation()
        self._is_text = False

    @property
    def has_ended(self) -> bool:
        return self._is_text or self._arguments.has_ended

    def read(self, text: str) -> str:
        self._held += text
        if self.name is None:
            self.text += text
            found = HEAD.match(self._held)
            if found is None:
                beginning = self._held.lstrip()
                is_possible = beginning.startswith(CALL) or CALL.startswith(beginning)
                self._is_text = not is_possible or CLOSE in beginning or len(beginning) > MAX_HEAD
                return ""
            self.name, self._held = found[1], self._held[found.end(1) :].lstrip()
        self._held = self._arguments.read(self._held)
        if not self.has_ended:
            return ""
        rest, self._held = self._held, ""
        return rest

    def take_arguments(self) -> str:
        new, self._arguments.json = self._arguments.json, ""
        return new


@dataclass
class Level:
    """An object or a list that is being read. text: the key or the value so far, if it is not a string."""

    bracket: str
    key: str | None = None
    text: str = ""
    has_value: bool = False  # whether the value of this item has been written
    is_empty: bool = True


class Notation:
    """Converts an object in Gemma's notation to JSON. `json` is the part that has been written and not been taken."""

    def __init__(self) -> None:
        self.json = ""
        self.has_ended = False
        self._levels: list[Level] = []  # the innermost is the last
        self._is_string = False
        self._is_shown = False  # whether the string is a value; otherwise, it is a part of the level's text

    def read(self, text: str) -> str:
        """Read a text, and return the part that needs more text, or that comes after the object."""
        start = 0
        while start < len(text) and not self.has_ended:
            end = self._read_string(text, start) if self._is_string else self._read_part(text, start)
            if end == start:
                break
            start = end
        return text[start:]

    def _read_string(self, text: str, start: int) -> int:
        found = STRING_END.search(text, start)
        self._is_string = found is None
        tail = text[max(start, len(text) - len(CLOSE)) :]
        end = found.start() if found else len(text) - max(num_held_back(tail, QUOTE), num_held_back(tail, CLOSE))
        if self._is_shown:
            self.json += json.dumps(text[start:end], ensure_ascii=False)[1:-1] + ("" if self._is_string else '"')
        else:
            self._levels[-1].text += text[start:end]
        if found is None:
            return end
        return found.end() if found[0] else self._read_tag(text, end)

    def _read_part(self, text: str, start: int) -> int:
        found = PART.match(text, start)
        assert found is not None
        part, end = found[0], found.end()
        if part == "<":
            if any(tag.startswith(text[start : start + len(tag)]) for tag in (QUOTE, CLOSE)):
                return self._read_tag(text, start)
        elif part in "{[" and (not self._levels or self._takes_value):
            self._begin_value(part)
            self._levels.append(Level(part))
            return end
        level = self._levels[-1]
        if part == CLOSING[level.bracket]:
            self._close()
        elif part == ",":
            self._end_item()
        elif part == ":" and level.bracket == "{" and level.key is None:
            level.key, level.text = level.text.strip(), ""
        else:
            level.text += part
        return end

    def _read_tag(self, text: str, start: int) -> int:
        """Read a tag, if the text has the whole of it."""
        if text.startswith(CLOSE, start):  # brackets are missing
            while self._levels:
                self._close()
            return start
        if not text.startswith(QUOTE, start):
            return start
        self._is_string, self._is_shown = True, self._takes_value
        if self._is_shown:
            self._begin_value('"')
        return start + len(QUOTE)

    @property
    def _takes_value(self) -> bool:
        """Whether a string, an object or a list may begin here."""
        level = self._levels[-1]
        return not level.has_value and not level.text.strip() and (level.bracket == "[" or level.key is not None)

    def _begin_value(self, written: str) -> None:
        """Write a value, or its beginning, after the key."""
        if self._levels:
            level = self._levels[-1]
            self.json += "" if level.is_empty else ", "
            if level.key is not None:
                self.json += json.dumps(level.key, ensure_ascii=False) + ": "
            level.has_value, level.is_empty = True, False
        self.json += written

    def _end_item(self) -> None:
        level = self._levels[-1]
        is_missing = level.key is None if level.bracket == "{" else not level.text.strip()
        if not level.has_value and not is_missing:
            self._begin_value(to_json(level.text.strip()))
        level.key, level.text, level.has_value = None, "", False

    def _close(self) -> None:
        self._end_item()
        self.json += CLOSING[self._levels.pop().bracket]
        self.has_ended = not self._levels


def to_json(text: str) -> str:
    """Return the JSON of a value that is not between quotes: a number, true, false or null; else a string."""
    word = WORDS.get(text.lower()) if text else "null"
    if word is not None:
        return word
    try:
        if isinstance(json.loads(text, parse_constant=lambda _: None), int | float | str):
            return text
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)
