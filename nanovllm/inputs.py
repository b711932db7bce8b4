"""The forms of a prompt, and of a list of prompts. `input_processor.py` checks the content and encodes it."""

from collections.abc import Collection, Mapping
from typing import Any, TypedDict

from nanovllm.checks import translate_options


class TextPrompt(TypedDict):
    """`TextPrompt(prompt="Paged attention is")`; any dict of this form does as well."""

    prompt: str


class TokenIds(TypedDict):
    prompt_token_ids: Collection[int]


class TokensPrompt(TokenIds, total=False):
    """`TokensPrompt(prompt_token_ids=[1, 2, 3])`; the text, if it is given, is shown in outputs and not encoded."""

    prompt: str


Prompt = str | Collection[int] | Mapping[str, Any] | TextPrompt | TokensPrompt
PromptType = Prompt
"""vLLM's name."""

PROMPT_KEYS = ("prompt", "prompt_token_ids")


def check_keys(prompt: Mapping[str, Any]) -> None:
    """Of a prompt dict; vLLM's other keys may be there at their neutral values."""
    others = {key: value for key, value in prompt.items() if key not in PROMPT_KEYS}
    try:
        translate_options(others, PROMPT_KEYS, "request")
    except TypeError as error:
        raise ValueError(f"a prompt dict has the keys prompt or prompt_token_ids: {error}") from None


def is_single_prompt(prompts: Any) -> bool:
    """[1, 2] is one prompt of token ids; ["a"], [[1, 2]], [{…}] and [] are lists of prompts."""
    if isinstance(prompts, str | Mapping):
        return True
    if hasattr(prompts, "ndim"):  # an array or a tensor: a row of ids, or rows of them
        return prompts.ndim == 1
    if isinstance(prompts, bytes) or not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__"):
        raise TypeError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    return len(prompts) > 0 and not isinstance(prompts[0], str | Mapping) and not hasattr(prompts[0], "__len__")


def spread(name: str, value: Any, kind: type, default: Any, num_prompts: int) -> list[Any]:
    """One for each prompt, given one for all, a list, or None for the default."""
    if value is None:
        return [default] * num_prompts
    if isinstance(value, kind) and not isinstance(value, bool):
        return [value] * num_prompts
    if not isinstance(value, list | tuple) or not all(isinstance(one, kind) for one in value):
        raise TypeError(f"{name} must be a {kind.__name__}, a list of them, or None, got {value!r}")
    if len(value) != num_prompts:
        raise ValueError(f"there must be one {name} for each prompt, got {len(value)} for {num_prompts} prompts")
    return list(value)
