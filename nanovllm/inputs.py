"""What may a prompt be, and is it one or a list of them? `engine/intake.py` checks prompts and encodes them."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, TypedDict


class TextPrompt(TypedDict):
    """`TextPrompt(prompt="Paged attention is")`; any dict of this form does as well."""

    prompt: str


class TokenIds(TypedDict):
    prompt_token_ids: SequenceOf[int]


class TokensPrompt(TokenIds, total=False):
    """`TokensPrompt(prompt_token_ids=[1, 2, 3])`; the text, if it is given, is shown in outputs and not encoded."""

    prompt: str


Prompt = str | SequenceOf[int] | Mapping[str, Any] | TextPrompt | TokensPrompt
PromptType = Prompt
"""vLLM's name."""


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
