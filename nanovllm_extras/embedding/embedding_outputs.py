"""What `LLM.embed` returns; names are vLLM's."""

from dataclasses import dataclass

from nanovllm_extras.requests.lazy_outputs import RequestMetrics


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]
    """[hidden_size]; empty if the request was aborted."""

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """What `LLM.embed` returns for each prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose K and V were found in the prefix cache: none with pooling "mean"."""
    metrics: RequestMetrics
    """`first_token_time` is when the embedding was computed."""
