"""Split the text of a chat's answer into reasoning, tool calls and content while it grows.

<think>\\n…\\n</think>      reasoning: `reasoning`, and `reasoning_content`, the name in other servers
<tool_call>…</tool_call>   tool_calls, if the request has tools
the rest                   content

These are the tags of Qwen3; other model families have other ones. `answer_parts/harmony.py` parses gpt-oss.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict
from uuid import uuid4

from nanovllm.prompts import ChatPrompt
from nanovllm_extras.answer_parts.events import CallArguments, CallStart, Content, Event, Reasoning
from nanovllm_extras.answer_parts.harmony import Harmony
from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from nanovllm_extras.requests.lazy_outputs import RequestOutput
from nanovllm_extras.serve.messages.protocol import ChatCompletionRequest
from nanovllm_extras.serve.parsers.parser_registry import Parsers, is_forced, parsers_named
from nanovllm_extras.serve.parsers.tool_parser import ToolParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FunctionPart(TypedDict, total=False):
    name: str
    arguments: str


class CallPart(TypedDict, total=False):
    """The beginning of a call, or more of its arguments."""

    index: int
    id: str
    type: str
    function: FunctionPart


class Delta(TypedDict, total=False):
    """What a chunk of OpenAI's streams adds to an answer."""

    role: str
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[CallPart]


class Answer:
    """Parses one choice of a request. prompt: its text and its token ids."""

    def __init__(
        self, body: ChatCompletionRequest, prompt: ChatPrompt, parsers: Parsers, token_bytes: TokenBytes
    ) -> None:
        functions = [tool.function for tool in body.told_tools]
        self._harmony: Harmony | None = None
        self._tools: ToolParser | None = None
        if parsers.is_harmony and not is_forced(body):
            names = [function.name for function in functions]
            self._harmony = Harmony(token_bytes, prompt["prompt_token_ids"], names)
        elif functions:
            self._tools = parsers.for_request(body)(functions)
        self._calls = self._harmony if self._harmony is not None else self._tools
        self._reasoning = parsers.reasoning_of(body, str(prompt["prompt"]))
        self._max_calls = 1 if body.has_one_call else None
        self._must_call = body.must_call
        self._has_content = False
        self._arguments: list[str] = []  # pieces of the newest call's arguments

    def feed(self, text: str, token_ids: Sequence[int], is_last: bool) -> list[Delta]:
        """Return the deltas of OpenAI's streams for the next piece of the answer: new text, and new tokens.

        Text that may be the start of a tag is held back until more text arrives, or until the last piece.
        """
        if self._harmony is not None:
            return self._deltas(self._harmony.feed(text, token_ids, is_last))
        parts = [self._reasoning.feed(text)] + ([self._reasoning.finish()] if is_last else [])
        deltas: list[Delta] = []
        for reasoning, content in parts:
            if reasoning:
                deltas.append(to_delta(Reasoning(reasoning)))
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
        if self._calls is None:
            return False
        if self._must_call and (self._has_content or self._calls.num_calls == 0):
            return True
        is_told = self._is_told(self._calls.num_calls - 1)
        return self._calls.is_within_call and is_told and not is_json("".join(self._arguments))

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's finish reason for the engine's `reason`: `tool_calls` if the answer has complete calls."""
        has_called = self._calls is not None and self._calls.num_calls > 0
        return "tool_calls" if has_called and reason == "stop" and not self.is_cut_off else reason

    def _is_told(self, index: int) -> bool:
        """Return whether the client gets the call with this index: it may allow only one call."""
        return self._max_calls is None or index < self._max_calls

    def _read(self, text: str) -> list[Delta]:
        if self._tools is not None:
            return self._deltas(self._tools.feed(text))
        return [{"content": text}] if text else []

    def _deltas(self, events: list[Event]) -> list[Delta]:
        deltas = []
        for event in events:
            if isinstance(event, CallStart | CallArguments) and not self._is_told(event.index):
                continue
            if isinstance(event, CallStart):
                self._arguments = []
            elif isinstance(event, CallArguments):
                self._arguments.append(event.text)
            elif isinstance(event, Content):
                self._has_content = True
            deltas.append(to_delta(event))
        return deltas


def parse_output(
    output: RequestOutput,
    tokenizer: "PreTrainedTokenizerBase | None",
    tool_call_parser: str = "hermes",
    reasoning_parser: str = "qwen3",
    tools: Sequence[Mapping[str, object]] = (),
) -> list[dict[str, Any]]:
    """Return the messages of an output of `LLM.chat`, one for each sample, in the form in which the server sends them.

    tools: those that the chat had. Raises KeyError for an unknown name of a parser.
    """
    parsers, token_bytes = parsers_named(tool_call_parser, reasoning_parser), TokenBytes(tokenizer)
    question = {"role": "user", "content": ""}
    body = ChatCompletionRequest.model_validate({"messages": [question], "tools": list(map(dict, tools)) or None})
    prompt: ChatPrompt = {"prompt": output.prompt or "", "prompt_token_ids": output.prompt_token_ids}
    answers = [Answer(body, prompt, parsers, token_bytes) for _ in output.outputs]
    return [
        merge(answer.feed(one.text, one.token_ids, is_last=True))
        for answer, one in zip(answers, output.outputs, strict=True)
    ]


def is_json(text: str) -> bool:
    """Return whether a text is a whole JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def to_delta(event: Event) -> Delta:
    """Return the delta of OpenAI's streams for an event of a parser."""
    if isinstance(event, CallStart):
        function: FunctionPart = {"name": event.name, "arguments": ""}
        call_id = f"call_{uuid4().hex[:24]}"
        return {"tool_calls": [{"index": event.index, "id": call_id, "type": "function", "function": function}]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    if isinstance(event, Reasoning):
        return {"reasoning": event.text, "reasoning_content": event.text}
    return {"content": event.text}


def merge(deltas: list[Delta]) -> dict[str, object]:
    """Return the message that consists of these deltas. Its `content` is None for calls without text."""
    texts = {"content": ""}
    calls: dict[int, CallPart] = {}
    for delta in deltas:
        for name, value in delta.items():
            if isinstance(value, str):
                texts[name] = texts.get(name, "") + value
        for part in delta.get("tool_calls", []):
            call = calls.setdefault(part["index"], part)
            if call is not part:
                call["function"]["arguments"] += part["function"]["arguments"]
    message: dict[str, object] = {"role": "assistant", **texts}
    if calls:
        told = [{key: value for key, value in calls[index].items() if key != "index"} for index in sorted(calls)]
        message |= {"content": texts["content"] or None, "tool_calls": told}
    return message
