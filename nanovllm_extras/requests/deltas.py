"""`RequestOutputKind.DELTA`: an output of a stream holds only what is new since the output before.

Chosen by `input_processor.py`. Whole outputs grow with the completion; deltas let a server send each text once.
"""

from typing import Any

from nanovllm_extras.requests.full_request import Completion
from nanovllm_extras.requests.lazy_outputs import CompletionOutput


class DeltaCompletion(Completion):
    """One sample whose outputs hold only what is new."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # what the deltas so far have held
        self._num_given_tokens = 0
        self._num_given_chars = 0
        self._has_given_end = False

    @property
    def has_news(self) -> bool:  # an attribute that is always True
        is_finished = self.seq.finish_reason is not None
        return not self._has_given_end and (is_finished or len(self.token_ids) > self._num_given_tokens)

    def make_output(self) -> CompletionOutput:
        """Return what is new since the last call."""
        seq, logprobs, first = self.seq, self.logprobs, self._num_given_tokens
        is_finished = seq.finish_reason is not None
        text = "" if self.detokenizer is None else self.detokenizer.text(is_finished)
        delta = CompletionOutput(
            seq.sample_index,
            text[self._num_given_chars :],
            self.token_ids[first:],
            seq.finish_reason,
            seq.stop_reason,
            None if logprobs is None else logprobs[first:],
            None if logprobs is None else self.cumulative_logprob,
        )
        self._num_given_tokens, self._num_given_chars = len(self.token_ids), len(text)
        self._has_given_end = is_finished
        return delta
