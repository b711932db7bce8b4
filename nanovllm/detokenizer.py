"""Token ids → text as it grows, and the stop strings in it.

A token may be part of a character, and in some vocabularies the text of a token depends on the token before it. So the
text comes from `DecodeStream` of the library `tokenizers`, which returns text once it consists of whole characters. The
stream is primed with the end of the prompt, so that the output continues its text. Called by `Request`.

    tokens     [ 1247 ]     [ 172 161 ]          [ 243 ]
    bytes      " block"     e2 86: no text yet   92: with e2 86 the character "→"
"""

from collections.abc import Collection
from os.path import commonprefix
from typing import Any

from tokenizers.decoders import DecodeStream

NUM_CONTEXT = 5  # last tokens of the prompt that prime the stream
NUM_OPEN = 3  # newest tokens that may still become a character: it has at most four bytes, a token at least one
MAX_PENDING = 16  # if more tokens than this have no text, only the newest ones may still become characters


class Detokenizer:
    """The text of one growing output. It ends before the first of `stop_strings`.

    tokenizer: a `tokenizers.Tokenizer`, in `transformers` the `backend_tokenizer` of a tokenizer
    """

    # a subclass may set these before `__init__`
    _skip_special_tokens = True
    _keeps_stop_string = False  # whether the text ends behind the stop string
    _num_unstoppable = 0  # further tokens until stop strings count

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int], stop_strings: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._beginnings = {stop[:i] for stop in stop_strings for i in range(1, len(stop))}
        self._text = ""
        self._num_searched = 0  # no stop string ends within this number of first characters
        self._num_shown = 0  # no stop string that is still possible begins within this number
        self.stop_string: str | None = None  # the one that was found, and has ended the text
        self._context: list[int] = []  # tokens of the newest text
        self._pending: list[int] = []  # tokens that have no text yet
        for num_context in range(NUM_CONTEXT, NUM_CONTEXT + 4):  # one of them begins with a whole character
            self._restart(prompt_token_ids[-num_context:])
            if not self._pending:
                break
        self._prompt_text = self._decode(self._pending)  # of an incomplete character at the end of the prompt

    def append(self, token_id: int) -> None:
        """Add one token."""
        if self.stop_string is not None:
            return
        self._pending.append(token_id)
        try:
            new = self._stream.step(self._tokenizer, token_id)
        except Exception:  # "Invalid prefix encountered": a token has changed the text of tokens before it
            self._show_pending(0)
            return
        if new is not None:
            self._context, self._pending = self._pending, []
            self._show(new)
        elif len(self._pending) > MAX_PENDING:
            self._show_pending(NUM_OPEN)

    def finish(self) -> None:
        """Add the text of the last tokens, even if it is not a whole character."""
        if self._pending and self.stop_string is None:
            self._show_pending(0)

    def text(self, is_finished: bool) -> str:
        """Return the text that is safe to show. It is a prefix of the text that the next call returns.

        Until the output is finished, this excludes a possible beginning of a stop string at the end.
        """
        if is_finished or not self._stop_strings:
            return self._text
        for i in range(self._num_shown, len(self._text)):
            if self._text[i] in self._beginnings and self._text[i:] in self._beginnings:
                self._num_shown = i
                return self._text[:i]
        self._num_shown = len(self._text)
        return self._text

    def _restart(self, token_ids: list[int]) -> None:
        """Start a new stream with tokens whose text is known, except for incomplete characters at their end."""
        self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        self._context, self._pending = [], []
        for i, token_id in enumerate(token_ids):
            self._pending.append(token_id)
            try:
                new = self._stream.step(self._tokenizer, token_id)
            except Exception:  # as in `append`
                self._restart(token_ids[max(i, 1) :])
                break
            if new is not None:
                self._context, self._pending = self._pending, []

    def _show_pending(self, num_kept: int) -> None:
        """Add the text of the pending tokens as it is, except for the last `num_kept`, and start a new stream."""
        split = len(self._pending) - num_kept
        shown, kept = self._pending[:split], self._pending[split:]
        known = self._decode(self._context) if self._context else ""
        new = self._decode(self._context + shown)[len(known) :]
        if not new:  # special tokens and the like: the next token still comes after the context
            kept = self._context + kept
        self._restart(kept or shown[-NUM_CONTEXT:])
        self._show(new)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _show(self, new: str) -> None:
        if self._prompt_text:
            new, self._prompt_text = new[len(commonprefix([new, self._prompt_text])) :], ""
        self._text += new
        self._find_stop_string()

    def _find_stop_string(self) -> None:
        """Cut the text at the stop string that is complete first, if there is one."""
        ends = []
        for stop in () if self._num_unstoppable else self._stop_strings:
            first = self._num_searched + 1 - len(stop)
            start = self._text.find(stop, first if first > 0 else 0)
            if start >= 0:
                ends.append((start + len(stop), start, stop))
        if ends:
            end, start, self.stop_string = min(ends)
            self._text = self._text[: end if self._keeps_stop_string else start]
        self._num_searched = len(self._text)
