"""Convert a request for a response to a request for a chat."""

from collections.abc import Iterable
from typing import TypedDict

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from nanovllm_extras.serve.messages.protocol import ChatCompletionRequest, GenerationRequest
from nanovllm_extras.serve.messages.responses_input import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    InputText,
    Item,
    MessageItem,
    MessagePart,
    ReasoningItem,
)
from nanovllm_extras.serve.messages.responses_protocol import (
    AllowedTools,
    ChosenFunction,
    ResponsesRequest,
    qualified,
)

SHARED = GenerationRequest.model_fields.keys() - {"stream_options", "response_format", "n"}
FIELDS = {"messages": "input", "response_format": "text", "max_completion_tokens": "max_output_tokens"}
"""Name of a chat's field -> name of the response's field."""


class Message(TypedDict, total=False):
    """A message of a chat."""

    role: str
    content: str
    tool_call_id: str
    tool_calls: list[dict[str, object]]
    reasoning: str
    reasoning_content: str


def to_chat(body: ResponsesRequest, items: Iterable[Item]) -> ChatCompletionRequest:
    """Return the request for a chat. Raises RequestValidationError if it is invalid.

    items: those of the conversation, including those of earlier responses.
    """
    system: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    fields: dict[str, object] = {name: getattr(body, name) for name in SHARED if getattr(body, name) is not None}
    fields |= {
        "stream": body.stream or body.background,  # a client may read the output so far
        "messages": system + join(items),
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "logprobs": body.wants_logprobs or None,
        "top_logprobs": body.top_logprobs if body.wants_logprobs else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "tools": [to_tool(one.tool.model_dump(exclude_unset=True), one.chat_name) for one in body.functions] or None,
        "tool_choice": to_tool_choice(body),
        "response_format": to_response_format(body),
    }
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError([one | {"loc": ("body", *one["loc"])} for one in error.errors()]) from error


def to_tool(tool: dict[str, object], name: str) -> dict[str, object]:
    """Return a tool in the format of a chat, with the name that it has there. Changes `tool`."""
    return {"type": tool.pop("type"), "function": tool | {"name": name}}


def to_tool_choice(body: ResponsesRequest) -> str | dict[str, object] | None:
    """Return the tool choice in the format of a chat."""
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        tools = [to_tool({"type": "function"}, name) for name in choice.chat_names(body.functions)]
        if not tools:  # none of them can be used
            return "none"
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return to_tool(choice.model_dump(), choice.name) if isinstance(choice, ChosenFunction) else choice


def to_response_format(body: ResponsesRequest) -> dict[str, object] | None:
    """Return the `response_format` of the chat; None if there is none."""
    given = None if body.text is None else body.text.format
    if given is None:
        return None
    if given.schema_ is None:
        return {"type": given.type}
    return {"type": given.type, "json_schema": {"name": given.name, "schema": given.schema_}}


# ---- the items


def join(items: Iterable[Item]) -> list[Message]:
    """Return the messages of a chat. Consecutive reasoning, text and calls become one message of the assistant."""
    messages: list[Message] = []
    turn: Message | None = None  # the assistant's message, to which more items may belong
    for item in items:
        if isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
            turn = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": text_of(item.content)})
            turn = None
        else:
            if turn is None or not may_follow(turn, item):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            add_to_turn(turn, item)
    return messages


def may_follow(turn: Message, item: CallItem | CustomCallItem | ReasoningItem | MessageItem) -> bool:
    """Return whether an item belongs to the turn. The order is reasoning, text, calls."""
    if isinstance(item, CallItem | CustomCallItem):
        return True
    return "tool_calls" not in turn and not turn["content"] and not isinstance(item, ReasoningItem)


def add_to_turn(turn: Message, item: CallItem | CustomCallItem | ReasoningItem | MessageItem) -> None:
    """Add an item to the assistant's message."""
    if isinstance(item, CallItem | CustomCallItem):
        function = {"name": qualified(item.namespace, item.name), "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, ReasoningItem):
        turn["reasoning"] = turn["reasoning_content"] = item.text
    else:
        turn["content"] = text_of(item.content)


def text_of(content: str | list[InputText] | list[MessagePart]) -> str:
    """Return the text of an item's content."""
    if isinstance(content, str):
        return content
    return "".join((part.own_text if isinstance(part, MessagePart) else part.text) or "" for part in content)
