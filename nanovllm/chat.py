"""A conversation becomes a prompt through the chat template of the tokenizer.

A template is a program in Jinja, which `transformers` runs in a sandbox. It writes the special tokens itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

Message = Mapping[str, Any]
"""`{"role": "user", "content": "…"}`"""


class ChatPrompt(TypedDict):
    """A rendered conversation, for `generate` and `stream`."""

    prompt: str
    prompt_token_ids: list[int]


def render_conversation(tokenizer: Any, messages: Any, **arguments: Any) -> ChatPrompt:
    """Return one conversation as a prompt: `{"prompt": text, "prompt_token_ids": ids}`.

    arguments: of the tokenizer's `apply_chat_template`. TypeError for messages of another form, ValueError if
    the template is missing or does not accept them.
    """
    from jinja2 import TemplateError

    if tokenizer is None or (arguments.get("chat_template") or getattr(tokenizer, "chat_template", None)) is None:
        raise ValueError("this model has no chat template; use generate, or give chat_template")
    check_messages(messages)
    try:
        text = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **arguments)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"the chat template does not accept these messages: {error}") from error
    # the template has written the special tokens already
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def check_messages(messages: object) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise TypeError(f"a conversation must be a list of messages, at least one, got {messages!r}")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & set(message):
            raise TypeError(f"a message must be a dict with role and content, got {message!r}")
