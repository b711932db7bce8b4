"""Parse the tool calls of DeepSeek V3 and V3.1: each call is between tags, which are special tokens.

The examples write these tokens as `<…>`:

V3      <calls begin><call begin>function<sep>get_weather
        ```json
        {"city": "Oslo"}
        ```<call end><calls end>
V3.1    <calls begin><call begin>get_weather<sep>{"city": "Oslo"}<call end><calls end>
"""

import re

from nanovllm_extras.answer_parts.reasoning import num_held_back
from nanovllm_extras.serve.parsers.tool_parser import Call, Spelling, ToolParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
MAX_HEAD = 256  # characters before the arguments


class DeepSeekCall(Call):
    """A call with JSON arguments between two texts.

    head: matches the text before the arguments; its group is the function's name. stop: the text after the arguments.
    """

    def __init__(self, head: re.Pattern[str], stop: str) -> None:
        super().__init__()
        self._head, self._stop = head, stop
        self._has_ended = False
        self._held = ""  # text that may be the beginning of `stop`
        self._new = ""  # arguments that have not been taken
        self._is_empty = True

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def read(self, text: str) -> str:
        if self.name is None:
            self.text += text
            found = self._head.match(self.text)
            if found is None:
                self._has_ended = CALL_END in self.text or len(self.text) > MAX_HEAD
                return ""
            self.name, text = found[1], self.text[found.end() :]
        self._held += text
        end = self._held.find(self._stop)
        self._has_ended = end >= 0
        if not self._has_ended:
            end = len(self._held) - num_held_back(self._held, self._stop)
        self._new += self._held[:end]
        self._held = self._held[end:]
        return self._held.removeprefix(self._stop) if self._has_ended else ""

    def take_arguments(self) -> str:
        new, self._new = self._new.lstrip() if self._is_empty else self._new, ""
        if self._is_empty and self._has_ended and not new:
            new = "{}"
        self._is_empty = self._is_empty and not new
        return new


class DeepSeekV3(ToolParser):
    """The format of DeepSeek V3."""

    open, close, skipped = CALL_BEGIN, CALL_END, (CALLS_BEGIN, CALLS_END)
    head, stop = f"{CALL_BEGIN}function{SEP}NAME\n```json\n", "\n```"
    spelling = Spelling(head, stop + CALL_END, "\n", CALLS_BEGIN, CALLS_END)
    has_special_tokens = True

    def new_call(self) -> DeepSeekCall:
        return DeepSeekCall(re.compile(rf"\s{{0,16}}function{SEP}([^\s<]{{1,64}})\s{{0,16}}```json\n"), self.stop)


class DeepSeekV31(ToolParser):
    """The format of DeepSeek V3.1."""

    open, close, skipped = CALL_BEGIN, CALL_END, (CALLS_BEGIN, CALLS_END)
    spelling = Spelling(f"{CALL_BEGIN}NAME{SEP}", CALL_END, "", CALLS_BEGIN, CALLS_END)
    has_special_tokens = True

    def new_call(self) -> DeepSeekCall:
        return DeepSeekCall(re.compile(rf"\s{{0,16}}([^\s<]{{1,64}}){SEP}"), CALL_END)
