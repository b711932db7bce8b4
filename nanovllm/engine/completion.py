"""One sample of a request: how its tokens become text, log-probabilities, and what the user is given.

An output is a snapshot: it shares nothing that changes. A whole one holds all so far, a delta what is new since the
delta before. Made and read by `Request`.
"""

from typing import Any

from nanovllm.engine.detokenizer import Detokenizer, TokenDecoder
from nanovllm.execution.logprobs import LogprobRows
from nanovllm.outputs import CompletionOutput, Logprob
from nanovllm.scheduling.sequence import Sequence

PositionLogprobs = dict[int, Logprob]


class Completion:
    """A sequence, its text, and the log-probabilities if they are wanted."""

    def __init__(self, seq: Sequence, tokenizer: Any, decoder: TokenDecoder | None) -> None:
        self.seq = seq
        self.tokenizer = tokenizer
        self.detokenizer = Detokenizer(decoder, seq.sampling_params)
        self.token_ids: list[int] = []  # output tokens that the detokenizer has got
        self.logprobs: list[PositionLogprobs] | None = None if seq.sampling_params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self._text_without_stop = not seq.sampling_params.include_stop_str_in_output
        # what the deltas so far have held
        self._num_given_tokens = 0
        self._num_given_chars = 0
        self._has_given_end = False

    def read_token(self, token_id: int) -> None:
        """`read_text` for the usual case: the only token that has not been read, and not the last."""
        seq = self.seq
        if seq.finish_reason is None and seq.token_ids.length - seq.num_prompt_tokens == len(self.token_ids) + 1:
            self.token_ids.append(token_id)
            self.detokenizer.append_token(token_id)
        else:
            self.read_text()

    def read_text(self) -> None:
        """Make text of the new tokens; the text of the token that ended the sequence is left out, as in vLLM."""
        seq, ids = self.seq, self.seq.token_ids
        new = ids.data[seq.num_prompt_tokens + len(self.token_ids) : ids.length].tolist()
        self.token_ids += new
        if seq.finish_reason == "stop" and self._text_without_stop:
            new = new[:-1]
        self.detokenizer.append(new, seq.finish_reason is not None)

    def add_logprobs(self, rows: LogprobRows, row: int) -> None:
        k = self.seq.sampling_params.logprobs
        if self.logprobs is not None and k is not None:
            token_id = int(self.seq.token_ids.view()[-1])
            self.logprobs.append(position_logprobs(rows, row, token_id, k, self.tokenizer))
            self.cumulative_logprob += self.logprobs[-1][token_id].logprob

    def make_output(self) -> CompletionOutput:
        """All so far."""
        seq, logprobs = self.seq, self.logprobs
        output = CompletionOutput.__new__(CompletionOutput)  # `__init__` would want the token ids now
        output.index = seq.sample_index
        output.finish_reason = finish_reason = seq.finish_reason
        output.stop_reason = seq.stop_reason
        output.text = self.detokenizer.text(finish_reason is not None)
        # the list grows, its beginning stays
        output._recipe = first, self.token_ids, len(self.token_ids)  # type: ignore[misc]  # a slot of LazyRecord
        output.logprobs = None if logprobs is None else logprobs.copy()
        output.cumulative_logprob = None if logprobs is None else self.cumulative_logprob
        return output

    def make_delta(self) -> CompletionOutput | None:
        """What is new since the last call; None if nothing is."""
        seq, logprobs = self.seq, self.logprobs
        is_finished = seq.finish_reason is not None
        text, first = self.detokenizer.text(is_finished), self._num_given_tokens
        if self._has_given_end or (first == len(self.token_ids) and not is_finished):
            return None
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


def first(values: list[int], length: int) -> list[int]:
    return values[:length]


def position_logprobs(rows: LogprobRows, row: int, token_id: int, k: int, tokenizer: Any) -> PositionLogprobs:
    """The chosen token first, then the k likeliest (all of them for -1), as vLLM orders them."""
    top_ids, top = rows.top_ids[row], rows.top[row]
    num_top = len(top_ids) if k < 0 else min(k, len(top_ids))
    entries = {token_id: (rows.chosen[row], rows.ranks[row])}
    for rank in range(num_top):
        entries.setdefault(top_ids[rank], (top[rank], rank + 1))
    return {i: Logprob(value, rank, decode_token(tokenizer, i)) for i, (value, rank) in entries.items()}


def decode_token(tokenizer: Any, token_id: int) -> str | None:
    return None if tokenizer is None else tokenizer.decode([token_id])
