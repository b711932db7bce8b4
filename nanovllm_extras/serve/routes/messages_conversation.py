"""Convert a request for a message to a request for a chat.

A turn of the user may contain results of tools and text: each result becomes a message of the role `tool`. Consecutive
messages of one role are one turn, as in Anthropic's API, because many chat templates refuse them.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from nanovllm_extras.serve.anthropic_errors import NO_THREADS
from nanovllm_extras.serve.billing_header import without_billing_header
from nanovllm_extras.serve.bounds import Bounds
from nanovllm_extras.serve.errors import APIError, refuse
from nanovllm_extras.serve.messages.anthropic_protocol import (
    Block,
    Conversation,
    InputMessage,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from nanovllm_extras.serve.messages.protocol import ChatCompletionRequest, GenerationRequest, TokenizeRequest
from nanovllm_extras.serve.routes.responses_conversation import Message

SHARED = GenerationRequest.model_fields.keys() - {"stream_options", "response_format", "n", "stop"}
FIELDS = {"response_format": "output_config", "stop": "stop_sequences", "thinking_token_budget": "thinking"}
"""Name of a chat's field -> name of the message's field."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
ERROR = "Error: "  # before the result of a tool that has failed: chats have no field for this
NOT_STORED = "thread cannot be used: messages are not stored; send the whole conversation"
NO_RESULT = "the last message has a tool_use block, so a message of the user with its tool_result must follow"


def to_chat(body: MessagesRequest, bounds: Bounds, limits_thinking: bool) -> ChatCompletionRequest:
    """Return the request for a chat. Raises APIError 400 or RequestValidationError if it is invalid.

    limits_thinking: whether the engine can end the reasoning of the model. Otherwise a budget has no effect: clients of
    this API give it to any model.
    """
    if body.thread is not None:
        raise APIError(400, NOT_STORED, "thread", NO_THREADS)
    fields: dict[str, object] = {name: getattr(body, name) for name in SHARED if getattr(body, name) is not None}
    fields |= conversation_fields(body, bounds)
    fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "response_format": to_response_format(body)}
    form = body.structured_outputs  # an expression or a grammar excludes a budget
    is_free = form is None or (form.regex is None and form.grammar is None)
    if limits_thinking and is_free and body.thinking is not None and body.thinking.type == "enabled":
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    with errors_of_body():
        return ChatCompletionRequest.model_validate(fields)


def to_tokenize(body: Conversation, bounds: Bounds) -> TokenizeRequest:
    """Return the request to tokenize the conversation. Raises APIError 400 or RequestValidationError."""
    fields = conversation_fields(body, bounds)
    with errors_of_body():
        return TokenizeRequest.model_validate(fields)


@contextmanager
def errors_of_body() -> Iterator[None]:
    """Convert the errors of a chat's model to errors of the request's body."""
    try:
        yield
    except ValidationError as error:
        raise RequestValidationError([one | {"loc": ("body", *one["loc"])} for one in error.errors()]) from error


def conversation_fields(body: Conversation, bounds: Bounds) -> dict[str, object]:
    """Return the fields of a chat that change its prompt."""
    messages = to_messages(body, bounds)
    is_continued = messages[-1]["role"] == "assistant"
    if is_continued and "tool_calls" in messages[-1]:
        raise APIError(400, f"messages: {NO_RESULT}", "messages")
    is_thinking = body.thinking is not None and body.thinking.type != "disabled"
    return {
        "messages": messages,
        "continue_final_message": is_continued,
        "tools": to_tools(body),
        "tool_choice": None if body.tool_choice is None else to_tool_choice(body.tool_choice),
        "reasoning_effort": None if body.output_config is None else body.output_config.effort,
        "chat_template_kwargs": {"enable_thinking": is_thinking, **(body.chat_template_kwargs or {})},
    }


def to_tools(body: Conversation) -> list[dict[str, object]] | None:
    """Return the tools in the format of a chat."""
    tools: list[dict[str, object]] = []
    for tool in body.tools or []:
        function: dict[str, object] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        tools.append({"type": "function", "function": function})
    return tools or None


def to_tool_choice(choice: ToolChoice) -> str | dict[str, object]:
    """Return the tool choice in the format of a chat."""
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return CHOICES[choice.type]


def to_response_format(body: Conversation) -> dict[str, object] | None:
    """Return the `response_format` of the chat; None if there is none."""
    given = None if body.output_config is None else body.output_config.format
    return None if given is None else {"type": "json_schema", "json_schema": {"schema": given.schema_}}


# ---- the messages


def to_messages(body: Conversation, bounds: Bounds) -> list[Message]:
    """Return the messages of the chat, the system prompt first. Raises APIError 400 if there are too many."""
    with refuse("messages"):
        bounds.check_turns(body.messages, "messages")
    messages: list[Message] = []
    if system := system_text(body.system):
        messages.append({"role": "system", "content": system})
    for role, blocks in turns_of(body.messages):
        messages += assistant_messages(blocks) if role == "assistant" else other_messages(role, blocks)
    return messages


def system_text(system: str | list[TextBlock] | None) -> str:
    """Return the system prompt without an agent's billing header."""
    texts = [system or ""] if isinstance(system, str | None) else [block.text for block in system]
    kept = [kept for text in texts if (kept := without_billing_header(text))]
    return "\n".join(kept)


def turns_of(messages: list[InputMessage]) -> Iterator[tuple[str, list[Block]]]:
    """Yield the role and the blocks of each turn."""
    for role, turn in groupby(messages, key=lambda message: message.role):
        yield role, [block for message in turn for block in message.blocks]


def other_messages(role: str, blocks: list[Block]) -> list[Message]:
    """Return the messages of a turn of the user, or of the system. Consecutive texts become one message."""
    messages: list[Message] = []
    for is_text, group in groupby(blocks, key=lambda block: isinstance(block, TextBlock)):
        if is_text:
            texts = [block.text for block in group if isinstance(block, TextBlock)]
            messages.append({"role": role, "content": "\n".join(texts)})
        else:
            messages += [result_message(block) for block in group if isinstance(block, ToolResultBlock)]
    return messages or [{"role": role, "content": ""}]


def result_message(block: ToolResultBlock) -> Message:
    """Return the message with the result of a tool."""
    given = block.content or ""
    # a result has no other blocks than text: `OtherBlock` is refused
    text = given if isinstance(given, str) else "\n".join(one.text for one in given if isinstance(one, TextBlock))
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": (ERROR if block.is_error else "") + text}


def assistant_messages(blocks: list[Block]) -> list[Message]:
    """Return the messages of a turn of the assistant: one, if its order is reasoning, text, calls."""
    messages: list[Message] = [{"role": "assistant", "content": ""}]
    for block in blocks:
        turn = messages[-1]
        if isinstance(block, RedactedThinkingBlock):
            continue
        if not may_follow(turn, block):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        if isinstance(block, ThinkingBlock):
            turn["reasoning"] = turn["reasoning_content"] = turn.get("reasoning", "") + block.thinking
        elif isinstance(block, TextBlock):
            turn["content"] = f"{turn['content']}\n{block.text}" if turn["content"] else block.text
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
    return messages


def may_follow(turn: Message, block: Block) -> bool:
    """Return whether a block belongs to the message, whose order is reasoning, text, calls."""
    if isinstance(block, ToolUseBlock):
        return True
    return "tool_calls" not in turn and not (isinstance(block, ThinkingBlock) and turn["content"])
