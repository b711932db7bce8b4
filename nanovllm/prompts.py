"""Prompts: text, token ids and conversations become token ids that an engine can serve.

A conversation becomes text through the chat template of the tokenizer: a program in Jinja, which `transformers` runs in
a sandbox. It writes the special tokens itself.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

from nanovllm.checks import check_int

Prompt = str | Collection[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}` (or both: then the text is only shown)."""
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


def conversations_of(messages: Any) -> Collection[Any]:
    """Return a list of conversations, for one or for a list of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise TypeError(f"messages must be a list of messages, or a list of such lists, got {messages!r}")
    return [messages] if isinstance(messages[0], Mapping) else messages


def check_messages(messages: object) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise TypeError(f"a conversation must be a list of messages, at least one, got {messages!r}")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & set(message):
            raise TypeError(f"a message must be a dict with role and content, got {message!r}")


# ---- text and token ids


def is_single_prompt(prompts: Any) -> bool:
    """Return whether `prompts` is one prompt: [1, 2] is; ["a"], [[1, 2]], [{…}] and [] are lists of prompts."""
    if isinstance(prompts, str | Mapping):
        return True
    if hasattr(prompts, "ndim"):  # an array or a tensor: a row of ids, or rows of them
        return prompts.ndim == 1
    if isinstance(prompts, bytes) or not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__"):
        raise TypeError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    first = prompts[0] if len(prompts) else []
    is_number = not hasattr(first, "__len__") or getattr(first, "ndim", None) == 0  # arrays of one number have a length
    return is_number and not isinstance(first, str | Mapping)


def encode_prompt(prompt: Prompt, tokenizer: Any, vocab_size: int) -> tuple[str | None, list[int]]:
    """Return the text of a prompt (None if there is none) and its token ids. TypeError or ValueError for a bad one."""
    text: Any = None
    token_ids: Any = prompt
    if isinstance(prompt, Mapping):
        text, given = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if isinstance(given, str):
            raise TypeError(f"prompt_token_ids must be a list of token ids, got {given!r}")
        token_ids = text if given is None else given
    if isinstance(token_ids, str):
        if tokenizer is None:
            raise ValueError("this model has no tokenizer, so a prompt must be token ids, got text")
        for i, character in enumerate(token_ids):
            if "\ud800" <= character <= "\udfff":
                raise ValueError(f"a prompt must not hold half of a surrogate pair, got {character!r} at {i}")
        text, token_ids = token_ids, tokenizer.encode(token_ids)
    return text, check_prompt(token_ids, vocab_size)


def check_prompt_len(num_tokens: int, max_model_len: int, capacity: int, block_size: int, options: str) -> None:
    """Raise ValueError if a prompt is too long for the model or the whole KV cache, which `options` enlarge."""
    if num_tokens > max_model_len - 1:
        raise ValueError(f"the prompt has {num_tokens} tokens; at most {max_model_len - 1} are allowed "
                         f"(max_model_len {max_model_len}, less one for the output)")  # fmt: skip
    if num_tokens > capacity:
        raise ValueError(f"the prompt has {num_tokens} tokens; the whole KV cache holds {capacity} "
                         f"({capacity // block_size} blocks of {block_size}): give more {options}")  # fmt: skip


def check_prompt(token_ids: Any, vocab_size: int) -> list[int]:
    """Return token ids as a list of ints in [0, vocab_size). An error names the first bad one."""
    if (
        isinstance(token_ids, bytes | Mapping)
        or not hasattr(token_ids, "__iter__")
        or getattr(token_ids, "ndim", 1) == 0
    ):
        allowed = "a str, a list of token ids, or a dict with prompt or prompt_token_ids"
        raise TypeError(f"a prompt must be {allowed}, got {type(token_ids).__name__}")
    token_ids = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    if not token_ids:
        raise ValueError("the prompt is empty; it must have at least 1 token")
    if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) >= vocab_size:
        for i, token_id in enumerate(token_ids):
            check_int(f"prompt_token_ids[{i}]", token_id, 0, maximum=vocab_size - 1)
    return list(map(int, token_ids))
