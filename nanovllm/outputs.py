"""What users receive: results of requests, of steps, and the engine's statistics. Records only; names are vLLM's."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from nanovllm.checks import names_of_extras

if TYPE_CHECKING:
    from nanovllm.extras.embedding.pooling_params import EmbeddingOutput as EmbeddingOutput
    from nanovllm.extras.embedding.pooling_params import EmbeddingRequestOutput as EmbeddingRequestOutput
else:  # vLLM has these two names here, too
    __getattr__ = names_of_extras(__name__, {"embedding/pooling_params": ("EmbeddingOutput", "EmbeddingRequestOutput")})


@dataclass(frozen=True)
class Logprob:
    """How likely the model found one token at one position."""

    logprob: float
    """Natural logarithm of its probability, before temperature, penalties, biases and masks."""
    rank: int
    """1 for the likeliest token of the vocabulary."""
    decoded_token: str | None


class LazyRecord:
    """A dataclass with slots, one of whose fields may be made when it is first read, as `_recipe` says.

    Every step gives an output for every stream, and few users read all of its token ids and times each time.
    """

    __slots__ = ("_recipe",)
    _lazy_field: ClassVar[str]
    _recipe: tuple[Any, ...]
    """A function and its arguments. What they give must not change any more."""

    if not TYPE_CHECKING:  # to a checker it would mean that every name is a field

        def __getattr__(self, name: str) -> Any:
            """Python asks here for a slot that is still empty, and for names that do not exist."""
            if name != self._lazy_field:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            make, *arguments = self._recipe
            value = make(*arguments)
            setattr(self, name, value)
            return value

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """For copies and pickles: all fields, the lazy one made."""
        return None, {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]


@dataclass(slots=True)
class CompletionOutput(LazyRecord):
    """One completion of a prompt."""

    _lazy_field = "token_ids"

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """`stop` (token or string), `length` (`max_tokens`, `max_model_len`, the whole cache), `abort`; None: it grows."""
    stop_reason: int | str | None
    """The token of `stop_token_ids` or the string of `stop` that ended it, or `kv_cache` when the whole cache was too
    small to go on; None for the model's own end token."""
    logprobs: list[Mapping[int, Logprob]] | None = None
    """For each output token, the likeliest tokens and the chosen one by token id."""
    cumulative_logprob: float | None = None
    """Of the whole completion."""


@dataclass(slots=True)
class RequestMetrics:
    """Clock readings of one request, in seconds of `time.monotonic()`."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    num_output_tokens: int
    """Of the longest sample."""
    scheduled_time: float | None = None
    """When a step first computed tokens of the request."""
    token_times: list[float] = field(default_factory=list)
    """When each step that drew tokens of the request was done."""
    num_preemptions: int = 0
    """Of all samples together."""

    @property
    def queue_time(self) -> float | None:
        """How long the request waited to be scheduled."""
        return between(self.arrival_time, self.scheduled_time)

    @property
    def ttft(self) -> float | None:
        """Time to first token: how long the user saw nothing."""
        return between(self.arrival_time, self.first_token_time)

    @property
    def prefill_time(self) -> float | None:
        """From the first step that computed the request to its first token."""
        return between(self.scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """From the first token to the last."""
        return between(self.first_token_time, self.finished_time)

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: the pace of the text. None for a single token."""
        decode_time = self.decode_time
        return None if decode_time is None or self.num_output_tokens < 2 else decode_time / (self.num_output_tokens - 1)

    @property
    def inter_token_latencies(self) -> list[float]:
        """Each gap between two tokens."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def e2e_latency(self) -> float | None:
        """From arrival to the last token."""
        return between(self.arrival_time, self.finished_time)


def between(start: float | None, end: float | None) -> float | None:
    """Seconds; None until both are known."""
    return None if start is None or end is None else end - start


@dataclass(slots=True)
class RequestOutput(LazyRecord):
    """All that a request has so far; `finished` is True on its last output."""

    _lazy_field = "metrics"

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose K and V were found in the prefix cache."""
    metrics: RequestMetrics
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
    """For each prompt token, as `logprobs`; None for the first token, which no other token predicts."""


@dataclass(frozen=True)
class StepOutput:
    """What one `LLMEngine.step()` did."""

    outputs: list[RequestOutput] = field(default_factory=list)
    """One for each request that advanced; requests added with `stream=False` give one when they have finished."""
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

    def __iter__(self) -> Iterator[RequestOutput]:
        """Over the outputs: vLLM's `step()` returns a list of them."""
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, index: int) -> RequestOutput:
        return self.outputs[index]


@dataclass
class Counts:
    """Over an engine's life. The scheduler's observer counts decisions, the engine requests and steps."""

    steps: int = 0
    peak_used_blocks: int = 0
    """Most blocks that were owned in any one step."""
    num_window_blocks: int = 0
    """Blocks that sequences have given back because they lay behind the window of all layers."""
    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions that copied K and V to host memory."""
    num_requests: int = 0
    num_finished: int = 0
    scheduled_tokens: int = 0
    """Tokens computed in all steps: prompts, outputs, and what was computed again after preemption."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    kv_tokens_stored: int = 0
    """Summed over the steps: tokens in the cache; a shared block counts once."""
    kv_slots_reserved: int = 0
    """Summed over the steps: slots of the blocks that sequences own."""
    prefill_step_tokens: int = 0
    """Tokens computed in steps that held a prefill chunk; `prefill_step_time_s` is how long these steps took."""
    prefill_step_time_s: float = 0.0
    decode_step_tokens: int = 0
    """Tokens computed in steps without a prefill chunk; `decode_step_time_s` is how long these steps took."""
    decode_step_time_s: float = 0.0
    num_drafts: int = 0
    """Verifications of guessed tokens; of `num_draft_tokens` guesses, `num_accepted_tokens` were right."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_failed_observers: int = 0
    """Observers that have failed, and see nothing any more: a recording whose disk is full."""

    @property
    def waste(self) -> float:
        """Share of the reserved KV slots that held no token, averaged over the steps."""
        return 1 - self.kv_tokens_stored / self.kv_slots_reserved if self.kv_slots_reserved else 0.0

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.prefix_cache_hit_tokens / self.prefix_cache_query_tokens if self.prefix_cache_query_tokens else 0.0


@dataclass(kw_only=True)
class EngineStats(Counts):
    """What the engine has counted so far, and gauges of this moment."""

    num_kv_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    budget_used: float
    """Share of the steps' token budgets that was scheduled."""
