"""Cut texts at their end, so that a prompt has at most a number of tokens.

The text is cut and not the tokens, so that special tokens and the rest of a template stay at the end of the prompt.
"""

from collections.abc import Callable
from typing import Any

HALF_CHARACTER = "\ufffd"  # what the bytes of a character become whose last ones have been cut off


def token_limit(truncate_prompt_tokens: int | None, max_model_len: int, capacity: int) -> int | None:
    """Return the maximum number of tokens of a prompt; None if it is not truncated. -1 is what the context holds.

    capacity: the maximum number of tokens of one sequence in the whole KV cache
    """
    if truncate_prompt_tokens is None:
        return None
    longest = min(max_model_len - 1, capacity)
    return longest if truncate_prompt_tokens < 0 else min(truncate_prompt_tokens, longest)


def cut_to_fit(tokenizer: Any, text: str, count: Callable[[str], int], most: int) -> str:
    """Return the beginning of `text` for which `count` returns at most `most`: the whole text if it fits.

    count: returns the number of tokens of the prompt with a text. Raises ValueError if not even an empty text fits.
    """
    num_tokens = count(text)
    if num_tokens <= most:
        return text
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    num_kept = len(token_ids)
    while num_kept > 0:
        num_kept -= num_tokens - most
        # the beginning of a text may be encoded differently, so its tokens are counted again
        cut = "" if num_kept <= 0 else decode(tokenizer, token_ids[:num_kept])
        num_tokens = count(cut)
        if num_tokens <= most:
            return cut
    raise ValueError(f"the prompt has {num_tokens} tokens without this text, and at most {most} are allowed")


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """Return the text of the tokens, without a character that is cut in the middle."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.rstrip(HALF_CHARACTER)
