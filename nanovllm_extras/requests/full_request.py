"""A request, and its samples, with log-probabilities and times: how a step's results become outputs.

An output is a snapshot: it shares nothing that changes. `InputProcessor` makes requests, and `LLMEngine` drives them.
Other kinds of request (`beam_search/`, `embedding/`) and of output (`deltas.py`) are subclasses.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm import request
from nanovllm.scheduler import Scheduler, Step
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.requests.full_detokenizer import FullDetokenizer, TokenDecoder
from nanovllm_extras.requests.lazy_outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm_extras.sampling.runner_hooks import NO_TOKEN

if TYPE_CHECKING:
    from nanovllm_extras.sampling.logprobs import Logprob, LogprobRow
    from nanovllm_extras.sampling.runner_hooks import StepTokens


class Completion(request.Completion):
    """One sample: a sequence, its text, and the log-probabilities if they are wanted."""

    has_news = True  # whether the request's next output shows it
    seq: Sequence

    def __init__(self, seq: Sequence, decoder: TokenDecoder | None, prompt_token_ids: list[int]) -> None:
        params: Any = seq.sampling_params
        super().__init__(seq, make_detokenizer(decoder, params, prompt_token_ids))
        self.decoder = decoder
        self.num_logprobs: int | None = params.logprobs
        self.logprobs: list[Mapping[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self._text_without_stop = not params.include_stop_str_in_output

    def read_token(self, token_id: int) -> None:
        """Read the tokens of one step: usually one that is not the last."""
        seq = self.seq
        if seq.finish_reason is None and seq.token_ids.length - seq.num_prompt_tokens == len(self.token_ids) + 1:
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
            from nanovllm_extras.sampling.logprobs import PositionLogprobs

            self.logprobs.append(PositionLogprobs(row, token_id, self.num_logprobs, self.decoder))
            self.cumulative_logprob += row[0]

    def make_output(self) -> CompletionOutput:
        """Return all so far. The token ids are copied when they are read."""
        seq, logprobs = self.seq, self.logprobs
        output = CompletionOutput.__new__(CompletionOutput)  # `__init__` would need the token ids now
        finish_reason = seq.finish_reason
        output.index = seq.sample_index
        output.finish_reason = finish_reason
        output.stop_reason = seq.stop_reason
        output.text = "" if self.detokenizer is None else self.detokenizer.text(finish_reason is not None)
        # the list grows, its beginning stays
        output._recipe = list.__getitem__, self.token_ids, slice(len(self.token_ids))
        output.logprobs = None if logprobs is None else logprobs.copy()
        output.cumulative_logprob = None if logprobs is None else self.cumulative_logprob
        return output


class Request(request.Request):
    """A prompt with one sequence for each sample. `completion_class` says what an output holds of each."""

    gives_tokens = True  # whether the user sees the tokens that are sampled
    completions: list[Any]
    seqs: list[Any]

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        seqs: list[Any],
        stream: bool,
        decoder: TokenDecoder | None,
        arrival_time: float,
        completion_class: type[Completion] = Completion,
    ) -> None:
        self.request_id: str = seqs[0].request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params: SamplingParams = seqs[0].sampling_params
        self.seqs = seqs
        self.stream = stream
        self.completions = [completion_class(seq, decoder, prompt_token_ids) for seq in seqs]
        # text is made in each step if the user streams it or a stop string may be in it, else at the end
        self._has_stop_strings = bool(self.sampling_params.stop_strings)
        self.reads_each_step = self.stream or self._has_stop_strings
        self.arrival_time = arrival_time
        self.scheduled_time: float | None = None
        self.token_times: list[float] = []  # when a step brought it tokens
        self.finished_time: float | None = None

    @property
    def is_finished(self) -> bool:
        for seq in self.seqs:  # noqa: SIM110 (called for each stream in each step: a generator costs five times as much)
            if seq.finish_reason is None:
                return False
        return True

    def read_token(self, seq: Sequence, tokens: "StepTokens", row: int) -> None:
        """Take the results of one sequence from row `row` of a step's `tokens`."""
        completion = self.completions[seq.sample_index]
        if tokens.logprobs is not None and tokens.token_ids[row] != NO_TOKEN:
            completion.add_logprobs(tokens.logprobs[row], tokens.token_ids[row])
        if self.reads_each_step:
            completion.read_token(tokens.token_ids[row])

    def finish_step(self, scheduler: Scheduler, now: float) -> None:
        """End the sequences whose text contains a stop string, after all tokens of a step have been read."""
        self.token_times.append(now)
        if not self._has_stop_strings:
            return
        for completion in self.completions:
            stop_string, seq = completion.detokenizer.stop_string, completion.seq
            if stop_string is None or seq.finish_reason == "stop":
                continue
            if seq.finish_reason is None:
                scheduler.finish(seq, "stop", stop_string)
            seq.finish_reason, seq.stop_reason = "stop", stop_string

    def queue(self, scheduler: Scheduler, max_num_seqs: int) -> None:
        """Add the samples to the scheduler. Those of one call of `add` run at the same time."""
        for first in self.seqs[::max_num_seqs]:
            scheduler.add(first)

    def abort(self, scheduler: Scheduler) -> None:
        super().abort(scheduler)
        self.finished_time = time.monotonic()

    def make_output(self) -> Any:
        """Return a snapshot of the request."""
        is_finished, first = self.finished_time is not None, self.seqs[0]
        if is_finished or not self.reads_each_step:  # a step that failed may not have read the last token
            for completion in self.completions:
                completion.read_tokens()
        output = RequestOutput.__new__(RequestOutput)  # `__init__` would need the metrics now
        output.request_id = self.request_id
        output.prompt = self.prompt
        output.prompt_token_ids = self.prompt_token_ids
        output.prompt_logprobs = None
        output.outputs = [one.make_output() for one in self.completions if one.has_news]
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
        seqs: list[Any] = self.seqs
        first = seqs[0]
        # not by the property: each stream needs this in each step
        num_output_tokens, num_preemptions = first.token_ids.length - first.num_prompt_tokens, first.num_preemptions
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


def make_detokenizer(
    decoder: TokenDecoder | None, params: SamplingParams, prompt_token_ids: list[int]
) -> FullDetokenizer | None:
    """Return a detokenizer for one sample, or None if no text is wanted, or the model has no tokenizer."""
    return None if decoder is None or not params.detokenize else FullDetokenizer(decoder, params, prompt_token_ids)


# ---- a step's results


def note_admitted(requests: dict[str, Request], step: Step, now: float) -> None:
    """Note the time at which requests were first scheduled, and count preemptions."""
    for seq in step.admitted:
        request = requests.get(seq.request_id)
        if request is not None and request.scheduled_time is None:
            request.scheduled_time = now
    preempted: list[Any] = step.preempted
    for seq in preempted:
        seq.num_preemptions += 1
