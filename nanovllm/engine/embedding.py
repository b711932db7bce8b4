"""A request for the embedding of a prompt: one vector, pooled from the hidden states of its tokens.

The prompt is scheduled, cached and preempted as any other, in chunks and beside sequences that decode. The step that
computes its last token draws a token too, as every step does; this token ends the sequence, and nobody sees it. Made by
`intake.py`; a `Request` of another kind, as `BeamSearch` is.
"""

import time
from typing import Any

import numpy as np

from nanovllm.engine.request import Request
from nanovllm.outputs import EmbeddingOutput, EmbeddingRequestOutput
from nanovllm.pooling_params import PoolingParams
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.sequence import Sequence


class Embedding(Request):
    """One prompt's embedding."""

    gives_tokens = False

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: PoolingParams, priority: int
    ) -> None:
        sampling_params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        seq = Sequence(request_id, prompt_token_ids, sampling_params, priority=priority, pooling=params.pooling)
        super().__init__(prompt, prompt_token_ids, [seq], False, None, None, time.monotonic())
        self.params = params
        self._sum = np.zeros(0, dtype=np.float32)  # [hidden_size] once a chunk has been added
        self._num_pooled = 0  # tokens in the sum

    def add_sum(self, chunk_sum: np.ndarray, positions: range) -> None:
        """chunk_sum: [hidden_size]. After a preemption the prompt may be computed anew, from its first token."""
        if positions.start == 0 or self.params.pooling == "last":
            self._sum, self._num_pooled = np.zeros_like(chunk_sum), 0
        self._sum = self._sum + chunk_sum
        self._num_pooled += len(positions)

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
        assert self._num_pooled == (len(self.prompt_token_ids) if self.params.pooling == "mean" else 1)
        embedding = self._sum / self._num_pooled  # [hidden_size]
        if self.params.normalize:
            embedding = embedding / max(float(np.linalg.norm(embedding)), 1e-12)
        return embedding.tolist()
