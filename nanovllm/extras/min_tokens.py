"""`min_tokens` and `stop`: stop strings do not count within the first tokens of an output."""

from nanovllm.extras.full_detokenizer import FullDetokenizer, TokenDecoder
from nanovllm.extras.request_params import SamplingParams


class MinTokensDetokenizer(FullDetokenizer):
    """The text of an output in which stop strings do not count within the first `min_tokens` tokens."""

    def __init__(self, decoder: TokenDecoder, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        super().__init__(decoder, params, prompt_token_ids)
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
