"""Token ids → text as it grows, and the stop strings in it.

A token of a byte-level vocabulary may be half a character; in other vocabularies the text of a token depends on the
token before it. So the newest tokens are decoded together with a few earlier ones, and their text is added once it
consists of whole characters. Most tokens are whole words or parts of words, whose text is always the same: it is looked
up, which costs a tenth of decoding. Decides which text is safe to show: whole characters, and no text that may be the
beginning of a stop string. Called by `Request`, once a step for each sequence whose text is wanted.
"""

import json
import re
from functools import cache, partial
from typing import Any

from nanovllm.checks import extra
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
        added = getattr(tokenizer, "added_tokens_decoder", {})  # id -> AddedToken
        self.added_texts = {i: token.content for i, token in added.items()}
        self._special_ids = frozenset([*tokenizer.all_special_ids, *(i for i, one in added.items() if one.special)])
        self._num_tokens = len(tokenizer)
        pieces = tokenizer.convert_ids_to_tokens(range(self._num_tokens))
        self._byte_ids = frozenset(i for i, piece in enumerate(pieces) if piece and BYTE_TOKEN.fullmatch(piece))
        self._is_context_free = is_context_free(self._tokenizer)
        self.text_of = cache(lambda token_id: tokenizer.decode([token_id]))  # by itself, as log-probabilities show it
        # by `skip_special_tokens`: token id -> its own text, found when it is first asked for
        self.own_texts = {skip: cache(partial(self.find_own_text, skip_special_tokens=skip)) for skip in (False, True)}

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def gives_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the token has text: skipped special tokens, and ids beyond the tokenizer's vocabulary, have none."""
        return token_id < self._num_tokens and not (skip_special_tokens and token_id in self._special_ids)

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte: a run of such tokens is decoded as a whole, and may change until it ends."""
        return token_id in self._byte_ids

    def find_own_text(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """What the token adds to any text that ends in a whole character; None if this depends on the text."""
        if not self.gives_text(token_id, skip_special_tokens):
            return ""
        if not self._is_context_free or self.is_byte(token_id):
            return None
        once = self.decode([token_id], skip_special_tokens)  # the first token of a text may lose its space
        twice = self.decode([token_id, token_id], skip_special_tokens)
        return None if REPLACEMENT in twice else twice[len(once) :]


def is_context_free(tokenizer: Any) -> bool:
    """Whether the texts of tokens add up, once the first one has been written and no character is incomplete.

    So it is for byte-level vocabularies (GPT-2's, Qwen's, Llama 3's), and for those of SentencePiece, whose decoders
    replace ▁ by a space in each token and then take the first space away. Other decoders are not known well enough.
    """
    decoder = getattr(tokenizer, "decoder", None)
    if decoder is None:
        return False
    spec = json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["Metaspace"]):
        return True
    if kinds[-1:] == ["Strip"]:
        last = steps[-1]
        if last["start"] > 1 or last["stop"] > 0:
            return False
        kinds.pop()
    return kinds[-1:] == ["Fuse"] and set(kinds[:-1]) <= {"Replace", "ByteFallback"}


def make_detokenizer(decoder: TokenDecoder | None, params: SamplingParams) -> "Detokenizer":
    """As the parameters want special tokens to be written."""
    if params.spaces_between_special_tokens or params.skip_special_tokens:
        return Detokenizer(decoder, params)
    with extra("extras/special_tokens.py", "spaces_between_special_tokens=False"):
        from nanovllm.extras.special_tokens import SpacelessDetokenizer
    return SpacelessDetokenizer(decoder, params)


class Detokenizer:
    """The text of one growing output. Its pieces add up to the text of all tokens decoded at once."""

    def __init__(self, decoder: TokenDecoder | None, params: SamplingParams) -> None:
        self._decoder = decoder if params.detokenize else None
        self._params = params
        self._stop_strings = params.stop_strings
        self._find_own_text = None if self._decoder is None else self._decoder.own_texts[params.skip_special_tokens]
        self._beginnings = {stop[:i] for stop in self._stop_strings for i in range(1, len(stop))}
        self._first_chars = {stop[0] for stop in self._stop_strings}
        self._text = ""
        self._context: list[int] = []  # the last tokens in the text: the text of the next ones may depend on them
        self._pending: list[int] = []  # tokens that are not in the text yet
        self._num_tokens = 0
        self._num_searched = 0  # no stop string ends within so many first characters of the text
        self._num_shown = 0  # and none that is still possible begins within so many
        self.stop_string: str | None = None  # the one that was found, and has ended the text

    def append_token(self, token_id: int) -> None:
        """Add one token that is not the last."""
        if self._decoder is None or self.stop_string is not None:
            return
        own_text = None
        if self._text and not self._pending and self._find_own_text is not None:
            own_text = self._find_own_text(token_id)
        if own_text is None:
            self._append_window(self._decoder, [token_id])
        elif own_text:  # the usual case: the text of this token depends on no other
            self._text += own_text
            self._context = [token_id]
        if self._stop_strings:
            self._num_tokens += 1
            self._find_stop_string()

    def append(self, token_ids: list[int], is_last: bool) -> None:
        """Add tokens; with `is_last` the text held back is added too, even if it is no whole character."""
        if self._decoder is None:
            return
        if self._stop_strings or len(token_ids) == 1:  # a stop string may end the text before the last of them
            for token_id in token_ids:
                self.append_token(token_id)
        else:
            self._append_window(self._decoder, token_ids)
        if is_last and self._pending and self.stop_string is None:
            self._show(self._decoder, is_last=True)
            if self._stop_strings:
                self._find_stop_string()

    def text(self, is_finished: bool) -> str:
        """The text that is safe to show; it is a prefix of the text that the next call returns."""
        if is_finished or not self._stop_strings:
            return self._text
        self._find_beginning()
        return self._text[: self._num_shown]

    def _append_window(self, decoder: TokenDecoder, chunk: list[int]) -> None:
        """Any tokens: decoded together with those before."""
        self._pending += [i for i in chunk if decoder.gives_text(i, self._params.skip_special_tokens)]
        self._show(decoder, is_last=False)

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

    def _find_stop_string(self) -> None:
        """Cut the text at the stop string that is complete first, if there is one."""
        if self._num_tokens > self._params.min_tokens:
            text, num_searched, ends = self._text, self._num_searched, []
            for stop in self._stop_strings:
                first = num_searched + 1 - len(stop)
                start = text.find(stop, first if first > 0 else 0)
                if start >= 0:
                    ends.append((start + len(stop), start, stop))
            if ends:
                end, start, self.stop_string = min(ends)
                self._text = text[: end if self._params.include_stop_str_in_output else start]
        self._num_searched = len(self._text)

    def _find_beginning(self) -> None:
        """Show the text up to the first place from which all that follows may be the beginning of a stop string."""
        text, first_chars = self._text, self._first_chars
        for i in range(self._num_shown, len(text)):
            if text[i] in first_chars and text[i:] in self._beginnings:
                self._num_shown = i
                return
        self._num_shown = len(text)
