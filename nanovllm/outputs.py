"""What users receive: results of requests, of steps, and the engine's statistics. Records only; names are vLLM's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """`stop` (end or stop token), `length` (`max_tokens`, `max_model_len`, the whole cache) or `abort`; None so far"""
    stop_reason: int | str | None
    """The token of `stop_token_ids` that ended it, or `kv_cache` when the whole cache was too small to go on."""


@dataclass(frozen=True)
class RequestMetrics:
    """Clock readings of one request, in seconds of `time.monotonic()`."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    num_output_tokens: int

    @property
    def ttft(self) -> float | None:
        """Time to first token: how long the user saw nothing."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: the pace of the text. None for a single token."""
        if self.first_token_time is None or self.finished_time is None or self.num_output_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_output_tokens - 1)


@dataclass(frozen=True)
class RequestOutput:
    """All of a request so far; `finished` on the last."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose K and V were found in the prefix cache."""
    metrics: RequestMetrics


@dataclass(frozen=True)
class StepOutput:
    """What one `LLMEngine.step()` did."""

    outputs: list[RequestOutput]
    """One for each request that advanced; of requests added with `stream=False`, the finished ones alone."""
    num_scheduled_tokens: int
    num_prefill_tokens: int
    num_decode_tokens: int
    """Of the scheduled tokens, those that were a sequence's only one in this step."""
    num_seqs: int
    num_preempted: int
    schedule_time_s: float
    build_time_s: float
    run_time_s: float
    update_time_s: float
    output_time_s: float


@dataclass(frozen=True)
class EngineStats:
    """Counts over the engine's life, and gauges of this moment."""

    # gauges
    num_kv_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    # counters
    steps: int
    peak_used_blocks: int
    """Most blocks that were owned in any one step."""
    num_preemptions: int
    num_finished: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_query_tokens: int
    prefix_cache_hit_tokens: int
    kv_tokens_stored: int
    """Summed over the steps: tokens in the cache; a shared block counts once."""
    kv_slots_reserved: int
    """Summed over the steps: slots of the blocks that sequences own."""
    prefill_step_tokens: int
    """Tokens computed in steps that held a prefill chunk; `prefill_step_time_s` is how long these steps took."""
    prefill_step_time_s: float
    decode_step_tokens: int
    """Tokens computed in steps of decodes alone; `decode_step_time_s` is how long these steps took."""
    decode_step_time_s: float

    @property
    def waste(self) -> float:
        """Share of the reserved KV slots that held no token, averaged over the steps."""
        return 1 - self.kv_tokens_stored / self.kv_slots_reserved if self.kv_slots_reserved else 0.0

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.prefix_cache_hit_tokens / self.prefix_cache_query_tokens if self.prefix_cache_query_tokens else 0.0
