"""A request from arrival to end: its sequences' tokens become text, log-probabilities and outputs.

Made by `intake.py`, kept by `LLMEngine` until the request has finished.
"""

from typing import Any

import numpy as np

from nanovllm.engine.detokenizer import Detokenizer, TokenDecoder
from nanovllm.execution.logprobs import LogprobRows, prompt_targets
from nanovllm.execution.model_runner import StepTokens
from nanovllm.execution.pooling import pooled_chunks
from nanovllm.execution.prompt_results import PromptRows
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.scheduling.sequence import Sequence
from nanovllm.scheduling.step import SchedulerOutput

PositionLogprobs = dict[int, Logprob]


class Completion:
    """One sample of a request: its sequence, its text, and the log-probabilities if they are wanted."""

    def __init__(self, seq: Sequence, tokenizer: Any, decoder: TokenDecoder | None) -> None:
        self.seq = seq
        self.tokenizer = tokenizer
        self.detokenizer = Detokenizer(decoder, seq.sampling_params)
        self.num_seen_tokens = 0  # output tokens that the detokenizer has got
        self.logprobs: list[PositionLogprobs] | None = None if seq.sampling_params.logprobs is None else []
        self.cumulative_logprob = 0.0

    def read_text(self) -> None:
        """Make text of the new tokens; the text of the token that ended the sequence is left out, as in vLLM."""
        seq = self.seq
        is_finished = seq.finish_reason is not None
        stop = seq.num_known_tokens
        if seq.finish_reason == "stop" and not seq.sampling_params.include_stop_str_in_output:
            stop -= 1
        start = seq.num_prompt_tokens + self.num_seen_tokens
        self.detokenizer.append(seq.token_ids.view(start, stop).tolist(), is_finished)
        self.num_seen_tokens = seq.num_output_tokens

    def add_logprobs(self, rows: LogprobRows, row: int) -> None:
        k = self.seq.sampling_params.logprobs
        if self.logprobs is not None and k is not None:
            token_id = int(self.seq.token_ids.view()[-1])
            self.logprobs.append(position_logprobs(rows, row, token_id, k, self.tokenizer))
            self.cumulative_logprob += self.logprobs[-1][token_id].logprob

    def make_output(self) -> CompletionOutput:
        seq = self.seq
        return CompletionOutput(
            index=seq.sample_index,
            text=self.detokenizer.text(seq.finish_reason is not None),
            token_ids=seq.output_token_ids,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
        )


class Request:
    """`seqs` are its samples; with `stream` every step that advances it gives an output, else only its last."""

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
        self.stream = stream
        self.tokenizer = tokenizer
        self.completions = [Completion(seq, tokenizer, decoder) for seq in seqs]
        # text is made in each step if the user streams it or a stop string may be in it, else at the end
        self.reads_each_step = stream or bool(self.sampling_params.stop_strings)
        wants_prompt_logprobs = self.sampling_params.prompt_logprobs is not None
        self.prompt_logprobs: list[PositionLogprobs | None] | None = [None] if wants_prompt_logprobs else None
        self.arrival_time = arrival_time
        self.scheduled_time: float | None = None
        self.token_times: list[float] = []  # when a step brought it tokens
        self.finished_time: float | None = None

    @property
    def is_finished(self) -> bool:
        return all(seq.finish_reason is not None for seq in self.seqs)

    def read_token(self, seq: Sequence, tokens: StepTokens, row: int) -> None:
        """Take the results of one sequence from row `row` of a step's `tokens`."""
        completion = self.completions[seq.sample_index]
        if tokens.logprobs is not None:
            completion.add_logprobs(tokens.logprobs, row)
        if self.reads_each_step or seq.finish_reason is not None:
            completion.read_text()

    def read_rest(self) -> None:
        """Read the text of tokens that a failed step has appended; done twice, this changes nothing."""
        for completion in self.completions:
            completion.read_text()

    def end_step(self, scheduler: Scheduler, now: float) -> None:
        """After all tokens of a step have been read: end the sequences whose text holds a stop string."""
        self.token_times.append(now)
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
        """All that is known so far, as a snapshot."""
        completions = [completion.make_output() for completion in self.completions]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            outputs=completions,
            finished=self.is_finished,
            num_cached_tokens=self.seqs[0].num_cached_tokens or 0,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                scheduled_time=self.scheduled_time,
                first_token_time=self.token_times[0] if self.token_times else None,
                finished_time=self.finished_time,
                token_times=self.token_times.copy(),
                num_output_tokens=max(len(completion.token_ids) for completion in completions),
                num_preemptions=sum(seq.num_preemptions for seq in self.seqs),
            ),
        )


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
