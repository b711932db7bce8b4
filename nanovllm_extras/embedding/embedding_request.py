"""A request for the embedding of a prompt: one vector, pooled from the hidden states of its tokens.

The prompt is scheduled, cached and preempted as any other, in chunks and beside sequences that decode. The step that
computes its last token draws a token too, as every step does; this token ends the sequence, and nobody sees it.
`PoolingParams.make_request` calls `make_request`.
"""

import numpy as np

from nanovllm_extras.embedding.embedding_outputs import EmbeddingOutput, EmbeddingRequestOutput
from nanovllm_extras.embedding.pooling import Pooling
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.requests.full_request import Completion, Request


def make_request(
    request_id: str, prompt: str | None, prompt_token_ids: list[int], pooling: str, is_normalized: bool, priority: int
) -> Request:
    """Return the request for one prompt's embedding. pooling, is_normalized: as in `PoolingParams`"""
    params, pooled = SamplingParams(temperature=0, max_tokens=1, detokenize=False), Pooling(pooling)
    seq = Sequence(request_id, prompt_token_ids, params, priority=priority, readers=(pooled,))
    completions, answer = [Completion(seq, None, prompt_token_ids)], Embedding(pooled, is_normalized)
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
