"""Find the bytes of a single token. A token may be a part of a character, so clients need the bytes to join tokens.

é in two tokens      "Ã" "©" in a byte-level vocabulary        [195] [169]
                     "<0xC3>" "<0xA9>" in SentencePiece's      [195] [169]
"""

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "▁"  # SentencePiece's spelling of a space
MAX_KEPT = 2**14  # tokens


class TokenBytes:
    """Returns the bytes of tokens. The tokenizer's decoder shows how its vocabulary represents bytes.

    `text_of(token_id)` returns the text of a token by itself. `json_of(token_id)` returns this text and the bytes, each
    as JSON.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # a second, which a chat by HTTP does not need

        self._tokenizer = tokenizer
        self._added = getattr(tokenizer, "added_tokens_decoder", {})  # id -> AddedToken, whose text is its content
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = b"" if decoder is None else decoder.__getstate__()  # JSON
        self._is_byte_level = b'"ByteLevel"' in state
        self._has_spaces = SPACE.encode() in state
        self._byte_of = {char: byte for byte, char in bytes_to_unicode().items()} if self._is_byte_level else {}
        # likely tokens are requested repeatedly, and encoding them takes ten times as long as the look-up
        self.text_of = lru_cache(MAX_KEPT)(self._find_text)
        self.json_of = lru_cache(MAX_KEPT)(self._write)

    def _find_text(self, token_id: int) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode([token_id]))

    def _write(self, token_id: int) -> tuple[str, str]:
        text = self.text_of(token_id)
        return json.dumps(text), json.dumps(list(self.of(token_id, text)), separators=(",", ":"))

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` skips a token."""
        return token_id in self._added and bool(self._added[token_id].special)

    def of(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token. text: the token's text by itself, used for other kinds of vocabularies."""
        if self._tokenizer is None or token_id in self._added:
            return text.encode("utf-8", "replace")
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(piece, str) and self._is_byte_level and all(char in self._byte_of for char in piece):
            return bytes(self._byte_of[char] for char in piece)
        if isinstance(piece, str) and (byte := BYTE_TOKEN.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        if isinstance(piece, str) and self._has_spaces:
            return piece.replace(SPACE, " ").encode("utf-8", "replace")
        return text.encode("utf-8", "replace")
