"""Parameters of requests that read more than one vector of a prompt: the states of its tokens, or two logits after it.

The server uses them for `/pooling`, `/score` and `/rerank`, in place of `SamplingParams`. Their outputs are alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nanovllm.prompts import Prompt
from nanovllm_extras.embedding.embedding_request import reading_request
from nanovllm_extras.embedding.token_logits import TokenLogits
from nanovllm_extras.embedding.token_states import TokenStates
from nanovllm_extras.engine.input_processor import InputProcessor
from nanovllm_extras.execution.parts import Parts
from nanovllm_extras.requests.full_request import Request
from nanovllm_extras.requests.lazy_outputs import RequestMetrics


@dataclass(frozen=True)
class ReadingOutput:
    """What has been read of one prompt; the fields but `data` are those of `EmbeddingRequestOutput`."""

    request_id: str
    data: np.ndarray | None
    """[num_tokens, hidden_size] or [2], float32; None if the request was aborted."""
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics


@dataclass(frozen=True)
class TokenStatesParams:
    """Parameters of a request for the hidden state of each token of a prompt."""

    normalize: bool = True
    """Whether each vector is divided by its length (its Euclidean norm)."""

    def checked(self, parts: Parts) -> "TokenStatesParams":
        return self

    def make_request(self, processor: InputProcessor, request_id: str, prompt: Prompt, priority: int) -> Request:
        text, token_ids = processor.encode(prompt)
        reader = TokenStates()

        def read() -> np.ndarray:
            states = reader.states  # [num_tokens, hidden_size]
            assert len(states) == len(token_ids)
            lengths = np.linalg.norm(states, axis=1, keepdims=True)
            return states / np.maximum(lengths, 1e-12) if self.normalize else states

        return reading_request(request_id, text, token_ids, reader, Reading(read), priority)


@dataclass(frozen=True)
class TokenLogitsParams:
    """Parameters of a request for the logits of two tokens after a prompt."""

    token_ids: tuple[int, int]

    def checked(self, parts: Parts) -> "TokenLogitsParams":
        """Return this object. Raises ValueError if the model has no output layer."""
        if not parts.model_config.has_head:
            raise ValueError("the checkpoint has no lm_head, so it has no logits; LLM.embed computes embeddings")
        return self

    def make_request(self, processor: InputProcessor, request_id: str, prompt: Prompt, priority: int) -> Request:
        text, token_ids = processor.encode(prompt)
        reader = TokenLogits(self.token_ids)
        reading = Reading(lambda: np.array(reader.logits, dtype=np.float32))
        return reading_request(request_id, text, token_ids, reader, reading, priority)


class Reading:
    """An `Answer` that holds what a reader has read. read: returns it, once the prompt is computed."""

    gives_tokens = False

    def __init__(self, read: Callable[[], np.ndarray]) -> None:
        self._read = read

    def make_output(self, request: Request) -> ReadingOutput:
        seq = request.seqs[0]
        return ReadingOutput(
            request_id=request.request_id,
            data=self._read() if seq.num_output_tokens else None,
            prompt_token_ids=request.prompt_token_ids,
            finished=request.is_finished,
            num_cached_tokens=seq.num_cached_tokens or 0,
            metrics=request.make_metrics(),
        )
