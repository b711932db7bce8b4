"""A request from arrival to end: its samples (`completion.py`) get their tokens, end, and are given to the user.

Made by `intake.py`, kept by `LLMEngine` until the request has finished.
"""

from typing import Any

import numpy as np

from nanovllm.engine.completion import Completion, PositionLogprobs, position_logprobs
from nanovllm.engine.detokenizer import TokenDecoder
from nanovllm.execution.logprobs import LogprobRows, prompt_targets
from nanovllm.execution.model_runner import StepTokens
from nanovllm.execution.pooling import pooled_chunks
from nanovllm.execution.prompt_results import PromptRows
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.sequence import Sequence
from nanovllm.scheduling.step import SchedulerOutput


class Request:
    """`seqs` are its samples; with `stream` every step that advances it gives an output, else only its last.

    `output_kind` says what such an output holds; FINAL_ONLY is as good as no `stream`.
    """

    gives_tokens = True
    """Whether the user sees the tokens that are drawn."""

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        seqs: list[Sequence],
        stream: bool,
        tokenizer: Any,
        decoder: TokenDecoder | None,
        arrival_time: float,
    ) -> None:
        self.request_id = seqs[0].request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params: SamplingParams = seqs[0].sampling_params
        self.seqs = seqs
        kind = self.sampling_params.output_kind
        self.stream = stream and kind is not RequestOutputKind.FINAL_ONLY
        self._gives_deltas = self.stream and kind is RequestOutputKind.DELTA
        self._has_given_prompt = False  # deltas give log-probabilities of the prompt once
        self.tokenizer = tokenizer
        self.completions = [Completion(seq, tokenizer, decoder) for seq in seqs]
        # text is made in each step if the user streams it or a stop string may be in it, else at the end
        self._has_stop_strings = bool(self.sampling_params.stop_strings)
        self.reads_each_step = self.stream or self._has_stop_strings
        wants_prompt_logprobs = self.sampling_params.prompt_logprobs is not None
        self.prompt_logprobs: list[PositionLogprobs | None] | None = [None] if wants_prompt_logprobs else None
        self.arrival_time = arrival_time
        self.scheduled_time: float | None = None
        self.token_times: list[float] = []  # when a step brought it tokens
        self.finished_time: float | None = None

    @property
    def is_finished(self) -> bool:
        for seq in self.seqs:  # noqa: SIM110 (asked of each stream in each step: a generator costs five times as much)
            if seq.finish_reason is None:
                return False
        return True

    def read_token(self, seq: Sequence, tokens: StepTokens, row: int) -> None:
        """Take the results of one sequence from row `row` of a step's `tokens`."""
        completion = self.completions[seq.sample_index]
        if tokens.logprobs is not None:
            completion.add_logprobs(tokens.logprobs, row)
        if self.reads_each_step:
            completion.read_token(tokens.token_ids[row])

    def read_rest(self) -> None:
        """Read the text of tokens that have not been read yet; done twice, this changes nothing."""
        for completion in self.completions:
            completion.read_text()

    def end_step(self, scheduler: Scheduler, now: float) -> None:
        """After all tokens of a step have been read: end the sequences whose text holds a stop string."""
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

    def abort(self, scheduler: Scheduler, now: float) -> None:
        for completion in self.completions:
            if completion.seq.finish_reason is None:
                scheduler.finish(completion.seq, "abort")
                completion.read_text()
        self.finished_time = now

    def add_sum(self, chunk_sum: np.ndarray, positions: range) -> None:
        """Take the sum of the hidden states of the prompt at `positions`: [hidden_size]"""
        raise NotImplementedError("only sequences of an `Embedding` are pooled")

    def add_prompt_logprobs(self, rows: LogprobRows, first_row: int, positions: range) -> None:
        """Log-probabilities of the prompt at `positions`; those computed again after preemption are known already."""
        k = self.sampling_params.prompt_logprobs
        assert self.prompt_logprobs is not None
        assert k is not None
        for row, position in enumerate(positions, first_row):
            if position >= len(self.prompt_logprobs):
                token_id = self.prompt_token_ids[position]
                self.prompt_logprobs.append(position_logprobs(rows, row, token_id, k, self.tokenizer))

    def make_output(self) -> RequestOutput:
        """All that is known so far, or what is new, as a snapshot."""
        if not self.reads_each_step:
            self.read_rest()
        output = RequestOutput.__new__(RequestOutput)  # `__init__` would want the metrics now
        output.request_id = self.request_id
        output.prompt = self.prompt
        output.prompt_token_ids = self.prompt_token_ids
        output.prompt_logprobs = None if self.prompt_logprobs is None else self._take_prompt_logprobs()
        output.outputs = self._make_deltas() if self._gives_deltas else [one.make_output() for one in self.completions]
        output.finished = is_finished = self.finished_time is not None
        output.num_cached_tokens = self.seqs[0].num_cached_tokens or 0
        if is_finished:  # now, so that the output does not keep the request
            output.metrics = self.make_metrics()
        else:
            output._recipe = Request._metrics_at, self, *self._progress()  # type: ignore[misc]  # LazyRecord's slot
        return output

    def make_metrics(self) -> RequestMetrics:
        return self._metrics_at(*self._progress())

    def _make_deltas(self) -> list[CompletionOutput]:
        deltas = [completion.make_delta() for completion in self.completions]
        return [delta for delta in deltas if delta is not None]

    def _take_prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        assert self.prompt_logprobs is not None
        is_first, self._has_given_prompt = not self._has_given_prompt, True
        return self.prompt_logprobs.copy() if is_first or not self._gives_deltas else None

    def _progress(self) -> tuple[int, int, int, float | None]:
        """What metrics that are made later must know of today."""
        seqs = self.seqs
        num_output_tokens, num_preemptions = seqs[0].num_output_tokens, seqs[0].num_preemptions
        if len(seqs) > 1:
            num_output_tokens = max(seq.num_output_tokens for seq in seqs)
            num_preemptions = sum(seq.num_preemptions for seq in seqs)
        return len(self.token_times), num_output_tokens, num_preemptions, self.finished_time

    def _metrics_at(
        self, num_times: int, num_output_tokens: int, num_preemptions: int, finished_time: float | None
    ) -> RequestMetrics:
        times = self.token_times[:num_times]
        return RequestMetrics(
            self.arrival_time,
            times[0] if times else None,
            finished_time,
            num_output_tokens,
            self.scheduled_time,
            times,
            num_preemptions,
        )


