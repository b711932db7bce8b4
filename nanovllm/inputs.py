"""What may a prompt be? The types alone; `engine/intake.py` checks prompts and encodes them."""

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
