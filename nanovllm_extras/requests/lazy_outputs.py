"""Outputs with log-probabilities and times, whose large fields are made when they are first read.

Every step makes an output for every stream, and few users read all token ids and times each time. The records are the
core's with more fields; names are vLLM's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import Field, InitVar, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from nanovllm import request

if TYPE_CHECKING:
    from nanovllm_extras.records.prefix_miss import PrefixMiss
    from nanovllm_extras.sampling.logprobs import Logprob
else:  # imported late; names that `typing.get_type_hints` and pydantic resolve
    Logprob = PrefixMiss = Any


class LazyRecord:
    """A dataclass, one of whose fields may be made when it is first read, by `_recipe`: a function and its arguments.

    The value of the field must not depend on anything that changes later.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _lazy_field: ClassVar[str]
    _recipe: tuple[Any, ...]

    if not TYPE_CHECKING:  # to a checker it would mean that every name is a field

        def __getattr__(self, name: str) -> Any:
            """Called by Python for attributes that are not set."""
            if name != self._lazy_field or "_recipe" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            make, *arguments = self._recipe
            value = make(*arguments)
            setattr(self, name, value)
            return value

    def __getstate__(self) -> dict[str, object]:
        """Return all fields, including the lazy one, for copies and pickles."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass
class CompletionOutput(LazyRecord, request.CompletionOutput):
    """One sample of a request, up to now."""

    _lazy_field = "token_ids"

    logprobs: "list[Mapping[int, Logprob]] | None" = None
    """For each output token, the most likely tokens and the sampled one by token id."""
    cumulative_logprob: float | None = None
    """Of the whole sample."""


@dataclass
class RequestMetrics:
    """Times of one request, in seconds of `time.monotonic()`."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    num_output_tokens: int
    """Of the longest sample."""
    scheduled_time: float | None = None
    """When a step first computed tokens of the request."""
    token_times: list[float] = field(default_factory=list)
    """When each step that sampled tokens of the request was done."""
    num_preemptions: int = 0
    """Of all samples together."""
    prefix_misses: "list[PrefixMiss] | None" = None
    """Why prompt tokens were not in the prefix cache, in order; None without `explain_prefix_misses`."""

    @property
    def ttft(self) -> float | None:
        """Return the time to the first token."""
        return between(self.arrival_time, self.first_token_time)

    @property
    def tpot(self) -> float | None:
        """Return the time per output token after the first, or None for a single token."""
        seconds = self.decode_time
        return None if seconds is None or self.num_output_tokens < 2 else seconds / (self.num_output_tokens - 1)

    @property
    def queue_time(self) -> float | None:
        """Return the time from arrival to the first step that computed the request."""
        return between(self.arrival_time, self.scheduled_time)

    @property
    def prefill_time(self) -> float | None:
        """Return the time from the first step that computed the request to its first token."""
        return between(self.scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """Return the time from the first token to the last."""
        return between(self.first_token_time, self.finished_time)

    @property
    def inter_token_latencies(self) -> list[float]:
        """Return the times between consecutive tokens."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def e2e_latency(self) -> float | None:
        """Return the time from arrival to the last token."""
        return between(self.arrival_time, self.finished_time)


def between(start: float | None, end: float | None) -> float | None:
    """Return the seconds from `start` to `end`, or None until both are known."""
    return None if start is None or end is None else end - start


@dataclass
class RequestOutput(LazyRecord, request.RequestOutput):
    """A request with all of its samples, up to now; `finished` is True on its last output."""

    _lazy_field = "metrics"

    outputs: list[CompletionOutput]  # type: ignore[assignment]
    metrics: RequestMetrics
    prompt_logprobs: "list[Mapping[int, Logprob] | None] | None" = None
    """For each prompt token, as `logprobs`; None for the first token, which no other token predicts."""


@dataclass(eq=False, repr=False)
class StepOutput(list[Any]):
    """What one `LLMEngine.step()` did: a list of the outputs of the requests that advanced, with some numbers.

    Requests added with `stream=False` give an output when they have finished.
    """

    advanced: InitVar[Iterable[Any]] = ()
    num_scheduled_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    """Scheduled tokens of decodes, that is of chunks of one token."""
    num_seqs: int = 0
    num_preempted: int = 0
    schedule_time_s: float = 0.0
    build_time_s: float = 0.0
    run_time_s: float = 0.0
    update_time_s: float = 0.0
    output_time_s: float = 0.0

    def __post_init__(self, advanced: Iterable[Any]) -> None:
        self.extend(advanced)

    @property
    def outputs(self) -> list[Any]:
        return list(self)
