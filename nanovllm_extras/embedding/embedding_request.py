"""A request for the embedding of a prompt: one vector, pooled from the hidden states of its tokens.

The prompt is scheduled, cached and preempted as any other, in chunks and beside sequences that decode. The step that
computes its last token draws a token too, as every step does; this token ends the sequence, and nobody sees it. Made by
`PoolingParams.make_request`.
"""

import time
from typing import Any

import numpy as np

from nanovllm_extras.embedding.embedding_outputs import EmbeddingOutput, EmbeddingRequestOutput
from nanovllm_extras.embedding.pooling import Pooling
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence
from nanovllm_extras.requests.full_request import Request


class EmbeddingRequest(Request):
    """One prompt's embedding."""

    gives_tokens = False

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        pooling: str,
        is_normalized: bool,
        priority: int,
    ) -> None:
        """pooling, is_normalized: as in `PoolingParams`"""
        sampling_params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        self.is_normalized = is_normalized
        self.pooled = Pooling(pooling)
        seq = Sequence(request_id, prompt_token_ids, sampling_params, priority=priority, readers=(self.pooled,))
        super().__init__(prompt, prompt_token_ids, [seq], False, None, time.monotonic())

    def make_output(self) -> Any:
        seq = self.seqs[0]
        return EmbeddingRequestOutput(
            request_id=self.request_id,
            outputs=EmbeddingOutput(self._embedding() if seq.num_output_tokens else []),
            prompt_token_ids=self.prompt_token_ids,
            finished=self.is_finished,
            num_cached_tokens=seq.num_cached_tokens or 0,
            metrics=self.make_metrics(),
        )

    def _embedding(self) -> list[float]:
        pooled = self.pooled
        assert pooled.num_pooled == (len(self.prompt_token_ids) if pooled.pooling == "mean" else 1)
        embedding = pooled.sum / pooled.num_pooled  # [hidden_size]
        if self.is_normalized:
            embedding = embedding / max(float(np.linalg.norm(embedding)), 1e-12)
        return embedding.tolist()
