"""The forms of a prompt, by vLLM's names. `input_processor.py` checks the content and encodes it."""

from collections.abc import Collection, Mapping
from typing import Any, TypedDict

from nanovllm.extras.option_checks import translate_options
from nanovllm.request import Prompt


class TextPrompt(TypedDict):
    """`TextPrompt(prompt="Paged attention is")`; any dict of this form does as well."""

    prompt: str


class TokenIds(TypedDict):
    prompt_token_ids: Collection[int]


class TokensPrompt(TokenIds, total=False):
    """`TokensPrompt(prompt_token_ids=[1, 2, 3])`; the text, if it is given, is shown in outputs and not encoded."""

    prompt: str


PromptType = Prompt | TextPrompt | TokensPrompt
"""vLLM's name."""

PROMPT_KEYS = ("prompt", "prompt_token_ids")


def check_keys(prompt: Mapping[str, Any]) -> None:
    """Check the keys of a prompt dict. vLLM's other keys are accepted at their neutral values."""
    others = {key: value for key, value in prompt.items() if key not in PROMPT_KEYS}
    try:
        translate_options(others, PROMPT_KEYS, "request")
    except TypeError as error:
        raise ValueError(f"a prompt dict has the keys prompt or prompt_token_ids: {error}") from None
