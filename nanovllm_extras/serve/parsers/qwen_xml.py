"""Parse the tool calls of Qwen3-Coder and Qwen3.5: tags contain the names of parameters, and the values are not JSON.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

A value is converted to JSON according to its type in the function's schema. It is returned when it is complete.
"""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nanovllm_extras.answer_parts.reasoning import ReasoningParser
from nanovllm_extras.serve.parsers.tool_parser import Call, ToolParser

if TYPE_CHECKING:
    from nanovllm_extras.serve.messages.protocol import Function

FUNCTION = re.compile(r"\s*<function=([^\s<>]{1,200})>")
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,200})>")
VALUE_END, FUNCTION_END, CALL_END = "</parameter>", "</function>", "</tool_call>"
MAX_SPACE = 16  # characters
VALUE_END_OR_CALL_END = re.compile(rf"{VALUE_END}|(?={FUNCTION_END}\s{{0,{MAX_SPACE}}}{CALL_END})")
MAX_END = len(FUNCTION_END) + MAX_SPACE + len(CALL_END)
MAX_TAG = 256  # characters
WORDS = {"true": True, "false": False, "null": None, "none": None}


class QwenXml(ToolParser):
    """The format of Qwen3-Coder and of later models."""

    open, close = "<tool_call>", CALL_END
    within_reasoning = ReasoningParser.call_tags  # Qwen3.5 may omit the end of its reasoning before a call

    def new_call(self) -> "XmlCall":
        return XmlCall(self.functions)


class XmlCall(Call):
    """A call with a tag for each parameter."""

    def __init__(self, functions: Mapping[str, "Function"]) -> None:
        super().__init__()
        self._functions = functions
        self._held = ""  # text that has not been parsed
        self._num_searched = 0  # number of held characters in which the end of the value was not found
        self._key: str | None = None  # of the value that is being read
        self._keys: set[str] = set()
        self._new = ""  # arguments that have not been taken
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def read(self, text: str) -> str:
        if self.name is None:
            self.text += text
        self._held += text
        while not self._has_ended and self._read_part():
            pass
        if not self._has_ended:
            return ""
        rest, self._held = self._held, ""
        return rest if self.name is not None else ""

    def take_arguments(self) -> str:
        new, self._new = self._new, ""
        return new

    def _read_part(self) -> bool:
        """Read a tag or a value. Return False if more of the answer is needed."""
        if self._key is not None:
            return self._read_value(self._key)
        found = (FUNCTION if self.name is None else PARAMETER).match(self._held)
        if found is not None:
            self._held = self._held[found.end() :]
            if self.name is None:
                self.name, self._new = found[1], "{"
            else:
                self._key = found[1].strip()
            return True
        rest = self._held.lstrip()
        if self.name is not None and rest.startswith((FUNCTION_END, CALL_END)):  # a model may omit FUNCTION_END
            self._end(rest.removeprefix(FUNCTION_END))
            return True
        expected = ("<function=",) if self.name is None else ("<parameter=", FUNCTION_END, CALL_END)
        is_possible = any(one.startswith(rest) or rest.startswith(one) for one in expected) and len(rest) < MAX_TAG
        if not is_possible or ">" in rest:
            self._end(rest)
        return False

    def _end(self, rest: str) -> None:
        self._has_ended, self._held = True, rest
        if self.name is not None:
            self._new += "}"

    def _read_value(self, key: str) -> bool:
        end = VALUE_END_OR_CALL_END.search(self._held, max(0, self._num_searched - MAX_END))
        self._num_searched = len(self._held)
        if end is None:
            return False
        text, self._held = self._held[: end.start()], self._held[end.end() :]
        self._key, self._num_searched = None, 0
        if key not in self._keys:  # only the first value of a key is used
            value = self._to_json(key, text)
            self._new += (", " if self._keys else "") + f"{json.dumps(key, ensure_ascii=False)}: {value}"
            self._keys.add(key)
        return True

    def _to_json(self, key: str, text: str) -> str:
        """Convert the text of a value to JSON. The newlines next to the tags do not belong to the value."""
        text = text.removeprefix("\n").removesuffix("\n")
        function = self._functions.get(self.name or "")
        parameters = (function.parameters if function is not None else None) or {}
        properties = parameters.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        types, word = types_of(schema), text.strip().lower()
        value: object = text
        if schema is None or "string" in types:
            value = None if "null" in types and word in ("null", "none") else text
        else:
            try:
                value = json.loads(text, parse_constant=lambda _: text)
                return json.dumps(value, ensure_ascii=False, allow_nan=False)  # 1e999 is infinite, and not JSON
            except (ValueError, RecursionError):
                value = WORDS.get(word, text)
        return json.dumps(value, ensure_ascii=False)


def types_of(schema: object) -> set[str]:
    """Return the types that a schema allows, as far as it names them. A text in `enum` counts as "string"."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    types = {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}
    for value in schema["enum"] if isinstance(schema.get("enum"), list) else []:
        types |= {"string"} if isinstance(value, str) else set()
    for keyword in ("anyOf", "oneOf"):
        for part in schema[keyword] if isinstance(schema.get(keyword), list) else []:
            types |= types_of(part)
    return types
