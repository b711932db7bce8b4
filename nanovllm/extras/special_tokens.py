"""`spaces_between_special_tokens=False`: neighbouring special tokens are written without the decoder's spaces.

A `Detokenizer` that takes tokens one by one, since a text no longer adds up of what the tokenizer decodes at once.
Chosen by `request.py`, unless special tokens are skipped anyway.
"""

from typing import Any

from nanovllm.detokenizer import Detokenizer, TokenDecoder


class SpacelessDetokenizer(Detokenizer):
    """Special tokens side by side add their own texts, and nothing between them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._find_own_text = None  # a text depends on the token before it

    def _append_window(self, decoder: TokenDecoder, chunk: list[int]) -> None:
        for token_id in chunk:
            if not decoder.gives_text(token_id, skip_special_tokens=False):
                continue
            is_added = token_id in decoder.added_texts
            if is_added and not self._pending and self._context and self._context[-1] in decoder.added_texts:
                self._text += decoder.added_texts[token_id]
                self._context = [token_id]
            else:
                self._pending.append(token_id)
                self._show(decoder, is_last=False)
