"""Render conversations beyond plain text: template options, another template, content in parts, and tool calls.

The chat template shows all of these to the model. `full_llm.py` and `full_engine.py` call this module.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checks import check_bool
from nanovllm.prompts import ChatPrompt, Message, check_messages, render_conversation
from nanovllm_extras.options.option_checks import check_dict, check_optional_str, takes_vllm_options
from nanovllm_extras.options.surrogates import check_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SHOWN = 200  # characters of a template in an error


@takes_vllm_options("request")
@dataclass(frozen=True)
class ChatOptions:
    """Options for rendering conversations, with vLLM's names and defaults. Raises TypeError or ValueError."""

    add_generation_prompt: bool = True
    """Whether the prompt ends with the start of the assistant's answer."""
    continue_final_message: bool = False
    """Whether the answer continues the last message; needs `add_generation_prompt=False`."""
    chat_template: str | Path | None = None
    """A template that replaces the tokenizer's: a file, or the template itself."""
    chat_template_kwargs: Mapping[str, object] | None = None
    """Variables for the template, such as `{"enable_thinking": False}`."""
    tools: Collection[Mapping[str, object]] | None = None
    """Functions that the model may call, as JSON schemas in OpenAI's form."""

    def __post_init__(self) -> None:
        check_bool("add_generation_prompt", self.add_generation_prompt)
        check_bool("continue_final_message", self.continue_final_message)
        check_optional_str("chat_template", self.chat_template, or_path=True)
        check_dict("chat_template_kwargs", self.chat_template_kwargs)
        if self.tools is not None:
            check_tools(self.tools)
        for name in ("chat_template", "chat_template_kwargs", "tools"):
            check_texts(name, getattr(self, name))
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False, got True for both")

    def template_arguments(self, tokenizer: object = None) -> dict[str, object]:
        """Return the arguments of the tokenizer's `apply_chat_template`. Raises ValueError if a name is given twice."""
        arguments: dict[str, object] = {
            "tools": self.tools,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        more = self.chat_template_kwargs or {}
        if twice := more.keys() & {*arguments, "chat_template"}:
            raise ValueError(
                f"chat_template_kwargs must not contain names of other options, got {', '.join(sorted(twice))}"
            )
        if self.chat_template is not None:
            arguments["chat_template"] = read_chat_template(self.chat_template, tokenizer)
        return {**arguments, **more}


# ---- another template


def set_chat_template(tokenizer: "PreTrainedTokenizerBase | None", chat_template: str | Path) -> None:
    """Replace the tokenizer's chat template. Raises ValueError if it is invalid, or if there is no tokenizer."""
    if tokenizer is None:
        raise ValueError(
            f"chat_template needs a tokenizer, but this model has none; got {str(chat_template)!r}: leave out "
            f"chat_template, or name a tokenizer by `tokenizer`, without skip_tokenizer_init"
        )
    tokenizer.chat_template = check_chat_template(chat_template, tokenizer)


def check_chat_template(chat_template: str | Path, tokenizer: object = None) -> str:
    """Return the template, as `read_chat_template` does. Raises ValueError if it is empty or not valid Jinja."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template  # it knows more tags than Jinja

    text, name = read_chat_template(chat_template, tokenizer), shorten(str(chat_template))
    if not text.strip():
        raise ValueError(f"chat_template must not be empty, got {name!r}")
    try:
        render_jinja_template([], chat_template=text)  # compiles the template, and renders no conversation
    except TemplateSyntaxError as error:
        raise ValueError(f"chat_template must be valid Jinja, got {name!r}: line {error.lineno}: {error}") from error
    except (RecursionError, SyntaxError, ValueError, OverflowError) as error:  # raised by Python's compiler
        raise ValueError(f"chat_template must be valid Jinja, got {name!r}: {error}") from error
    return text


def read_chat_template(chat_template: str | Path, tokenizer: object = None) -> str:
    """Return the template: the tokenizer's of this name, `chat_template` itself if it is Jinja, or a file's content."""
    named = getattr(tokenizer, "chat_template", None)
    if isinstance(named, Mapping) and chat_template in named:
        return named[str(chat_template)]
    if isinstance(chat_template, str) and "{" in chat_template:  # Jinja, not a file name
        return chat_template
    try:
        return Path(chat_template).expanduser().read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"chat_template must be encoded in UTF-8, got {str(chat_template)!r}: {error}") from error
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: there is no such home folder
        name = shorten(str(chat_template))
        raise ValueError(f"chat_template must be a file, or a template in Jinja, got {name!r}: {error}") from error


def shorten(text: str) -> str:
    """Return `text`, or its beginning if it is long."""
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


# ---- messages


def render_chat(tokenizer: object, messages: Iterable[Message], options: ChatOptions = ChatOptions()) -> ChatPrompt:
    """Return one conversation as a prompt, as the core does, with content in parts and with tools."""
    check_messages(messages)
    if not all(isinstance(message.get("content"), str) and not message.get("tool_calls") for message in messages):
        messages = plain_messages(messages)
    check_texts("messages", messages)
    return render_conversation(tokenizer, messages, **options.template_arguments(tokenizer))


def plain_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages as templates expect them: `content` is one text, the arguments of tool calls are dicts."""
    plain = [{**message, "content": text_of(message.get("content"))} for message in messages]
    for message in plain:
        if message.get("tool_calls"):
            message["tool_calls"] = [plain_tool_call(call) for call in message["tool_calls"]]
    return plain


def text_of(content: object) -> object:
    """Return `content` with a list of parts joined by newlines.

    A part is a str, `{"type": "text", "text": …}`, or `{"type": "refusal", "refusal": …}` in an earlier answer.
    """
    if not isinstance(content, list | tuple):
        return content
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part.get(kind) if isinstance(part, Mapping) and kind in ("text", "refusal") else part
        if not isinstance(text, str):
            raise TypeError(f"a part of a message's content must be text, got {part!r}")
        texts.append(text)
    return "\n".join(texts)


# ---- tools


def check_tools(tools: object) -> None:
    """Raise TypeError if `tools` is not a list of dicts: JSON schemas in OpenAI's form."""
    if not isinstance(tools, list | tuple):
        raise TypeError(f"tools must be a list of dicts or None, got {tools!r}")
    for i, tool in enumerate(tools):
        check_dict(f"tools[{i}]", tool)


def plain_tool_call(call: object) -> object:
    """Return a tool call with its arguments as a dict. In OpenAI's form they are a string of JSON."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call  # the template writes the arguments as they are
    return {**call, "function": {**function, "arguments": arguments}}
