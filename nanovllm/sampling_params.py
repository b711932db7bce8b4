"""What one request may ask for.

Decides which fields exist and which values are legal; names, defaults and meanings are vLLM's. `sampling_batch.py`
makes tensors of them for `sampler.py`, `detokenizer.py` finds stop strings, and the `Scheduler` ends a sequence.
"""

from collections import abc
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm.checks import (
    check_bool,
    check_int,
    check_number,
    extra,
    import_extra,
    names_of_extras,
    takes_vllm_options,
)

if TYPE_CHECKING:
    import torch

    from nanovllm.extras.beam_search.params import BeamSearchParams as BeamSearchParams
    from nanovllm.extras.structured.params import StructuredOutputsParams
else:  # vLLM has these two names here, too
    FILES = {"BeamSearchParams": "beam_search/params", "StructuredOutputsParams": "structured/params"}
    __getattr__ = names_of_extras(__name__, FILES)

LogitsProcessor = Callable[[list[int], "torch.Tensor"], "torch.Tensor"]
"""(output token ids so far, logits [vocab_size]) -> logits [vocab_size]"""


class RequestOutputKind(Enum):
    """What each output of a request that is streamed holds. The values are vLLM's."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """Text, tokens and log-probabilities that are new since the output before; only completions with news."""
    FINAL_ONLY = 2
    """There is one output, when the request has finished."""


@takes_vllm_options("request")
@dataclass(slots=True)
class SamplingParams:
    """Fields may be assigned until a request is added: the request takes a `clone`, and sees no later change.

    A bad value raises a TypeError or ValueError that names the field, the value and what is allowed: when the field is
    assigned, or, where fields do not go together, when the object is made and when a request takes its clone.
    """

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
    """Draw from this number of likeliest tokens; 0 or -1 is all."""
    min_p: float = 0.0
    """Draw from tokens at least this many times as likely as the likeliest (https://arxiv.org/abs/2407.01082)."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else the engine does."""
    stop: str | Collection[str] | None = None
    """Texts that end the request; the text before them is the output."""
    stop_token_ids: Collection[int] | None = None
    """Tokens that end the request, also under `ignore_eos`; the stop token is part of the output."""
    bad_words: Collection[str] | None = None
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
    """Log-probabilities of this number of likeliest tokens at each position, and of the chosen one; -1 is all."""
    prompt_logprobs: int | None = None
    """The same for the positions of the prompt."""
    detokenize: bool = True
    """Whether to make text of the output."""
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens such as end markers."""
    spaces_between_special_tokens: bool = True
    """Whether neighbouring special tokens keep the spaces that the tokenizer writes between them."""
    truncate_prompt_tokens: int | None = None
    """Keep only this number of the prompt's last tokens; -1 keeps as many as leave room for `max_tokens`."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of a stream holds: all so far, what is new, or only the end."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens; each in [-100, 100]."""
    allowed_token_ids: Collection[int] | None = None
    """No other tokens are chosen."""
    logits_processors: Collection[LogitsProcessor] | None = None
    """Called with the output so far and the request's logits, in order; each returns the logits to go on with."""
    structured_outputs: "StructuredOutputsParams | Mapping[str, Any] | None" = None
    """The form of the output: JSON of a schema, a regular expression, a choice, or a grammar."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in FIELD_CHECKS:
            raise AttributeError(f"SamplingParams has no field {name}; it has {', '.join(FIELD_CHECKS)}")
        FIELD_CHECKS[name](name, value)
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        """Fields that do not go together."""
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n must be 1 with temperature 0, where all samples would be the same, got {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be <= max_tokens {self.max_tokens}, got {self.min_tokens}")
        if self.stop_strings and not self.detokenize:
            raise ValueError(f"stop needs detokenize=True, got stop {self.stop!r} with detokenize=False")

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """As a server makes them of a request's body: None is a field's default, and bias keys may be strings.

        A bias outside [-100, 100] is cut to it, as in vLLM.
        """
        with extra("extras/vllm", "SamplingParams.from_optional"):
            from nanovllm.extras.vllm.request_fields import given_fields
        return cls(**given_fields(values, fields(cls)))

    def clone(self) -> "SamplingParams":
        """An equal object that shares no list or dict with this one, checked anew: lists may have been appended to."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.structured_outputs is not None:
            from nanovllm.extras.structured.params import StructuredOutputsParams  # which has checked the field

            values["structured_outputs"] = StructuredOutputsParams.of(self.structured_outputs).clone()
        return SamplingParams(**{name: copy_of(value) for name, value in values.items()})

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def is_plain(self) -> bool:
        """Whether the draw needs only a temperature; then `sampling_batch.py` looks no further."""
        return (self.top_p, self.min_p) == (1, 0) and self.top_k <= 0 and self.logprobs is None

    @property
    def changes_logits(self) -> bool:
        """Whether a stage of `extras/logits.py` is asked for."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        lists = self.allowed_token_ids or self.logit_bias or self.bad_words or self.logits_processors
        return penalties != (0, 0, 1) or bool(lists)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def copy_of(value: Any) -> Any:
    """A list or dict of its own; any other value is never changed in place."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, abc.Sequence) and not isinstance(value, str | tuple) else value


# ---- how each field is checked


def check_list(name: str, value: Any, of_what: str) -> Collection[Any]:
    """`value`, or an empty list for None; TypeError if it is not a list."""
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, abc.Sequence):
        raise TypeError(f"{name} must be a list of {of_what} or None, got {value!r}")
    return value


