"""Token ids → text as it grows, and the stop strings in it.

A token of a byte-level vocabulary may be half a character; in other vocabularies the text of a token depends on the
token before it. So the newest tokens are decoded together with a few earlier ones, and their text is added once it
consists of whole characters. Decides which text is safe to show: whole characters, and no text that may be the
beginning of a stop string. Called by `Request`, once a step for each sequence whose text is wanted.
"""

import re
from typing import Any

from nanovllm.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # what decoding half a character gives
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
NUM_OPEN = 3  # newest tokens that may be an incomplete character: it has at most four bytes, a token at least one
MAX_PENDING = 16  # of more pending tokens, those that cannot become a character any more are shown as they are


class TokenDecoder:
    """What a detokenizer needs to know of a tokenizer; one for all requests."""

    def __init__(self, tokenizer: Any) -> None:
        # the Rust tokenizer itself where there is one: transformers' wrapper costs more than the decoding
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._num_tokens = len(tokenizer)
        pieces = tokenizer.convert_ids_to_tokens(range(self._num_tokens))
        self._byte_ids = frozenset(i for i, piece in enumerate(pieces) if piece and BYTE_TOKEN.fullmatch(piece))

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def gives_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the token has text: skipped special tokens, and ids beyond the tokenizer's vocabulary, have none."""
        return token_id < self._num_tokens and not (skip_special_tokens and token_id in self._special_ids)

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte: a run of such tokens is decoded as a whole, and its text may change until it
        ends.
        """
        return token_id in self._byte_ids


class Detokenizer:
    """The text of one growing output. Its pieces add up to the text of all tokens decoded at once."""

    def __init__(self, decoder: TokenDecoder | None, params: SamplingParams) -> None:
        self._decoder = decoder if params.detokenize else None
        self._params = params
        self._stop_strings = params.stop_strings
        self._text = ""
        self._context: list[int] = []  # the last tokens in the text: the text of the next ones may depend on them
        self._pending: list[int] = []  # tokens that are not in the text yet
        self._num_tokens = 0
        self._num_searched = 0  # no stop string ends within so many first characters of the text
        self.stop_string: str | None = None  # the one that was found, and has ended the text

    def append(self, token_ids: list[int], is_last: bool) -> None:
        """Add tokens; with `is_last` the text held back is added too, even if it is no whole character."""
        if self._decoder is None:
            return
        # one by one where a stop string may end the text before the last of them
        for chunk in [[token_id] for token_id in token_ids] if self._stop_strings else [token_ids]:
            if self.stop_string is None:
                self._num_tokens += len(chunk)
                skip = self._params.skip_special_tokens
                self._pending += [i for i in chunk if self._decoder.gives_text(i, skip)]
                self._show(self._decoder, is_last=False)
        if is_last and self.stop_string is None:
            self._show(self._decoder, is_last=True)

    def text(self, is_finished: bool) -> str:
        """The text that is safe to show; it is a prefix of the text that the next call returns."""
        if is_finished or not self._stop_strings:
            return self._text
        return self._text[: len(self._text) - self._num_held_back()]

    def _show(self, decoder: TokenDecoder, is_last: bool) -> None:
        """Move the pending tokens into the text, if their text cannot change any more."""
        if self._pending:
            skip = self._params.skip_special_tokens
            known = decoder.decode(self._context, skip) if self._context else ""
            window = decoder.decode(self._context + self._pending, skip)
            if is_last or not (decoder.is_byte(self._pending[-1]) or window.endswith(REPLACEMENT)):
                self._text += window[len(known) :]
                self._context, self._pending = self._pending, []
            elif len(self._pending) > MAX_PENDING and not any(map(decoder.is_byte, self._pending)):
                # these bytes cannot become characters any more, except for the last few
                settled = decoder.decode(self._context + self._pending[:-NUM_OPEN], skip)
                if window.startswith(settled):
                    self._text += settled[len(known) :]
                    self._context, self._pending = self._pending[:-NUM_OPEN], self._pending[-NUM_OPEN:]
        if self._stop_strings:
            self._find_stop_string()

    def _find_stop_string(self) -> None:
        """Cut the text at the stop string that is complete first, if there is one."""
        if self._num_tokens > self._params.min_tokens:
            found = [
                (self._text.find(stop, max(0, self._num_searched + 1 - len(stop))), stop) for stop in self._stop_strings
            ]
            ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
            if ends:
                end, start, self.stop_string = min(ends)
                self._text = self._text[: end if self._params.include_stop_str_in_output else start]
        self._num_searched = len(self._text)

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that a stop string may begin with."""
        longest = max(map(len, self._stop_strings))
        for length in range(min(longest - 1, len(self._text)), 0, -1):
            if any(len(stop) > length and stop.startswith(self._text[-length:]) for stop in self._stop_strings):
                return length
        return 0
