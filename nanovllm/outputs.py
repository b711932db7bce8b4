"""What users receive: snapshots that no later step changes. The names are vLLM's."""

from dataclasses import dataclass


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
