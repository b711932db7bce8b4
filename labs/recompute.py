"""Compute all tokens again for each new token.

A language model maps a sequence of tokens to the next token. This program appends that token, and computes the whole
sequence again. It keeps no K and V, so that token 100 takes a hundred times the work of token 1.

    python -m labs.recompute "What is the KV cache?"
"""

import sys
from dataclasses import dataclass
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


class Engine:
    def __init__(self, folder: str | Path) -> None:
        self.model = Model(folder)
        self.num_steps = 0

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
        if min(seq.num_prompt_tokens, seq.max_tokens) < 1:
            raise ValueError(f"prompt and max_tokens must be >= 1, got {seq.num_prompt_tokens} and {seq.max_tokens}")

    def step(self, seq: Sequence) -> None:
        """Compute all tokens of `seq`, and append the next token."""
        positions = torch.arange(len(seq.token_ids))  # [num_tokens]
        hidden = self.model(torch.tensor(seq.token_ids), positions, self.attend)
        self.append(seq, self.model.next_tokens(hidden[-1:])[0])
        self.num_steps += 1

    def append(self, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        num_output_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        seq.is_finished = token_id in self.model.end_token_ids or num_output_tokens == seq.max_tokens

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Let each token attend to the tokens up to its own position.

        q and the result: [num_tokens, num_heads, head_dim]
        """
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, num_tokens, head_dim]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)


if __name__ == "__main__":
    engine = Engine(TINY_QWEN3)
    questions = sys.argv[1:] or ["What is the KV cache?", "What is a block table?"]
    prompts = [engine.model.encode(question) for question in questions]
    for token_ids in engine.generate(prompts, max_tokens=100):
        print(engine.model.decode(token_ids))
