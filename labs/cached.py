"""Keep K and V in a cache, and compute each token once.

`recompute.py` computes the same K and V again in each step. K and V of a token never change, because a token does not
attend to later tokens. So a cache keeps them: the first step computes the prompt (prefill), and each later step
computes one token (decode). Requests still run one at a time, so that a step reads all weights for a single token.

    python -m labs.cached "What is the KV cache?"
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.model import TINY_QWEN3, Model


@dataclass(eq=False)
class Sequence:
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    max_tokens: int
    is_finished: bool = False
    num_computed_tokens: int = 0  # tokens whose K and V are in the cache


class Engine:
    def __init__(self, folder: str | Path, max_model_len: int) -> None:
        self.model = Model(folder)
        # K and V of each layer and position, of one sequence
        shape = (2, self.model.num_layers, max_model_len, self.model.num_kv_heads, self.model.head_dim)
        self.kv_cache = torch.zeros(shape)
        self.max_model_len = max_model_len
        self.num_steps = self.num_stored = self.num_reserved = self.max_num_running = 0

    def generate(self, prompts: list[list[int]], max_tokens: int | list[int]) -> list[list[int]]:
        """Return the greedy output tokens of each prompt. `max_tokens` is one limit, or one for each prompt."""
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        seqs = [Sequence(list(prompt), len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)]
        for seq in seqs:
            self.check(seq)
        for seq in seqs:
            while not seq.is_finished:
                self.step(seq)
        return [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]

    def check(self, seq: Sequence) -> None:
        most = seq.num_prompt_tokens + seq.max_tokens
        if not 1 <= seq.num_prompt_tokens < most <= self.max_model_len:
            raise ValueError(f"prompt and max_tokens must be >= 1, together <= {self.max_model_len}, got {most}")

    def step(self, seq: Sequence) -> None:
        """Compute the tokens of `seq` that are not in the cache, and append the next token."""
        start, stop = seq.num_computed_tokens, len(seq.token_ids)
        positions = torch.arange(start, stop)  # [num_tokens]
        attend = partial(self.attend, positions)
        hidden = self.model(torch.tensor(seq.token_ids[start:stop]), positions, attend)
        seq.num_computed_tokens = stop
        self.count([seq])
        self.append(seq, self.model.next_tokens(hidden[-1:])[0])

    def append(self, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        num_output_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        seq.is_finished = token_id in self.model.end_token_ids or num_output_tokens == seq.max_tokens

    def attend(self, positions: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Let each token attend to the tokens up to its own position.

        q and the result: [num_tokens, num_heads, head_dim]
        """
        k_cache, v_cache = self.kv_cache[:, layer]  # [max_model_len, num_kv_heads, head_dim] each
        k_cache[positions], v_cache[positions] = k, v
        seq_len = int(positions[-1]) + 1
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k_cache[:seq_len], v_cache[:seq_len]))
        is_seen = torch.arange(seq_len) <= positions[:, None]  # [num_tokens, seq_len]
        out = F.scaled_dot_product_attention(q, k, v, is_seen, enable_gqa=True)
        return out[0].transpose(0, 1)

    def count(self, running: list[Sequence]) -> None:
        """Add a step to the totals: waste = 1 - num_stored / num_reserved."""
        self.num_steps += 1
        self.num_stored += sum(seq.num_computed_tokens for seq in running)
        self.num_reserved += self.max_model_len
        self.max_num_running = max(self.max_num_running, len(running))


if __name__ == "__main__":
    engine = Engine(TINY_QWEN3, max_model_len=256)
    questions = sys.argv[1:] or ["What is the KV cache?", "What is a block table?"]
    prompts = [engine.model.encode(question) for question in questions]
    for token_ids in engine.generate(prompts, max_tokens=100):
        print(engine.model.decode(token_ids))
