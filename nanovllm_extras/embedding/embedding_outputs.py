"""What `LLM.embed` and `LLM.score` return; names are vLLM's."""

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


@dataclass(frozen=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float
    """A probability, a difference of two logits, or a cosine."""


@dataclass(frozen=True)
class ScoringRequestOutput:
    """What `LLM.score` returns for each pair."""

    request_id: str
    """By embeddings, the names of both requests, joined by `_`."""
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """By embeddings, those of both texts."""
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose K and V were found in the prefix cache."""