def check_token_ids(name: str, value: Any) -> None:
    for i, token_id in enumerate(check_list(name, value, "token ids")):
        check_int(f"{name}[{i}]", token_id, 0)


def check_strings(name: str, value: Any, blank: str = "") -> None:
    """A list of strings; none of them consists of characters of `blank` only."""
    for i, string in enumerate(check_list(name, value, "strings")):
        if not isinstance(string, str):
            raise TypeError(f"{name}[{i}] must be a str, got {string!r}")
        if not string.strip(blank):
            raise ValueError(f"{name}[{i}] must not be empty, got {string!r}")


def check_stop(name: str, value: Any) -> None:
    check_strings(name, [value] if isinstance(value, str) else value)


def check_output_kind(name: str, value: Any) -> None:
    if not isinstance(value, RequestOutputKind):
        allowed = ", ".join(str(kind) for kind in RequestOutputKind)
        raise TypeError(f"{name} must be one of {allowed}, got {value!r}")


def check_by_extra(name: str, value: Any, file: str) -> None:
    """By the extra that reads the field; None asks for nothing."""
    if value is not None:
        import_extra(file, name).FIELD_CHECKS[name](name, value)


FIELD_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "n": partial(check_int, minimum=1),
    "presence_penalty": partial(check_number, low=-2, high=2),
    "frequency_penalty": partial(check_number, low=-2, high=2),
    "repetition_penalty": partial(check_number, low=0, open_low=True),
    "temperature": partial(check_number, low=0),
    "top_p": partial(check_number, low=0, high=1, open_low=True),
    "top_k": partial(check_int, minimum=-1, maximum=2**31 - 1),
    "min_p": partial(check_number, low=0, high=1),
    "seed": partial(check_int, minimum=0, optional=True, maximum=2**64 - 1),
    "stop": check_stop,
    "stop_token_ids": check_token_ids,
    "bad_words": partial(check_by_extra, file="logits"),
    "include_stop_str_in_output": check_bool,
    "ignore_eos": check_bool,
    "max_tokens": partial(check_int, minimum=1, optional=True),
    "min_tokens": partial(check_int, minimum=0),
    "logprobs": partial(check_int, minimum=-1, optional=True),
    "prompt_logprobs": partial(check_int, minimum=-1, optional=True),
    "detokenize": check_bool,
    "skip_special_tokens": check_bool,
    "spaces_between_special_tokens": check_bool,
    "truncate_prompt_tokens": partial(check_by_extra, file="truncation"),
    "output_kind": check_output_kind,
    "logit_bias": partial(check_by_extra, file="logits"),
    "allowed_token_ids": partial(check_by_extra, file="logits"),
    "logits_processors": partial(check_by_extra, file="logits"),
    "structured_outputs": partial(check_by_extra, file="structured/params"),
}
