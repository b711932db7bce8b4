"""A request that reads the hidden states of a prompt, and generates nothing that anybody sees.

The prompt is scheduled, cached and preempted as any other, in chunks and beside sequences that decode. The step that
computes its last token samples a token too, as every step does; this token ends the sequence, and nobody sees it.
`PoolingParams.make_request` calls `make_request` for an embedding: one vector, pooled from the hidden states.
`reading_params.py` has the other uses.
"""

import numpy as np

from nanovllm_extras.embedding.embedding_outputs import EmbeddingOutput, EmbeddingRequestOutput
from nanovllm_extras.embedding.pooling import Pooling
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.requests.full_request import Answer, Completion, Request
from nanovllm_extras.sampling.logits_processors import PromptReader


def make_request(
    request_id: str, prompt: str | None, prompt_token_ids: list[int], pooling: str, is_normalized: bool, priority: int
) -> Request:
    """Return the request for one prompt's embedding. pooling, is_normalized: as in `PoolingParams`"""
    pooled = Pooling(pooling)
    return reading_request(request_id, prompt, prompt_token_ids, pooled, Embedding(pooled, is_normalized), priority)


def reading_request(
    request_id: str,
    prompt: str | None,
    prompt_token_ids: list[int],
    reader: PromptReader,
    answer: Answer,
    priority: int,
) -> Request:
    """Return a request whose only result is what `reader` reads of its prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    seq = Sequence(request_id, prompt_token_ids, params, priority=priority, readers=(reader,))
    completions = [Completion(seq, None, prompt_token_ids)]
    return Request(prompt, prompt_token_ids, [seq], False, completions, answer=answer)


class Embedding:
    """An `Answer` that holds the vector."""

    gives_tokens = False

    def __init__(self, pooled: Pooling, is_normalized: bool) -> None:
        self.pooled, self.is_normalized = pooled, is_normalized

    def make_output(self, request: Request) -> EmbeddingRequestOutput:
        seq = request.seqs[0]
        return EmbeddingRequestOutput(
            request_id=request.request_id,
            outputs=EmbeddingOutput(self._embedding(len(request.prompt_token_ids)) if seq.num_output_tokens else []),
            prompt_token_ids=request.prompt_token_ids,
            finished=request.is_finished,
            num_cached_tokens=seq.num_cached_tokens or 0,
            metrics=request.make_metrics(),
        )

    def _embedding(self, num_prompt_tokens: int) -> list[float]:
        pooled = self.pooled
        assert pooled.num_pooled == (num_prompt_tokens if pooled.pooling == "mean" else 1)
        embedding = pooled.sum / pooled.num_pooled  # [hidden_size]
        if self.is_normalized:
            embedding = embedding / max(float(np.linalg.norm(embedding)), 1e-12)
        return embedding.tolist()
