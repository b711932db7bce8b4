"""Options of stop strings: `min_tokens`, within which they do not count, and `include_stop_str_in_output`."""

from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.requests.full_detokenizer import FullDetokenizer, TokenDecoder


class StopOptionsDetokenizer(FullDetokenizer):
    """The text of an output whose first tokens may hold stop strings, or which keeps the one that ends it."""

    def __init__(self, decoder: TokenDecoder, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        super().__init__(decoder, params, prompt_token_ids)
        self._keeps_stop_string = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def append(self, token_id: int) -> None:
        self._num_tokens += 1
        super().append(token_id)

    def _find_stop_string(self) -> None:
        if self._num_tokens <= self._min_tokens:
            self._num_searched = len(self._text)
            return
        super()._find_stop_string()
        if self.stop_string is not None and self._keeps_stop_string:
            self._text += self.stop_string
