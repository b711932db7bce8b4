"""The forms of a prompt, by vLLM's names. `input_processor.py` checks the content and encodes it."""

from collections.abc import Collection, Mapping
from typing import TypedDict

from nanovllm.prompts import Prompt
from nanovllm_extras.options.option_checks import translate_options
from nanovllm_extras.options.surrogates import is_utf8


class Salted(TypedDict, total=False):
    cache_salt: str
    """Only prompts with the same salt share cached blocks (`cache_salt.py`)."""


class TextPrompt(Salted):
    """`TextPrompt(prompt="Paged attention is")`; any dict of this form does as well."""

    prompt: str


class TokenIds(Salted):
    prompt_token_ids: Collection[int]


class TokensPrompt(TokenIds, total=False):
    """`TokensPrompt(prompt_token_ids=[1, 2, 3])`; the text, if it is given, is shown in outputs and not encoded."""

    prompt: str


PromptType = Prompt | TextPrompt | TokensPrompt
"""vLLM's name."""

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


def check_keys(prompt: Mapping[str, object]) -> None:
    """Check the keys and the salt of a prompt dict. vLLM's other keys are accepted at their neutral values."""
    others = {key: value for key, value in prompt.items() if key not in PROMPT_KEYS}
    try:
        translate_options(others, PROMPT_KEYS, "request")
    except TypeError as error:
        raise ValueError(f"a prompt dict has the keys prompt or prompt_token_ids: {error}") from None
    check_salt(prompt.get("cache_salt"))


def check_salt(cache_salt: object) -> None:
    """Raise unless `cache_salt` is a text that is not empty, or None. A salt is a secret, so no error shows it."""
    if not isinstance(cache_salt, str | None):
        raise TypeError(f"cache_salt must be a str or None, got {type(cache_salt).__name__}")
    if cache_salt == "":
        raise ValueError("cache_salt must not be empty, got ''; leave it out for no salt")
    if cache_salt is not None and not is_utf8(cache_salt):
        raise ValueError("cache_salt must be valid UTF-8, but it has half of a surrogate pair")
