"""A request, and its samples: how tokens become text and log-probabilities, and what the user is given.

An output is a snapshot: it shares nothing that changes. `InputProcessor` makes requests, `LLMEngine` drives them. Other
kinds of request (`extras/beam_search`, `extras/embedding`) and of output (`extras/deltas.py`) are subclasses.
"""

from collections.abc import Iterator, Mapping
from itertools import count

from nanovllm.detokenizer import TokenDecoder, make_detokenizer
from nanovllm.model_runner import StepTokens
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampler import LogprobRow
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence
from nanovllm.step import SchedulerOutput


class PositionLogprobs(Mapping[int, Logprob]):
    """As a dict: the chosen token, then the k likeliest (-1: all), as in vLLM; each `Logprob` is made when read."""

    def __init__(self, row: LogprobRow, token_id: int, k: int, decoder: TokenDecoder | None) -> None:
        value, rank, top, top_ids = row
        chosen = {token_id: (value, rank)}
        likeliest = dict(zip(top_ids[: None if k < 0 else k], zip(top, count(1), strict=False), strict=False))
        self.entries = chosen | likeliest | chosen  # token id -> log-probability, rank
        self.decoder = decoder

    def __getitem__(self, token_id: int) -> Logprob:
        return Logprob(*self.entries[token_id], None if self.decoder is None else self.decoder.text_of(token_id))

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __reduce__(self) -> tuple[type, tuple[dict[int, Logprob]]]:
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return repr(dict(self))


class Completion:
    """One sample: a sequence, its text, and the log-probabilities if they are wanted."""

    has_news = True  # whether the request's next output shows it

    def __init__(self, seq: Sequence, decoder: TokenDecoder | None) -> None:
        self.seq = seq
        self.decoder = decoder
        self.detokenizer = make_detokenizer(decoder, seq.sampling_params)
        self.token_ids: list[int] = []  # output tokens that the detokenizer has got
        self.logprobs: list[Mapping[int, Logprob]] | None = None if seq.sampling_params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self._text_without_stop = not seq.sampling_params.include_stop_str_in_output

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

    def add_logprobs(self, row: LogprobRow, token_id: int) -> None:
        k = self.seq.sampling_params.logprobs
        if self.logprobs is not None and k is not None:
            self.logprobs.append(PositionLogprobs(row, token_id, k, self.decoder))
            self.cumulative_logprob += row[0]

    def make_output(self) -> CompletionOutput:
        """All so far."""
        seq, logprobs = self.seq, self.logprobs
        output = CompletionOutput.__new__(CompletionOutput)  # `__init__` would want the token ids now
        output.index = seq.sample_index
        output.finish_reason = finish_reason = seq.finish_reason
        output.stop_reason = seq.stop_reason
        output.text = self.detokenizer.text(finish_reason is not None)
        # the list grows, its beginning stays
        beginning = slice(len(self.token_ids))
        output._recipe = list.__getitem__, self.token_ids, beginning  # type: ignore[misc]  # a slot of LazyRecord
        output.logprobs = None if logprobs is None else logprobs.copy()
        output.cumulative_logprob = None if logprobs is None else self.cumulative_logprob
        return output


class Request:
    """`seqs` are its samples; with `stream` every step that advances it gives an output, else only its last."""

    gives_tokens = True  # whether the user sees the tokens that are drawn

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        seqs: list[Sequence],
        stream: bool,
        decoder: TokenDecoder | None,
        arrival_time: float,
        completion_class: type[Completion] = Completion,
    ) -> None:
        self.request_id = seqs[0].request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params: SamplingParams = seqs[0].sampling_params
        self.seqs = seqs
        self.stream = stream
        self.completions = [completion_class(seq, decoder) for seq in seqs]
        # text is made in each step if the user streams it or a stop string may be in it, else at the end
        self._has_stop_strings = bool(self.sampling_params.stop_strings)
        self.reads_each_step = self.stream or self._has_stop_strings
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
            completion.add_logprobs(tokens.logprobs[row], tokens.token_ids[row])
        if self.reads_each_step:
            completion.read_token(tokens.token_ids[row])

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

    def make_output(self) -> RequestOutput:
        """All that is known so far, as a snapshot."""
        is_finished = self.finished_time is not None
        if is_finished or not self.reads_each_step:  # a step that failed may have read nothing of the last token
            for completion in self.completions:
                completion.read_text()
        output = RequestOutput.__new__(RequestOutput)  # `__init__` would want the metrics now
        output.request_id = self.request_id
        output.prompt = self.prompt
        output.prompt_token_ids = self.prompt_token_ids
        output.prompt_logprobs = None
        output.outputs = [one.make_output() for one in self.completions if one.has_news]
        output.finished = is_finished
        output.num_cached_tokens = self.seqs[0].num_cached_tokens or 0
        for reader in self.seqs[0].readers:
            reader.add_to(output)
        if is_finished:  # now, so that the output does not keep the request
            output.metrics = self.make_metrics()
        else:
            output._recipe = Request._metrics_at, self, *self._progress()  # type: ignore[misc]  # LazyRecord's slot
        return output

    def make_metrics(self) -> RequestMetrics:
        return self._metrics_at(*self._progress())

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


# ---- a step's results


def note_admitted(requests: dict[str, Request], scheduled: SchedulerOutput, now: float) -> None:
    """Requests that begin to be served have waited until now."""
    for seq in scheduled.admitted:
        request = requests.get(seq.request_id)
        if request is not None and request.scheduled_time is None:
            request.scheduled_time = now


def read_tokens(
    requests: dict[str, Request], scheduled: SchedulerOutput, advanced: list[tuple[int, Sequence]], tokens: StepTokens
) -> list[Request]:
    """Give a step's results to readers and requests, and return the requests that advanced."""
    for readings in tokens.readings:
        readings.deliver(scheduled)
    advanced_requests: dict[str, Request] = {}
    for row, seq in advanced:
        request = requests.get(seq.request_id)
        if request is not None:  # else it was aborted during this step
            request.read_token(seq, tokens, row)
            advanced_requests[seq.request_id] = request
    return list(advanced_requests.values())
