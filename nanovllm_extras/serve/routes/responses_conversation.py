"""Convert a request for a response to a request for a chat."""

from collections.abc import Iterator
from typing import TypedDict

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from nanovllm_extras.serve.bounds import Bounds
from nanovllm_extras.serve.errors import APIError, refuse
from nanovllm_extras.serve.messages.protocol import ChatCompletionRequest, GenerationRequest
from nanovllm_extras.serve.messages.responses_protocol import (
    ITEMS,
    AllowedTools,
    CallItem,
    CallOutputItem,
    ChosenFunction,
    InputText,
    Item,
    MessageItem,
    MessagePart,
    ReasoningItem,
    ResponsesRequest,
    qualified,
)

SHARED = GenerationRequest.model_fields.keys() - {"stream_options", "response_format", "n"}
NO_REFERENCES = "items are not stored, so they cannot be referenced; clients send the items themselves with store=false"
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


def to_chat(body: ResponsesRequest, bounds: Bounds) -> ChatCompletionRequest:
    """Return the request for a chat. Raises APIError 400 or RequestValidationError if it is invalid."""
    fields: dict[str, object] = {name: getattr(body, name) for name in SHARED if getattr(body, name) is not None}
    fields |= {
        "messages": to_messages(body, bounds),
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


# ---- the input


def to_messages(body: ResponsesRequest, bounds: Bounds) -> list[Message]:
    """Return the messages of the chat. Raises APIError 400 or RequestValidationError if the input is invalid."""
    with refuse("input"):
        bounds.check_turns([] if isinstance(body.input, str) else body.input, "input")
    messages: list[Message] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    return messages + join(read_item(i, given) for i, given in enumerate(body.input))


def read_item(index: int, given: dict[str, object]) -> Item:
    """Return the item number `index` of the input, checked. Raises APIError 400 or RequestValidationError."""
    kind = given.get("type", "message")
    if not isinstance(kind, str) or kind not in ITEMS:
        stored = f" ({NO_REFERENCES})" if kind == "item_reference" else ""
        raise APIError(400, f"input.{index}.type must be one of {', '.join(ITEMS)}{stored}, got {kind!r}", "input")
    try:
        return ITEMS[kind].model_validate(given)
    except ValidationError as error:
        errors = [one | {"loc": ("body", "input", index, *one["loc"])} for one in error.errors()]
        raise RequestValidationError(errors) from error


def join(items: Iterator[Item]) -> list[Message]:
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


def may_follow(turn: Message, item: CallItem | ReasoningItem | MessageItem) -> bool:
    """Return whether an item belongs to the turn. The order is reasoning, text, calls."""
    if isinstance(item, CallItem):
        return True
    return "tool_calls" not in turn and not turn["content"] and not isinstance(item, ReasoningItem)


def add_to_turn(turn: Message, item: CallItem | ReasoningItem | MessageItem) -> None:
    """Add an item to the assistant's message."""
    if isinstance(item, CallItem):
        function = {"name": qualified(item.namespace, item.name), "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, ReasoningItem):
        turn["reasoning"] = turn["reasoning_content"] = "".join(part.text for part in item.content or [])
    else:
        turn["content"] = text_of(item.content)


def text_of(content: str | list[InputText] | list[MessagePart]) -> str:
    """Return the text of an item's content."""
    if isinstance(content, str):
        return content
    return "".join((part.own_text if isinstance(part, MessagePart) else part.text) or "" for part in content)
