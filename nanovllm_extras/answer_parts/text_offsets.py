"""Find where the text of each token begins in the text of a completion (`text_offset` of its log-probabilities).

A token may be a part of a character, so its own text does not say how much it adds. Here é has two tokens:

    text        c a f é !
    tokens      "caf"  C3  A9  "!"
    offsets     0      3   3   4
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from nanovllm_extras.answer_parts.token_bytes import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_CONTEXT = 8  # last tokens of a prompt that are read to find an incomplete character at its end


def offsets_of_text(
    tokenizer: "PreTrainedTokenizerBase | None", text: str, token_ids: Sequence[int], add_special_tokens: bool
) -> list[int] | None:
    """Return the offsets of the tokens of an encoded text; None if the text does not have these tokens.

    Tokens that the tokenizer adds, such as the first one of many models, have no text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    encoding = None if backend is None else backend.encode(text, add_special_tokens=add_special_tokens)
    if encoding is None or encoding.ids != list(token_ids):
        return None
    offsets, end = [], 0
    for start, stop in encoding.offsets:
        offsets.append(min(start, end) if start < stop else end)  # some tokenizers exclude the space before a word
        end = max(end, stop)
    return offsets


class DecodedOffsets:
    """Finds the offsets of tokens in the text that is decoded from them. `num_chars` is the length of the text so far.

    token_bytes: returns the bytes of the tokens.
    skip_special_tokens: whether the text of the output has no special tokens.
    """

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool) -> None:
        self.num_chars = 0
        self._token_bytes = token_bytes
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_shown = False  # the prompt's text has replacement characters for the incomplete character

    def read_prompt(self, token_ids: Iterable[int], text: str) -> list[int]:
        """Return the offsets of a prompt's tokens. text: the decoded prompt."""
        offsets = []
        for i, token_id in enumerate(token_ids):
            own_text = self._token_bytes.text_of(token_id)
            data = self._token_bytes.of(token_id, own_text)
            if i == 0 and data.startswith(b" ") and not own_text.startswith(" "):
                data = data[1:]  # SentencePiece's decoders omit the space before the first word
            offsets.append(self._add(data))
        self._is_shown = bool(self._incomplete)
        self.num_chars = len(text)
        return offsets

    def skip_prompt(self, token_ids: Sequence[int]) -> None:
        """Read a prompt that the text does not contain. Its last character may be incomplete."""
        self.read_prompt(token_ids[-NUM_CONTEXT:], "")
        self.num_chars = 0

    def read_output(self, token_ids: Iterable[int]) -> list[int]:
        """Return the offsets of the next tokens of the output."""
        return [self._add(self._bytes_of_output(token_id)) for token_id in token_ids]

    def _bytes_of_output(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._token_bytes.is_special(token_id):
            return b""
        return self._token_bytes.of(token_id, self._token_bytes.text_of(token_id))

    @property
    def _incomplete(self) -> bytes:
        return self._decoder.getstate()[0]

    def _add(self, data: bytes) -> int:
        incomplete = self._incomplete
        if data and incomplete and not continues(incomplete, data[:1]):
            self._decoder.reset()
            self.num_chars += not self._is_shown  # the incomplete character becomes a replacement character
        offset = self.num_chars
        self.num_chars += len(self._decoder.decode(data))
        self._is_shown = self._is_shown and self._incomplete == incomplete + data
        return offset


class TokenPieces:
    """Cuts a growing text into pieces, each with the text of one token.

    The pieces do not depend on how many tokens each output adds: a token is held back until all of its text is there.
    prompt_token_ids: the prompt, which the text does not contain.
    """

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> None:
        self._offsets = DecodedOffsets(token_bytes, skip_special_tokens)
        self._offsets.skip_prompt(prompt_token_ids)
        self._ends: list[int] = []  # where the text of each token ends
        self._num_chars = self._num_tokens = 0  # of the pieces

    def read(self, text: str, token_ids: Sequence[int], is_last: bool) -> list[tuple[str, int]]:
        """Return the next pieces, each with the index of its token. text, token_ids: the whole output so far.

        The last piece of all has the rest of the text, and an index behind the last token. A stop string may have cut
        off the text of the last tokens.
        """
        for token_id in token_ids[len(self._ends) :]:
            self._offsets.read_output([token_id])
            self._ends.append(self._offsets.num_chars)
        pieces = []
        while self._num_tokens < len(token_ids) and (is_last or self._ends[self._num_tokens] <= len(text)):
            end = self._ends[self._num_tokens]
            pieces.append((text[self._num_chars : end], self._num_tokens))
            self._num_chars, self._num_tokens = max(self._num_chars, end), self._num_tokens + 1
        return pieces + ([(text[self._num_chars :], len(token_ids))] if is_last else [])


def continues(incomplete: bytes, byte: bytes) -> bool:
    """Return whether `byte` is the next byte of an incomplete character in UTF-8."""
    try:
        (incomplete + byte).decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return True
