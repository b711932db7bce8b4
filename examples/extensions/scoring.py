"""Scoring: the log-probability of texts that are given, for multiple choice, reranking and perplexity, in one pass.

A forward pass over a prompt computes the hidden states of all of its tokens, and a step samples from the last one only.
Here the hidden state before each token of the continuation gives the log-probability of that token, so a continuation
is scored in the prefill, without decoding. Continuations of one prompt share its blocks in the prefix cache:

    [ What is a block ? | A page . ]       score 5: the tokens at 5 … 7 are scored, from the rows 4 … 6
    [ What is a block ? | A toy . ]        the full blocks among the rows 0 … 3 are a prefix hit

"Language Models are Few-Shot Learners" (Brown et al. 2020, https://arxiv.org/abs/2005.14165) scores answers like this,
and lm-evaluation-harness calls it `loglikelihood`. It costs the prefill and a row of logits for each scored token. One
token is sampled and ignored. A continuation that is text is tokenised by itself, so it begins with a token of its own.
The runner keeps scores until `score` takes them: a request that only sets `score`, as over HTTP, leaves them there.

    import scoring                                           # this file, on the path
    llm = LLM(model, extension="scoring")
    scoring.score(llm, "What is a block?", [" A page.", " A toy."])      # [[-2.1, -0.3, …], [-7.5, …]]
    nanovllm serve MODEL --extension examples/extensions/scoring.py      # serves as before
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.batch import Batch
from nanovllm.layers.attention import AttentionMetadata
from nanovllm.model_runner import ModelRunner
from nanovllm.prefix_cache import PrefixCache
from nanovllm.scheduler import Step
from nanovllm.sequence import CachedBlock, Sequence

MAX_ROWS = 512  # of logits that are computed at a time: each has the size of the vocabulary


def score(llm: LLM, prompt: str | list[int], continuations: Collection[str | list[int]]) -> list[list[float]]:
    """Return the log-probability of each token of each continuation of `prompt`. Their sum scores the continuation."""
    tokenizer = llm.engine.tokenizer
    start = llm.engine.encode(prompt)[1]
    ends = [tokenizer.encode(one, add_special_tokens=False) if isinstance(one, str) else one for one in continuations]
    if not all(ends):
        raise ValueError(f"continuations must have at least one token each, got {continuations!r}")
    params = SamplingParams(max_tokens=1, temperature=0, extra_args={"score": len(start)})
    outputs = llm.generate([start + end for end in ends], params, use_tqdm=False)
    runner: Any = llm.engine.runner
    return [[value for _, value in sorted(runner.scores.pop(output.request_id).items())] for output in outputs]


def first_scored(seq: Sequence) -> int | None:
    """Return the position of the first token that is scored, None if the request asks for no scores."""
    return (seq.sampling_params.extra_args or {}).get("score")


class ScoredPrefixCache(PrefixCache):
    def find(self, seq: Sequence) -> list[CachedBlock]:
        """Return the hits before the row of the first scored token, because a hit has no hidden states."""
        hits, first = super().find(seq), first_scored(seq)
        return hits if first is None else hits[: max(0, first - 1) // self.block_size]


@dataclass(frozen=True)
class ScoreMetadata(AttentionMetadata):
    targets: Tensor  # [num_tokens] int32, the next token plus 1, if it is scored; 0 for none


class ScoreRunner(ModelRunner):
    metadata_cls = ScoreMetadata

    def make_metadata(self, step: Step, metadata: AttentionMetadata) -> ScoreMetadata:
        targets: list[int] = []
        self.owners: list[tuple[str, int]] = []  # for `forward`: of each target, its request and position
        for seq, start, num_new_tokens in step.chunks:
            first = first_scored(seq)
            for position in range(start + 1, start + num_new_tokens + 1):
                is_scored = first is not None and first <= position < seq.num_prompt_tokens
                targets.append(seq.token_ids[position] + 1 if is_scored else 0)
                if is_scored:
                    self.owners.append((seq.request_id, position))
        return self.metadata_cls(**vars(metadata), targets=torch.tensor(targets, dtype=torch.int32))

    def forward(self, batch: Batch) -> Tensor:
        """Run the model, and score the targets -> [num_tokens, hidden_size]"""
        hidden, metadata = super().forward(batch), batch.metadata
        assert isinstance(metadata, ScoreMetadata)
        targets = metadata.targets  # [num_tokens]
        rows = targets.nonzero()[:, 0]  # [num_scored]
        found: list[float] = []
        for some in rows.split(MAX_ROWS) if len(rows) else ():
            logprobs = self.model.compute_logits(hidden[some]).float().log_softmax(dim=-1)  # [MAX_ROWS, vocab_size]
            found += logprobs.gather(1, targets[some, None].long() - 1)[:, 0].tolist()
        for (request_id, position), value in zip(self.owners, found, strict=True):
            self.scores.setdefault(request_id, {})[position] = value
        return hidden

    def make_model(self) -> Any:
        self.scores: dict[str, dict[int, float]] = {}  # request -> position -> log-probability
        return super().make_model()


prefix_cache_cls = ScoredPrefixCache
runner_cls = ScoreRunner
extra_args = {"score": int}
