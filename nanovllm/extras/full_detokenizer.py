"""The detokenizer with all options: `detokenize=False`, `min_tokens`, `include_stop_str_in_output`, special tokens."""

from collections.abc import Iterable
from copy import copy
from functools import cache
from typing import Any

from nanovllm.detokenizer import Detokenizer
from nanovllm.extras.request_params import SamplingParams


class TokenDecoder:
    """The decoder of all requests: what they need of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        # the library's own tokenizer, since the wrapper of transformers costs more than decoding
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        if self.backend is None:
            raise ValueError(
                f"the tokenizer must be a fast one, with a tokenizer.json, got a {type(tokenizer).__name__}"
            )
        added = getattr(tokenizer, "added_tokens_decoder", {})  # id -> AddedToken
        self.added_texts = {i: token.content for i, token in added.items()}
        self.text_of = cache(lambda token_id: tokenizer.decode([token_id]))  # by itself, as log-probabilities show it


class FullDetokenizer(Detokenizer):
    """The text of one growing output, as its parameters ask for it."""

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        self._skip_special_tokens = params.skip_special_tokens
        super().__init__(tokenizer, prompt_token_ids, params.stop_strings)
        self._keeps_stop_string = params.include_stop_str_in_output

    def finish(self) -> None:
        super().finish()
        self._pending = []  # so that a second call adds nothing

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.append(token_id)

    def copy(self) -> "FullDetokenizer":
        """Return a detokenizer that continues this text without changing it."""
        copied = copy(self)
        copied._restart([*self._context, *self._pending])
        return copied

    def _find_stop_string(self) -> None:
        super()._find_stop_string()
        if self.stop_string is not None and self._keeps_stop_string:
            self._text += self.stop_string


class MinTokensDetokenizer(FullDetokenizer):
    """The text of an output in which stop strings do not count within the first `min_tokens` tokens."""

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        super().__init__(tokenizer, params, prompt_token_ids)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def append(self, token_id: int) -> None:
        self._num_tokens += 1
        super().append(token_id)

    def _find_stop_string(self) -> None:
        if self._num_tokens <= self._min_tokens:
            self._num_searched = len(self._text)
        else:
            super()._find_stop_string()
