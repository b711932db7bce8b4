"""How does a conversation become a prompt? By the chat template of the tokenizer, or by another one.

A template is a program in Jinja, which `transformers` runs in a sandbox. It writes the special tokens itself. Called by
`LLM.chat`; `assembly.py` sets the template that `Config` names.
"""

import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.checks import check_bool, check_dict, check_str

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatOptions:
    """How conversations are rendered; names and defaults are vLLM's. A bad value raises a TypeError or ValueError."""

    add_generation_prompt: bool = True
    """Whether to end with the beginning of the assistant's answer."""
    continue_final_message: bool = False
    """Whether the answer goes on with the last message; needs `add_generation_prompt=False`."""
    chat_template: str | Path | None = None
    """Another template than the tokenizer's: a file, or the template itself."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """What the template may ask for, such as `{"enable_thinking": False}`."""
    tools: SequenceOf[Mapping[str, Any]] | None = None
    """Functions that the model may call, as JSON schemas in OpenAI's form."""

    def __post_init__(self) -> None:
        check_bool("add_generation_prompt", self.add_generation_prompt)
        check_bool("continue_final_message", self.continue_final_message)
        check_str("chat_template", self.chat_template, optional=True, or_path=True)
        check_dict("chat_template_kwargs", self.chat_template_kwargs)
        if self.tools is not None:
            if not isinstance(self.tools, list | tuple):
                raise TypeError(f"tools must be a list of dicts or None, got {self.tools!r}")
            for i, tool in enumerate(self.tools):
                check_dict(f"tools[{i}]", tool)
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False, got True for both")


def set_chat_template(tokenizer: Any, chat_template: str | Path | None) -> None:
    """Give the tokenizer another template than its own; None leaves it its own."""
    if chat_template is None:
        return
    if tokenizer is None:
        raise ValueError(f"chat_template needs a tokenizer, but this model has none; got {str(chat_template)!r}")
    tokenizer.chat_template = read_chat_template(chat_template)


def read_chat_template(chat_template: str | Path) -> str:
    """The template itself: `chat_template`, or the content of the file of this name."""
    if isinstance(chat_template, str) and "{" in chat_template:  # Jinja, and nobody's file
        return chat_template
    file = Path(chat_template).expanduser()
    if not file.is_file():
        raise ValueError(f"chat_template must be a file, or a template in Jinja, got {str(chat_template)!r}")
    return file.read_text(encoding="utf-8")


def render_conversation(tokenizer: Any, messages: Any, options: ChatOptions) -> dict[str, Any]:
    """One conversation as a prompt: `{"prompt": text, "prompt_token_ids": ids}`.

    Raises TypeError for messages of another form, and ValueError if there is no template or if it refuses them.
    """
    from jinja2 import TemplateError

    template = getattr(tokenizer, "chat_template", None)
    if options.chat_template is not None:
        template = read_chat_template(options.chat_template)
    if tokenizer is None or template is None:
        raise ValueError("this model has no chat template; use generate, or give chat_template")
    plain = [plain_message(message) for message in check_messages(messages)]
    try:
        text = tokenizer.apply_chat_template(
            plain,
            tools=options.tools,
            chat_template=template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tokenize=False,
            **(options.chat_template_kwargs or {}),
        )
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"the chat template does not take these messages: {error}") from error
    # the template has written the special tokens already
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def check_messages(messages: Any) -> SequenceOf[Message]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, SequenceOf) or not messages:
        raise TypeError(f"a conversation must be a list of messages, at least one, got {messages!r}")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & set(message):
            raise TypeError(f"a message must be a dict with role and content, got {message!r}")
    return messages


def plain_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: content is one text, the arguments of a tool call are a dict."""
    plain = {**message, "content": text_of(message.get("content"))}
    if message.get("tool_calls"):
        plain["tool_calls"] = [plain_tool_call(call) for call in message["tool_calls"]]
    return plain


def text_of(content: Any) -> Any:
    """The texts of a list of parts, one in a line; a part is `{"type": "text", "text": …}` or a str."""
    if not isinstance(content, list | tuple):
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise TypeError(f"a part of a message's content must be text, got {part!r}")
        texts.append(text)
    return "\n".join(texts)


def plain_tool_call(call: Any) -> Any:
    """OpenAI's form has the arguments as a string of JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call  # the template writes what there is
    return {**call, "function": {**function, "arguments": arguments}}
