"""Compute several sequences in one padded batch: static batching.

`cached.py` reads all weights for a single token. A batch reads them once for many sequences. The cache has a row for
each sequence of the batch. Prompts are padded to the longest prompt, and the batch runs until its last sequence has
finished. The work for padding and for finished rows is lost, and the requests of the next batch wait.

    python -m labs.static_batch "What is the KV cache?" "What is a block table?"
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
    def __init__(self, folder: str | Path, num_slots: int, max_model_len: int) -> None:
        self.model = Model(folder)
        # K and V of each layer, row and position: a row holds the longest sequence that is allowed
        shape = (2, self.model.num_layers, num_slots // max_model_len, max_model_len)
        self.kv_cache = torch.zeros(*shape, self.model.num_kv_heads, self.model.head_dim)
        self.num_rows, self.max_model_len = shape[2:]
        self.num_steps = self.num_stored = self.num_reserved = self.max_num_running = 0

    def generate(self, prompts: list[list[int]], max_tokens: int | list[int]) -> list[list[int]]:
        """Return the greedy output tokens of each prompt. `max_tokens` is one limit, or one for each prompt."""
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        seqs = [Sequence(list(prompt), len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)]
        for seq in seqs:
            self.check(seq)
        for first in range(0, len(seqs), self.num_rows):
            batch = seqs[first : first + self.num_rows]
            while not all(seq.is_finished for seq in batch):
                self.step(batch)
        return [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]

    def check(self, seq: Sequence) -> None:
        most = seq.num_prompt_tokens + seq.max_tokens
        if not 1 <= seq.num_prompt_tokens < most <= self.max_model_len:
            raise ValueError(f"prompt and max_tokens must be >= 1, together <= {self.max_model_len}, got {most}")

    def step(self, batch: list[Sequence]) -> None:
        """Compute the new tokens of all rows, and append a token to each sequence that has not finished."""
        starts = torch.tensor([min(seq.num_computed_tokens, len(seq.token_ids) - 1) for seq in batch])  # [num_rows]
        new_token_ids = [seq.token_ids[start:] for seq, start in zip(batch, starts.tolist(), strict=True)]
        longest = max(map(len, new_token_ids))
        input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in new_token_ids])  # [num_rows, longest]
        # K and V of padding are after the row's tokens: no token attends to them, and new tokens overwrite them
        positions = starts[:, None] + torch.arange(longest)  # [num_rows, longest]
        attend = partial(self.attend, positions)
        hidden = self.model(input_ids.flatten(), positions.flatten(), attend).unflatten(0, positions.shape)
        last = torch.tensor([len(ids) - 1 for ids in new_token_ids])  # [num_rows]
        token_ids = self.model.next_tokens(hidden[torch.arange(len(batch)), last])
        for seq in batch:
            seq.num_computed_tokens = len(seq.token_ids)
        self.count(batch)
        for seq, token_id in zip(batch, token_ids, strict=True):
            if not seq.is_finished:
                self.append(seq, token_id)

    def append(self, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        num_output_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        seq.is_finished = token_id in self.model.end_token_ids or num_output_tokens == seq.max_tokens

    def attend(self, positions: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Let each token attend to the tokens of its row up to its own position.

        q and the result: [num_rows * longest, num_heads, head_dim]
        """
        k_cache, v_cache = self.kv_cache[:, layer]  # [num_rows, max_model_len, num_kv_heads, head_dim] each
        rows = torch.arange(len(positions))[:, None]  # [num_rows, 1]
        k_cache[rows, positions], v_cache[rows, positions] = (x.unflatten(0, positions.shape) for x in (k, v))
        q = q.unflatten(0, positions.shape)  # [num_rows, longest, num_heads, head_dim]
        seq_len = int(positions.max()) + 1
        q, k, v = (x.transpose(1, 2) for x in (q, k_cache[: len(rows), :seq_len], v_cache[: len(rows), :seq_len]))
        is_seen = torch.arange(seq_len) <= positions[:, None, :, None]  # [num_rows, 1, longest, seq_len]
        out = F.scaled_dot_product_attention(q, k, v, is_seen, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def count(self, running: list[Sequence]) -> None:
        """Add a step to the totals: waste = 1 - num_stored / num_reserved. Tokens of finished rows count as waste."""
        self.num_steps += 1
        self.num_stored += sum(seq.num_computed_tokens for seq in running if not seq.is_finished)
        self.num_reserved += len(running) * self.max_model_len
        self.max_num_running = max(self.max_num_running, len(running))


if __name__ == "__main__":
    engine = Engine(TINY_QWEN3, num_slots=1024, max_model_len=256)
    questions = sys.argv[1:] or ["What is the KV cache?", "What is a block table?"]
    prompts = [engine.model.encode(question) for question in questions]
    for token_ids in engine.generate(prompts, max_tokens=100):
        print(engine.model.decode(token_ids))
