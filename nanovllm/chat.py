"""A conversation becomes a prompt by the chat template of the tokenizer.

A template is a program in Jinja, which `transformers` runs in a sandbox. It writes the special tokens itself. Called by
`LLM.chat`. Options, other templates, content in parts and tools are an extra: `extras/chat_options.py`.
"""

from collections import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.checks import extra

if TYPE_CHECKING:
    from nanovllm.extras.chat_options import ChatOptions

Message = Mapping[str, Any]


def render_conversation(tokenizer: Any, messages: Any, options: "ChatOptions | None" = None) -> dict[str, Any]:
    """One conversation as a prompt: `{"prompt": text, "prompt_token_ids": ids}`.

    Raises TypeError for messages of another form, ValueError if the template is missing or refuses them.
    """
    from jinja2 import TemplateError

    arguments = {"add_generation_prompt": True} if options is None else options.template_arguments()
    template = arguments.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if tokenizer is None or template is None:
        raise ValueError("this model has no chat template; use generate, or give chat_template")
    check_messages(messages)
    if not all(isinstance(message.get("content"), str) and not message.get("tool_calls") for message in messages):
        with extra("extras/chat_options.py", "content in parts or calls of tools"):
            from nanovllm.extras.chat_options import plain_messages
        messages = plain_messages(messages)
    try:
        text = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **arguments)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"the chat template does not take these messages: {error}") from error
    # the template has written the special tokens already
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def check_messages(messages: Any) -> None:
    if isinstance(messages, str) or not isinstance(messages, abc.Sequence) or not messages:
        raise TypeError(f"a conversation must be a list of messages, at least one, got {messages!r}")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & set(message):
            raise TypeError(f"a message must be a dict with role and content, got {message!r}")