def note_admitted(requests: dict[str, Request], scheduled: SchedulerOutput, now: float) -> None:
    """Requests that begin to be served have waited until now."""
    for seq in scheduled.admitted:
        request = requests.get(seq.request_id)
        if request is not None and request.scheduled_time is None:
            request.scheduled_time = now


def read_tokens(
    requests: dict[str, Request],
    scheduled: SchedulerOutput,
    advanced: list[tuple[int, Sequence]],
    tokens: StepTokens,
) -> list[Request]:
    """Give a step's tokens and log-probabilities to their requests, and return those that advanced."""
    if tokens.prompt_results is not None:
        read_prompt_results(requests, scheduled, tokens.prompt_results)
    advanced_requests: dict[str, Request] = {}
    for row, seq in advanced:
        request = requests.get(seq.request_id)
        if request is not None:  # else it was aborted during this step
            request.read_token(seq, tokens, row)
            advanced_requests[seq.request_id] = request
    return list(advanced_requests.values())


def read_prompt_results(requests: dict[str, Request], scheduled: SchedulerOutput, results: PromptRows) -> None:
    """Give what the step has computed of prompts to their requests, by `request_id`.

    A request may have been aborted, and another may have its id: only one that has the sequence takes the results.
    """
    if results.logprobs is not None:
        first_row = 0
        for _, seq, positions in prompt_targets(scheduled):
            request = requests.get(seq.request_id)
            if request is not None and request.seqs[0] is seq:
                request.add_prompt_logprobs(results.logprobs, first_row, positions)
            first_row += len(positions)
    if results.sums is not None:
        for chunk_sum, (_, seq, positions) in zip(results.sums, pooled_chunks(scheduled), strict=True):
            request = requests.get(seq.request_id)
            if request is not None and request.seqs[0] is seq:
                request.add_sum(chunk_sum, positions)
