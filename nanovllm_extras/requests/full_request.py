"""A request, and its samples, with log-probabilities and times: how a step's results become outputs.

An output is a snapshot: it shares nothing that changes. `InputProcessor` makes requests, and `LLMEngine` drives them.
Other kinds of request are made of other parts. These parts say

    completions     what is read of the tokens of each sequence: text, or the candidates of a beam
    endings         what ends sequences when a step has been read: stop strings, a grammar, a search
    answer          what an output is made of, if not of the completions: an embedding, the beams of a search
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from nanovllm import request, sequence
from nanovllm.scheduler import Scheduler
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.requests.full_detokenizer import FullDetokenizer, TokenDecoder
from nanovllm_extras.requests.lazy_outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm_extras.sampling.logprobs import Logprob, LogprobRow, PositionLogprobs
from nanovllm_extras.sampling.runner_hooks import NO_TOKEN, StepTokens


class Completion(request.Completion):
    """One sample: a sequence, its text, and the log-probabilities if they are wanted.

    gives_deltas: whether each output holds only what is new since the output before (`RequestOutputKind.DELTA`). Whole
    outputs grow with the completion; deltas let a server send each text once.
    """

    seq: Sequence

    def __init__(
        self, seq: Sequence, decoder: TokenDecoder | None, prompt_token_ids: list[int], gives_deltas: bool = False
    ) -> None:
        params: Any = seq.sampling_params
        super().__init__(seq, make_detokenizer(decoder, params, prompt_token_ids))
        self.decoder = decoder
        self.num_logprobs: int | None = params.logprobs
        self.logprobs: list[Mapping[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self._text_without_stop = not params.include_stop_str_in_output
        self.gives_deltas = gives_deltas
        # what the deltas so far have held
        self._num_given_tokens = 0
        self._num_given_chars = 0
        self._has_given_end = False

    def read_token(self, token_id: int) -> None:
        """Read the tokens of one step: usually one that is not the last."""
        seq = self.seq
        if seq.finish_reason is None and len(seq.token_ids) - seq.num_prompt_tokens == len(self.token_ids) + 1:
            self.token_ids.append(token_id)
            if self.detokenizer is not None:
                self.detokenizer.append(token_id)
        else:
            self.read_tokens()

    def read_tokens(self) -> None:
        """Make text of the new tokens. A token that ended the sequence gives none, as in vLLM, unless asked for."""
        seq = self.seq
        if seq.finish_reason != "stop" or self._text_without_stop:
            super().read_tokens()
            return
        seq.finish_reason = None  # so that the text of the last token is kept
        super().read_tokens()
        seq.finish_reason = "stop"
        if self.detokenizer is not None:
            self.detokenizer.finish()

    def add_logprobs(self, row: "LogprobRow", token_id: int) -> None:
        if self.logprobs is not None and self.num_logprobs is not None:
            self.logprobs.append(PositionLogprobs(row, token_id, self.num_logprobs, self.decoder))
            self.cumulative_logprob += row[0]

    def has_news(self) -> bool:
        """Return whether a delta has anything to hold."""
        is_finished = self.seq.finish_reason is not None
        return not self._has_given_end and (is_finished or len(self.token_ids) > self._num_given_tokens)

    def make_output(self) -> CompletionOutput:
        """Return all so far, or what is new since the last call. The token ids are copied when they are read."""
        seq, logprobs, first, num_tokens = self.seq, self.logprobs, self._num_given_tokens, len(self.token_ids)
        output = CompletionOutput.__new__(CompletionOutput)  # `__init__` would need the token ids now
        finish_reason = seq.finish_reason
        output.index = seq.sample_index
        output.finish_reason = finish_reason
        output.stop_reason = seq.stop_reason
        output.text = text = "" if self.detokenizer is None else self.detokenizer.text(finish_reason is not None)
        # the list grows, its beginning stays
        output._recipe = list.__getitem__, self.token_ids, slice(first, num_tokens)
        output.logprobs = None if logprobs is None else logprobs[first:]
        output.cumulative_logprob = None if logprobs is None else self.cumulative_logprob
        if self.gives_deltas:
            output.text = text[self._num_given_chars :]
            self._num_given_tokens, self._num_given_chars = num_tokens, len(text)
            self._has_given_end = finish_reason is not None
        return output


Ending = Callable[["Request", Scheduler], None]
"""Called when all tokens of a step have been read. It may end sequences of the request."""


class Answer(Protocol):
    """Makes the outputs of a request whose user does not get completions."""

    gives_tokens: bool  # whether the user sees the tokens that are sampled

    def make_output(self, request: "Request") -> Any:
        """Return a snapshot of the request."""


class Request(request.Request):
    """A prompt with one sequence for each sample.

    completions: one for each sequence. endings, answer: see above
    """

    completions: list[Any]
    seqs: list[Any]

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        seqs: list[Any],
        stream: bool,
        completions: list[Any],
        endings: tuple[Ending, ...] = (),
        answer: Answer | None = None,
    ) -> None:
        self.request_id: str = seqs[0].request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params: SamplingParams = seqs[0].sampling_params
        self.seqs = seqs
        self.stream = stream
        self.completions = completions
        has_stop_strings = bool(self.sampling_params.stop_strings)
        self.endings = (*endings, end_at_stop_strings) if has_stop_strings else endings
        self.answer = answer
        # text is made in each step if the user streams it or a stop string may be in it, else at the end
        self.reads_each_step = self.stream or has_stop_strings
        self.arrival_time = time.monotonic()
        self.scheduled_time: float | None = None
        self.token_times: list[float] = []  # when a step brought it tokens
        self.finished_time: float | None = None

    @property
    def is_finished(self) -> bool:
        for seq in self.seqs:  # noqa: SIM110 (called for each stream in each step: a generator costs five times as much)
            if seq.finish_reason is None:
                return False
        return True

    def read_token(self, seq: sequence.Sequence, tokens: "StepTokens", row: int) -> None:
        """Take the results of one sequence from row `row` of a step's `tokens`."""
        completion = self.completions[seq.sample_index]
        if tokens.logprobs is not None and tokens.token_ids[row] != NO_TOKEN:
            completion.add_logprobs(tokens.logprobs[row], tokens.token_ids[row])
        if self.reads_each_step:
            completion.read_token(tokens.token_ids[row])

    def finish_step(self, scheduler: Scheduler, now: float) -> None:
        """End sequences, if anything ends them, after all tokens of a step have been read."""
        self.token_times.append(now)
        for end in self.endings:
            end(self, scheduler)

    def queue(self, scheduler: Scheduler, max_num_seqs: int) -> None:
        """Add the samples to the scheduler. Those of one call of `add` run at the same time."""
        for first in self.seqs[::max_num_seqs]:
            scheduler.add(first)

    def abort(self, scheduler: Scheduler) -> None:
        super().abort(scheduler)
        self.finished_time = time.monotonic()

    def make_output(self) -> Any:
        """Return a snapshot of the request."""
        if self.answer is not None:
            return self.answer.make_output(self)
        is_finished, first = self.finished_time is not None, self.seqs[0]
        if is_finished or not self.reads_each_step:  # a step that failed may not have read the last token
            for completion in self.completions:
                completion.read_tokens()
        output = RequestOutput.__new__(RequestOutput)  # `__init__` would need the metrics now
        output.request_id = self.request_id
        output.prompt = self.prompt
        output.prompt_token_ids = self.prompt_token_ids
        output.prompt_logprobs = None
        output.outputs = [one.make_output() for one in self.completions if not one.gives_deltas or one.has_news()]
        output.finished = is_finished
        output.num_cached_tokens = first.num_cached_tokens or 0
        for reader in first.readers:
            reader.add_to(output)
        if is_finished:  # now, so that the output does not keep the request
            output.metrics = self.make_metrics()
        else:
            output._recipe = Request._metrics_at, self, *self._progress()
        return output

    def make_metrics(self) -> RequestMetrics:
        return self._metrics_at(*self._progress())

    def _progress(self) -> tuple[int, int, int, float | None]:
        """Return the counters that lazily made metrics need."""
        seqs = self.seqs
        first = seqs[0]
        # not by the property: each stream needs this in each step
        num_output_tokens, num_preemptions = len(first.token_ids) - first.num_prompt_tokens, first.num_preemptions
        if len(seqs) > 1:
            num_output_tokens = max(seq.num_output_tokens for seq in seqs)
            num_preemptions = sum(seq.num_preemptions for seq in seqs)
        return len(self.token_times), num_output_tokens, num_preemptions, self.finished_time

    def _metrics_at(
        self, num_times: int, num_output_tokens: int, num_preemptions: int, finished_time: float | None
    ) -> RequestMetrics:
        times, misses = self.token_times[:num_times], self.seqs[0].prefix_misses
        return RequestMetrics(
            self.arrival_time,
            times[0] if times else None,
            finished_time,
            num_output_tokens,
            self.scheduled_time,
            times,
            num_preemptions,
            misses and misses.copy(),
        )


def end_at_stop_strings(request: Request, scheduler: Scheduler) -> None:
    """End the samples whose text contains a stop string."""
    for completion in request.completions:
        if completion.detokenizer.stop_string is not None:
            completion.end_at(completion.detokenizer.stop_string, scheduler)


def make_detokenizer(
    decoder: TokenDecoder | None, params: SamplingParams, prompt_token_ids: list[int]
) -> FullDetokenizer | None:
    """Return a detokenizer for one sample, or None if no text is wanted, or the model has no tokenizer."""
    return None if decoder is None or not params.detokenize else FullDetokenizer(decoder, params, prompt_token_ids)


# ---- a step's results


def note_scheduled(
    requests: dict[str, Request], admitted: Iterable[Sequence], preempted: Iterable[Sequence], now: float
) -> None:
    """Note the time at which requests were first scheduled, and count preemptions."""
    for seq in admitted:
        request = requests.get(seq.request_id)
        if request is not None and request.scheduled_time is None:
            request.scheduled_time = now
    for seq in preempted:
        seq.num_preemptions += 1
