"""Split the text of a chat's answer into reasoning, tool calls and content while it grows.

<think>\\n…\\n</think>      reasoning: `reasoning`, and `reasoning_content`, the name in other servers
<tool_call>…</tool_call>   tool_calls, if the request has tools; other model families use other formats
the rest                   content
"""

import json
from typing import Any
from uuid import uuid4

from nanovllm.extras.serve.parsers.parser_registry import Parsers
from nanovllm.extras.serve.parsers.reasoning import OPEN
from nanovllm.extras.serve.parsers.tool_parser import CallArguments, CallStart, Content, Event
from nanovllm.extras.serve.protocol import ChatCompletionRequest


class Answer:
    """Parses the text of one choice of a request."""

    def __init__(self, body: ChatCompletionRequest, prompt: str, parsers: Parsers) -> None:
        self._reasoning = parsers.reasoning_of(body, starts_inside=prompt.rstrip().endswith(OPEN))
        functions = [tool.function for tool in body.told_tools]
        self._tools = parsers.for_request(body)(functions) if functions else None
        self._max_calls = 1 if body.has_one_call else None
        self._must_call = body.must_call
        self._has_content = False
        self._arguments: list[str] = []  # pieces of the newest call's arguments

    def feed(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """Return the deltas of OpenAI's streams for `text`, the next piece of the answer.

        Text that may be the start of a tag is held back until more text arrives, or until the last piece.
        """
        parts = [self._reasoning.feed(text)] + ([self._reasoning.finish()] if is_last else [])
        deltas: list[dict[str, Any]] = []
        for reasoning, content in parts:
            if reasoning:
                deltas.append({"reasoning": reasoning, "reasoning_content": reasoning})
            deltas += self._read(content)
        if is_last and self._tools is not None:
            deltas += self._deltas(self._tools.finish())
        return deltas

    @property
    def is_cut_off(self) -> bool:
        """Whether the whole answer ends within a call: a stop string or a stop token can end it there.

        A model may omit the end of a call, so a call is complete if its arguments are. If calls are forced, the answer
        consists of calls, and any other text is the beginning of a call.
        """
        if self._tools is None:
            return False
        if self._must_call and (self._has_content or self._tools.num_calls == 0):
            return True
        is_told = self._max_calls is None or self._tools.num_calls <= self._max_calls
        return self._tools.is_within_call and is_told and not is_json("".join(self._arguments))

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's finish reason for the engine's `reason`: `tool_calls` if the answer has complete calls."""
        has_called = self._tools is not None and self._tools.num_calls > 0
        return "tool_calls" if has_called and reason == "stop" and not self.is_cut_off else reason

    def _read(self, text: str) -> list[dict[str, Any]]:
        if self._tools is not None:
            return self._deltas(self._tools.feed(text))
        return [{"content": text}] if text else []

    def _deltas(self, events: list[Event]) -> list[dict[str, Any]]:
        deltas = []
        for event in events:
            if not isinstance(event, Content) and self._max_calls is not None and event.index >= self._max_calls:
                continue
            if isinstance(event, CallStart):
                self._arguments = []
            elif isinstance(event, CallArguments):
                self._arguments.append(event.text)
            else:
                self._has_content = True
            deltas.append(to_delta(event))
        return deltas


def is_json(text: str) -> bool:
    """Return whether a text is a whole JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def to_delta(event: Event) -> dict[str, Any]:
    """Return the delta of OpenAI's streams for an event of a parser."""
    if isinstance(event, CallStart):
        call = {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": {"name": event.name, "arguments": ""}}
        return {"tool_calls": [{"index": event.index, **call}]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return {"content": event.text}


def merge(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that consists of these deltas. Its `content` is None for calls without text."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name, value in delta.items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            for part in value:
                call = calls.setdefault(part["index"], {key: part[key] for key in part if key != "index"})
                if call["function"] is not part["function"]:
                    call["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": [calls[index] for index in sorted(calls)]}
    return message
