"""A request and its samples: how tokens become text, and what the user receives. `LLMEngine` makes and drives them."""

from array import array
from dataclasses import dataclass
from typing import Any

import xxhash

from nanovllm.detokenizer import Detokenizer
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence

# ---- what users receive: snapshots that no later step changes. The names are vLLM's


@dataclass
class CompletionOutput:
    """One sample of a request, up to now."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """`stop` (a token or string), `length` (`max_tokens`, `max_model_len`, the whole cache), `abort`, or None while the
    sample grows."""
    stop_reason: int | str | None
    """The token of `stop_token_ids` or the string of `stop` that ended the sample, or `kv_cache` if the whole cache was
    too small to go on. None for the model's own end-of-sequence token."""


@dataclass
class RequestOutput:
    """A request with all of its samples, up to now; `finished` is True on its last output."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose K and V were found in the prefix cache."""


# ---- a request


class Completion:
    """One sample: a sequence and its text. `detokenizer` is None if the model has no tokenizer."""

    def __init__(self, seq: Sequence, detokenizer: Detokenizer | None) -> None:
        self.seq = seq
        self.detokenizer = detokenizer
        self.token_ids: list[int] = []  # output tokens that have been read

    def read_tokens(self) -> None:
        """Make text of the new tokens. The token that ended the sequence gives none, as in vLLM."""
        seq, detokenizer = self.seq, self.detokenizer
        new = seq.token_ids[seq.num_prompt_tokens + len(self.token_ids) :].tolist()
        self.token_ids += new
        if detokenizer is None:
            return
        for token_id in new[:-1] if seq.finish_reason == "stop" else new:
            detokenizer.append(token_id)
        if seq.finish_reason is not None:
            detokenizer.finish()

    def end_at(self, stop_string: str, scheduler: Scheduler) -> None:
        """End the sequence, whose text contains a stop string."""
        seq = self.seq
        if seq.finish_reason != "stop":
            if seq.finish_reason is None:
                scheduler.finish(seq, "stop", stop_string)
            seq.finish_reason, seq.stop_reason = "stop", stop_string  # also if `max_tokens` has ended it just now

    def make_output(self) -> CompletionOutput:
        seq = self.seq
        text = "" if self.detokenizer is None else self.detokenizer.text(seq.finish_reason is not None)
        return CompletionOutput(seq.sample_index, text, self.token_ids.copy(), seq.finish_reason, seq.stop_reason)


class Request:
    """A prompt with one sequence for each sample.

    With `stream`, every step that advances the request gives an output; otherwise only its last step does.
    """

    def __init__(self, prompt: str | None, seqs: list[Sequence], stream: bool, tokenizer: Any) -> None:
        self.request_id = seqs[0].request_id
        self.prompt = prompt
        self.prompt_token_ids: list[int] = seqs[0].token_ids.tolist()
        self.seqs = seqs
        self.stream = stream
        stops = seqs[0].sampling_params.stop_strings
        ids = self.prompt_token_ids
        self.completions = [Completion(seq, tokenizer and Detokenizer(tokenizer, ids, stops)) for seq in seqs]

    @property
    def is_finished(self) -> bool:
        return all([seq.finish_reason is not None for seq in self.seqs])

    def read_tokens(self, seq: Sequence, scheduler: Scheduler) -> None:
        """Read the new tokens of `seq`, one of the samples, and end it if its text now contains a stop string."""
        completion = self.completions[seq.sample_index]
        completion.read_tokens()
        if completion.detokenizer is not None and completion.detokenizer.stop_string is not None:
            completion.end_at(completion.detokenizer.stop_string, scheduler)

    def abort(self, scheduler: Scheduler) -> None:
        """End the samples that are not finished, keeping their text."""
        for completion in self.completions:
            if completion.seq.finish_reason is None:
                scheduler.finish(completion.seq, "abort")
                completion.read_tokens()

    def make_output(self) -> RequestOutput:
        """Return a snapshot of the request."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion.make_output() for completion in self.completions],
            finished=self.is_finished,
            num_cached_tokens=self.seqs[0].num_cached_tokens or 0,
        )


def make_seed(seed: int | None, engine_seed: int, number: int, prompt_token_ids: list[int]) -> int:
    """Return the seed of a request's random numbers. Without a `seed`, `number` decides: the number of requests before.

    The prompt is mixed in: with the same seed, the same number would decide the first token of every prompt.
    """
    own = 1 << 63 | (engine_seed * 1_000_003 + number) % 2**63 if seed is None else seed
    return xxhash.xxh3_64_intdigest(array("q", prompt_token_ids), own)
