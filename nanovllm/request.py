"""A request and its samples: how tokens become text, and what the user receives. `LLMEngine` makes and drives them."""

from array import array
from collections.abc import Collection, Mapping
from typing import Any

import xxhash

from nanovllm.checks import check_int
from nanovllm.detokenizer import Detokenizer
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence

Prompt = str | Collection[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}` (or both: then the text is only shown)."""


class Completion:
    """One sample: a sequence and its text. `detokenizer` is None if the model has no tokenizer."""

    def __init__(self, seq: Sequence, detokenizer: Detokenizer | None) -> None:
        self.seq = seq
        self.detokenizer = detokenizer
        self.token_ids: list[int] = []  # output tokens that have been read

    def read_tokens(self) -> None:
        """Make text of the new tokens. The token that ended the sequence gives none, as in vLLM."""
        seq, detokenizer = self.seq, self.detokenizer
        new = seq.token_ids.view(seq.num_prompt_tokens + len(self.token_ids)).tolist()
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
        self.prompt_token_ids: list[int] = seqs[0].token_ids.view().tolist()
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


# ---- prompts


def is_single_prompt(prompts: Any) -> bool:
    """Return whether `prompts` is one prompt: [1, 2] is; ["a"], [[1, 2]], [{…}] and [] are lists of prompts."""
    if isinstance(prompts, str | Mapping):
        return True
    if hasattr(prompts, "ndim"):  # an array or a tensor: a row of ids, or rows of them
        return prompts.ndim == 1
    if isinstance(prompts, bytes) or not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__"):
        raise TypeError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    first = prompts[0] if len(prompts) else []
    is_number = not hasattr(first, "__len__") or getattr(first, "ndim", None) == 0  # arrays of one number have a length
    return is_number and not isinstance(first, str | Mapping)


def encode_prompt(prompt: Prompt, tokenizer: Any, vocab_size: int) -> tuple[str | None, list[int]]:
    """Return the text of a prompt (None if there is none) and its token ids. TypeError or ValueError for a bad one."""
    text: Any = None
    token_ids: Any = prompt
    if isinstance(prompt, Mapping):
        text, given = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if isinstance(given, str):
            raise TypeError(f"prompt_token_ids must be a list of token ids, got {given!r}")
        token_ids = text if given is None else given
    if isinstance(token_ids, str):
        if tokenizer is None:
            raise ValueError("this model has no tokenizer, so a prompt must be token ids, got text")
        for i, character in enumerate(token_ids):
            if "\ud800" <= character <= "\udfff":
                raise ValueError(f"a prompt must not hold half of a surrogate pair, got {character!r} at {i}")
        text, token_ids = token_ids, tokenizer.encode(token_ids)
    return text, check_prompt(token_ids, vocab_size)


def check_prompt_len(num_tokens: int, max_model_len: int, capacity: int, block_size: int, options: str) -> None:
    """Raise ValueError if a prompt is too long for the model or the whole KV cache, which `options` enlarge."""
    if num_tokens > max_model_len - 1:
        raise ValueError(f"the prompt has {num_tokens} tokens; at most {max_model_len - 1} are allowed "
                         f"(max_model_len {max_model_len}, less one for the output)")  # fmt: skip
    if num_tokens > capacity:
        raise ValueError(f"the prompt has {num_tokens} tokens; the whole KV cache holds {capacity} "
                         f"({capacity // block_size} blocks of {block_size}): give more {options}")  # fmt: skip


def make_seed(seed: int | None, engine_seed: int, number: int, prompt_token_ids: list[int]) -> int:
    """Return the seed of a request's random numbers. Without a `seed`, `number` decides: the number of requests before.

    The prompt is mixed in: with the same seed, the same number would decide the first token of every prompt.
    """
    own = 1 << 63 | (engine_seed * 1_000_003 + number) % 2**63 if seed is None else seed
    return xxhash.xxh3_64_intdigest(array("q", prompt_token_ids), own)


def check_prompt(token_ids: Any, vocab_size: int) -> list[int]:
    """Return token ids as a list of ints in [0, vocab_size). An error names the first bad one."""
    if (
        isinstance(token_ids, bytes | Mapping)
        or not hasattr(token_ids, "__iter__")
        or getattr(token_ids, "ndim", 1) == 0
    ):
        allowed = "a str, a list of token ids, or a dict with prompt or prompt_token_ids"
        raise TypeError(f"a prompt must be {allowed}, got {type(token_ids).__name__}")
    token_ids = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    if not token_ids:
        raise ValueError("the prompt is empty; it must have at least 1 token")
    if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) >= vocab_size:
        for i, token_id in enumerate(token_ids):
            check_int(f"prompt_token_ids[{i}]", token_id, 0, maximum=vocab_size - 1)
    return list(map(int, token_ids))
