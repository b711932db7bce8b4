"""All options of one request: the core's, and those that extras read. Names, defaults and meanings are vLLM's."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from nanovllm import sampling_params
from nanovllm.checks import check_bool, check_int, check_number, checked, checks_of
from nanovllm_extras.options import structured_params
from nanovllm_extras.options.option_checks import LazyMethod, check_in, takes_vllm_options

if TYPE_CHECKING:
    import torch

    from nanovllm_extras.options.structured_params import StructuredOutputsParams

    Logits = torch.Tensor
else:  # torch is imported late, and a mapping stays one: names that `typing.get_type_hints` and pydantic resolve
    Logits = StructuredOutputsParams = Any

LogitsProcessor = Callable[[list[int], Logits], Logits]
"""(output token ids so far, logits [vocab_size]) -> logits [vocab_size]"""


class RequestOutputKind(Enum):
    """What each output of a request that is streamed holds. The values are vLLM's."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """Text, tokens and log-probabilities that are new since the output before; only completions with news."""
    FINAL_ONLY = 2
    """There is one output, when the request has finished."""


def check_output_kind(name: str, value: object) -> None:
    if not isinstance(value, RequestOutputKind):
        allowed = ", ".join(str(kind) for kind in RequestOutputKind)
        raise TypeError(f"{name} must be one of {allowed}, got {value!r}")


@takes_vllm_options("request")
@dataclass
class SamplingParams(sampling_params.SamplingParams):
    """How the tokens of a request are sampled, what its outputs hold, and when it ends.

    Fields may be assigned until a request is added: the request takes a `clone`, and sees no later change. A bad value
    raises a TypeError or ValueError that names the field, the value and what is allowed: when the field is assigned, or
    if fields do not go together, when the object is made and when a request takes its clone.
    """

    presence_penalty: float = checked(0.0, check_number, low=-2, high=2)
    """Subtracted from the logit of each token that the output holds; in [-2, 2]."""
    frequency_penalty: float = checked(0.0, check_number, low=-2, high=2)
    """Subtracted from the logit of a token as many times as the output holds it; in [-2, 2]."""
    repetition_penalty: float = checked(1.0, check_number, low=0, open_low=True)
    """Divides positive logits of tokens in prompt or output, multiplies others (CTRL, https://arxiv.org/abs/1909.05858)."""
    stop: str | Sequence[str] | None = checked(None, check_in, module="sampling.logits")
    bad_words: Sequence[str] | None = checked(None, check_in, module="sampling.logits")
    """Words that must not appear: the last token of a word is not chosen after its first tokens."""
    include_stop_str_in_output: bool = checked(False, check_bool)
    """Whether the text keeps the stop string that ended it."""
    min_tokens: int = checked(0, check_int, minimum=0)
    """Tokens to generate before any end or stop token, or stop string, may end the request."""
    thinking_token_budget: int | None = checked(None, check_int, minimum=0, optional=True)
    """Tokens of reasoning after which the tag that ends it is forced (`reasoning_parser`); None sets no limit."""
    logprobs: int | None = checked(None, check_int, minimum=-1, optional=True)
    """Log-probabilities of this number of likeliest tokens at each position, and of the chosen one; -1 is all."""
    prompt_logprobs: int | None = checked(None, check_int, minimum=-1, optional=True)
    """The same for the positions of the prompt."""
    detokenize: bool = checked(True, check_bool)
    """Whether to make text of the output."""
    skip_special_tokens: bool = checked(True, check_bool)
    """Whether the text leaves out special tokens such as end markers."""
    spaces_between_special_tokens: bool = checked(True, check_bool)
    """Whether neighbouring special tokens keep the spaces that the tokenizer writes between them."""
    truncate_prompt_tokens: int | None = checked(None, check_in, module="requests.prompt_truncation")
    """Keep only this number of the prompt's last tokens; -1 keeps as many as leave room for `max_tokens`."""
    output_kind: RequestOutputKind = checked(RequestOutputKind.CUMULATIVE, check_output_kind)
    """What each output of a stream holds: all so far, what is new, or only the end."""
    logit_bias: Mapping[int, float] | None = checked(None, check_in, module="sampling.logits")
    """Added to the logits of these tokens; each in [-100, 100]."""
    allowed_token_ids: Sequence[int] | None = checked(None, check_in, module="sampling.logits")
    """No other tokens are chosen."""
    logits_processors: Sequence[LogitsProcessor] | None = checked(None, check_in, module="sampling.logits")
    """Called with the output so far and the request's logits, in order; each returns the logits to go on with."""
    structured_outputs: "StructuredOutputsParams | Mapping[str, object] | None" = checked(
        None, check_in, module="options.structured_params"
    )
    """The form of the output: JSON of a schema, a regular expression, a choice, or a grammar."""

    if TYPE_CHECKING:
        from_optional: ClassVar[Callable[..., "SamplingParams"]]
    else:
        from_optional = LazyMethod("vllm.request_fields", of_class=True)

    def __setattr__(self, name: str, value: object) -> None:
        if name in FIELD_CHECKS:
            if type(value) in (int, bool):
                value = VLLM_FORMS.get((name, value), value)
            FIELD_CHECKS[name](name, value)
        elif name not in self.__dataclass_fields__:  # a subclass may have more fields
            raise AttributeError(f"SamplingParams has no field {name}; it has {', '.join(FIELD_CHECKS)}")
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        """Check fields that do not go together."""
        super().__post_init__()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be <= max_tokens {self.max_tokens}, got {self.min_tokens}")
        self._check_budget()
        if self.stop_strings and not self.detokenize:
            raise ValueError(f"stop needs detokenize=True, got stop {self.stop!r} with detokenize=False")

    def _check_budget(self) -> None:
        """Check that no form of the output could forbid the tag that a budget forces."""
        if self.thinking_token_budget is None or self.structured_outputs is None:
            return
        form = structured_params.StructuredOutputsParams.of(self.structured_outputs)
        for name in ("regex", "grammar"):
            if getattr(form, name) is not None:
                raise ValueError(
                    f"thinking_token_budget and structured_outputs.{name} do not go together, got "
                    f"{self.thinking_token_budget}: the form says how long reasoning may be; leave out "
                    f"thinking_token_budget"
                )

    def clone(self) -> "SamplingParams":
        """Return an equal object that shares no list or dict with this one, checked again."""
        clone = copy.copy(self)  # not its class, because the constructor of a subclass may have other arguments
        for name in FIELD_CHECKS:
            setattr(clone, name, copy_of(getattr(self, name)))
        if self.structured_outputs is not None:
            clone.structured_outputs = structured_params.StructuredOutputsParams.of(self.structured_outputs).clone()
        clone.__post_init__()
        return clone

    @property
    def is_plain(self) -> bool:
        """Return whether the request needs only the core's sampler: no logits processors, no log-probabilities."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty, self.min_tokens)
        lists = self.allowed_token_ids or self.logit_bias or self.bad_words or self.logits_processors
        others = (self.thinking_token_budget, self.logprobs, self.structured_outputs)
        return penalties == (0, 0, 1, 0) and not lists and others == (None, None, None)


FIELD_CHECKS = checks_of(SamplingParams)
VLLM_FORMS: Mapping[tuple[str, object], int | None] = {
    ("seed", -1): None,
    ("thinking_token_budget", -1): None,
    ("logprobs", True): 1,
    ("prompt_logprobs", True): 1,
}
"""Other forms of a field's value that vLLM takes: (field, value) -> the value."""


def copy_of(value: object) -> object:
    """Return a list or dict of its own; any other value is never changed in place."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | tuple) else value
