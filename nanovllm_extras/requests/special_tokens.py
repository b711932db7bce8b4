"""`spaces_between_special_tokens=False`: neighbouring special tokens are written without the decoder's spaces.

`full_detokenizer.py` chooses it, unless special tokens are skipped anyway.
"""

from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.requests.full_detokenizer import TokenDecoder
from nanovllm_extras.requests.stop_options import StopOptionsDetokenizer


class SpacelessDetokenizer(StopOptionsDetokenizer):
    """Special tokens next to each other add their own texts, and nothing between them."""

    def __init__(self, decoder: TokenDecoder, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        self._added_texts = decoder.added_texts
        self._newest = prompt_token_ids[-1] if prompt_token_ids else None
        super().__init__(decoder, params, prompt_token_ids)

    def append(self, token_id: int) -> None:
        before, self._newest = self._newest, token_id
        if token_id in self._added_texts and before in self._added_texts and not self._pending:
            if self.stop_string is None:
                self._num_tokens += 1
                self._unread = None
                self._restart([token_id])
                self._show(self._added_texts[token_id])
        else:
            super().append(token_id)
