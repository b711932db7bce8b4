"""Token ids → text as it grows.

A token of a byte-level vocabulary may be half a character, and in others its text depends on the one before it. So the
newest tokens are decoded together with a few that came before, and their text is shown once it is whole. Decides
what text is safe to show; called by `LLMEngine`, once a step for each request whose text is wanted.
"""

from typing import Any

REPLACEMENT = "\ufffd"  # what decoding half a character gives
CONTEXT = 6  # tokens decoded again before the new ones: more than any tokenizer looks back


class Detokenizer:
    """The text of one growing output. Its pieces add up to the text of all tokens decoded at once."""

    def __init__(self, tokenizer: Any) -> None:
        # the Rust tokenizer itself where there is one: transformers' wrapper costs more than the decoding
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._text = ""
        self._num_context = 0  # tokens before this one are done with
        self._num_shown = 0  # tokens before this one are in the text

    def update(self, token_ids: list[int], is_finished: bool) -> str:
        """The text of `token_ids`, the whole output so far; held back at the end where a character is not whole."""
        if self._tokenizer is None:
            return ""
        context = self._decode(token_ids[self._num_context : self._num_shown])
        window = self._decode(token_ids[self._num_context :])
        if is_finished or (len(window) > len(context) and not window.endswith(REPLACEMENT)):
            self._text += window[len(context) :]
            self._num_context = max(self._num_context, len(token_ids) - CONTEXT)
            self._num_shown = len(token_ids)
        return self._text

    def _decode(self, token_ids: list[int]) -> str:
        """Special tokens are left out; ids that the tokenizer does not know give nothing."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
