"""The detokenizer with all options of a request's text, for many requests of one tokenizer.

In a byte-level vocabulary, a text is the bytes of its tokens, one after another. So a token of whole characters adds
the same text wherever it stands. This text is decoded once and then looked up, which takes a tenth of the time of the
library's stream. The stream is started again with the newest token when a token of other bytes comes.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from functools import cache, partial
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from nanovllm.detokenizer import Detokenizer
from nanovllm_extras.options.request_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenDecoder:
    """The decoder of all requests: what they need of a tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        # the library's own tokenizer, since the wrapper of transformers costs more than decoding
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        if self.backend is None:
            raise ValueError(
                f"the tokenizer must be a fast one, with a tokenizer.json, got a {type(tokenizer).__name__}"
            )
        added = getattr(tokenizer, "added_tokens_decoder", {})  # id -> AddedToken
        self.added_texts = {i: token.content for i, token in added.items()}
        self.text_of = cache(lambda token_id: tokenizer.decode([token_id]))  # by itself, as log-probabilities show it
        # by `skip_special_tokens`: token id -> its own text
        self.own_texts = {skip: cache(partial(find_own_text, self.backend, skip)) for skip in (False, True)}


def find_own_text(tokenizer: Tokenizer, skip_special_tokens: bool, token_id: int) -> str:
    """Return what a token adds to any text of whole characters, or "" if that depends on the text, or is nothing."""
    if not isinstance(tokenizer.decoder, ByteLevel):
        return ""
    text = tokenizer.decode([token_id], skip_special_tokens=skip_special_tokens)
    return "" if text.endswith("\ufffd") else text  # its last bytes may be the beginning of a character


class FullDetokenizer(Detokenizer):
    """The text of one growing output, as its parameters ask for it.

    With `spaces_between_special_tokens=False`, a special token next to another adds its own text, without the decoder's
    space. Stop strings do not count within the first `min_tokens` tokens.
    """

    def __init__(self, decoder: TokenDecoder, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        self._skip_special_tokens = params.skip_special_tokens
        self._keeps_stop_string = params.include_stop_str_in_output
        super().__init__(decoder.backend, prompt_token_ids, params.stop_strings)
        self._find_own_text = decoder.own_texts[params.skip_special_tokens]
        has_spaces = params.spaces_between_special_tokens or params.skip_special_tokens
        self._texts_without_space: Mapping[int, str] = {} if has_spaces else decoder.added_texts
        self._unread: int | None = None  # the newest token, if the stream has not read it: its text was looked up
        # the token after `min_tokens` is the first that may complete a stop string
        self._num_unstoppable = params.min_tokens + 1 if params.stop_strings and params.min_tokens else 0

    def append(self, token_id: int) -> None:
        if self._num_unstoppable:
            self._num_unstoppable -= 1
        if self._pending:
            text = ""
        elif token_id in self._texts_without_space and self._newest in self._texts_without_space:
            text = self._texts_without_space[token_id]
        else:
            text = self._find_own_text(token_id)
        if not text:
            self._catch_up()
            super().append(token_id)
        elif self.stop_string is None:
            self._unread = token_id
            self._text += text
            if self._stop_strings:
                self._find_stop_string()

    @property
    def _newest(self) -> int | None:
        """The newest token, of the prompt if the output has none, if all tokens have text."""
        return self._unread if self._unread is not None else self._context[-1] if self._context else None

    def _catch_up(self) -> None:
        """Start a new stream with the newest token, if its text was looked up."""
        if self._unread is not None:
            self._restart([self._unread])
            self._unread = None

    def finish(self) -> None:
        super().finish()
        self._pending = []  # so that a second call adds nothing

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.append(token_id)

    def copy(self) -> "FullDetokenizer":
        """Return a detokenizer that continues this text without changing it."""
        self._catch_up()
        copied = copy(self)
        copied._restart([*self._context, *self._pending])
        return copied
