"""Which part of an answer is text, and which is a call of a tool?

Qwen, Hermes and others write a call as JSON between tags:

    Let me see. <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

The parser takes the text in pieces as it grows. As soon as the name of a call is known its arguments are handed on as
they come, in the model's own spelling. The events add up to the same whatever the pieces are:

    Content("Let me see."), CallStart(0, "get_weather"), CallArguments(0, '{"city": '), CallArguments(0, '"Oslo"}')

White space between text and tags belongs to neither. What is no call after all, such as `<tool_call>` before something
other than an object, or an object without a name, is text.
"""

from dataclasses import dataclass

from nanovllm.serve.json_scanner import ObjectScanner, State
from nanovllm.serve.reasoning_parser import num_held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
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
        """The answer has ended: what was held back. A call whose name is known stays, cut off as it is."""
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
        if call.name is None:  # no call after all
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
        """What has come of the arguments since the last call: as it is of an object, else once it is complete.

        Arguments that are JSON within a string lose the string; where there are none, they are an empty object.
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
