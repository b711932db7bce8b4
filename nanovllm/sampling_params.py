"""What one request may ask for.

Decides which fields exist and which values are legal; names, defaults and meanings are vLLM's. `sampling_batch.py`
makes tensors of them for `sampler.py`, `detokenizer.py` finds stop strings, and the `Scheduler` ends a sequence.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.checks import check_bool, check_int, check_number

LogitsProcessor = Callable[[list[int], torch.Tensor], torch.Tensor]
"""(output token ids so far, logits [vocab_size]) -> logits [vocab_size]"""


@dataclass(frozen=True)
class SamplingParams:
    """A bad value raises a TypeError or ValueError that names the field, the value and what is allowed."""

    n: int = 1
    """Samples of one prompt, which is computed once. More than one needs a temperature above 0."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the output holds; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token as many times as the output holds it; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by it if positive, else multiplied (CTRL,
    https://arxiv.org/abs/1909.05858)."""
    temperature: float = 1.0
    """Logits are divided by it before the draw; 0 takes the likeliest token (greedy)."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities add up to this (https://arxiv.org/abs/1904.09751)."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens; 0 or -1 is all."""
    min_p: float = 0.0
    """Draw from tokens at least this many times as likely as the likeliest (https://arxiv.org/abs/2407.01082)."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else the engine does."""
    stop: str | SequenceOf[str] | None = None
    """Texts that end the request; the text before them is the output."""
    stop_token_ids: SequenceOf[int] | None = None
    """Tokens that end the request, also under `ignore_eos`; the stop token is part of the output."""
    bad_words: SequenceOf[str] | None = None
    """Words that must not appear: the last token of a word is not chosen after its first tokens."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string that ended it."""
    ignore_eos: bool = False
    """Whether to go on after the model's own end-of-sequence tokens."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None goes on until `max_model_len`."""
    min_tokens: int = 0
    """Tokens to generate before any end or stop token, or stop string, may end the request."""
    logprobs: int | None = None
    """Log-probabilities of so many likeliest tokens at each position, and of the chosen one; -1 is the vocabulary."""
    prompt_logprobs: int | None = None
    """The same for the positions of the prompt."""
    detokenize: bool = True
    """Whether to make text of the output."""
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens such as end markers."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens; each in [-100, 100]."""
    allowed_token_ids: SequenceOf[int] | None = None
    """No other tokens are chosen."""
    logits_processors: SequenceOf[LogitsProcessor] | None = None
    """Called with the output so far and the request's logits, in order; each returns the logits to go on with."""

    def __post_init__(self) -> None:
        check_int("n", self.n, 1)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        check_number("repetition_penalty", self.repetition_penalty, 0, open_low=True)
        check_number("temperature", self.temperature, 0)
        check_number("top_p", self.top_p, 0, 1, open_low=True)
        check_int("top_k", self.top_k, -1)
        check_number("min_p", self.min_p, 0, 1)
        check_int("seed", self.seed, 0, optional=True, maximum=2**64 - 1)
        check_int("max_tokens", self.max_tokens, 1, optional=True)
        check_int("min_tokens", self.min_tokens, 0)
        check_int("logprobs", self.logprobs, -1, optional=True)
        check_int("prompt_logprobs", self.prompt_logprobs, -1, optional=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        self._check_lists()
        self._check_together()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def is_plain(self) -> bool:
        """Whether nothing but a temperature is asked for; then `sampling_batch.py` looks no further."""
        return (
            (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0, 0, 1)
            and (self.top_p, self.min_p, self.min_tokens) == (1, 0, 0)
            and self.top_k <= 0
            and self.logprobs is None
            and self.prompt_logprobs is None
            and self.allowed_token_ids is None
            and not (self.logit_bias or self.bad_words or self.logits_processors)
        )

    @property
    def reads_output(self) -> bool:
        """Whether the next token's logits depend on the output so far: by penalties, or by processors."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1) or bool(self.logits_processors)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def _check_lists(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            for i, token_id in enumerate(check_list(name, getattr(self, name), "token ids")):
                check_int(f"{name}[{i}]", token_id, 0)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name, strings in (("stop", stop), ("bad_words", self.bad_words)):
            for i, string in enumerate(check_list(name, strings, "strings")):
                if not isinstance(string, str):
                    raise TypeError(f"{name}[{i}] must be a str, got {string!r}")
                if not string.strip(" " if name == "bad_words" else ""):
                    raise ValueError(f"{name}[{i}] must not be empty, got {string!r}")
        for i, processor in enumerate(check_list("logits_processors", self.logits_processors, "callables")):
            if not callable(processor):
                raise TypeError(f"logits_processors[{i}] must be callable, got {processor!r}")
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias must be a dict from token id to bias or None, got {self.logit_bias!r}")
        for token_id, bias in (self.logit_bias or {}).items():
            check_int("logit_bias key", token_id, 0)
            check_number(f"logit_bias[{token_id}]", bias, -100, 100)

    def _check_together(self) -> None:
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n must be 1 with temperature 0, where all samples would be the same, got {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be <= max_tokens {self.max_tokens}, got {self.min_tokens}")
        if self.stop_strings and not self.detokenize:
            raise ValueError(f"stop needs detokenize=True, got stop {self.stop!r} with detokenize=False")
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise ValueError("allowed_token_ids must name at least 1 token or be None, got an empty list")


def check_list(name: str, value: Any, of_what: str) -> SequenceOf[Any]:
    """`value`, or an empty list for None; TypeError for what is no list."""
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, SequenceOf):
        raise TypeError(f"{name} must be a list of {of_what} or None, got {value!r}")
    return value


@dataclass(frozen=True)
class BeamSearchParams:
    """A bad value raises a TypeError or ValueError that names the field, the value and what is allowed."""

    beam_width: int
    """Completions that are followed at the same time, and returned."""
    max_tokens: int
    """Tokens to generate at most."""
    ignore_eos: bool = False
    """Whether to go on after the model's end-of-sequence tokens."""
    length_penalty: float = 1.0
    """Finished completions are compared by log-probability / length ** length_penalty."""

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1)
        check_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        check_number("length_penalty", self.length_penalty, -100, 100)
