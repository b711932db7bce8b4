"""Choose the batch again in each step: continuous batching, over contiguous reservations.

`static_batch.py` computes padding and finished rows, and requests wait for the slowest sequence of a batch. Here each
step has its own batch: a finished sequence frees its row at once, and the next request takes the row. A row still
reserves `max_model_len` slots, even if its sequence is short, so that few sequences fit into memory.

    python -m labs.continuous "What is the KV cache?" "What is a block table?"
"""

import sys
from collections import deque
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
    row: int = -1  # of the cache


class Engine:
    def __init__(self, folder: str | Path, num_slots: int, max_model_len: int) -> None:
        self.model = Model(folder)
        # K and V of each layer, row and position: a row holds the longest sequence that is allowed
        shape = (2, self.model.num_layers, num_slots // max_model_len, max_model_len)
        self.kv_cache = torch.zeros(*shape, self.model.num_kv_heads, self.model.head_dim)
        self.free_rows, self.max_model_len = list(range(shape[2])), max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_steps = self.num_stored = self.num_reserved = self.max_num_running = 0

    def generate(self, prompts: list[list[int]], max_tokens: int | list[int]) -> list[list[int]]:
        """Return the greedy output tokens of each prompt. `max_tokens` is one limit, or one for each prompt."""
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        seqs = [Sequence(list(prompt), len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)]
        for seq in seqs:
            self.check(seq)
        self.waiting.extend(seqs)
        while self.waiting or self.running:
            self.step(self.schedule())
        return [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]

    def check(self, seq: Sequence) -> None:
        most = seq.num_prompt_tokens + seq.max_tokens
        if not 1 <= seq.num_prompt_tokens < most <= self.max_model_len:
            raise ValueError(f"prompt and max_tokens must be >= 1, together <= {self.max_model_len}, got {most}")

    def schedule(self) -> list[Sequence]:
        """Return the next waiting sequence if a row is free, otherwise all running sequences."""
        if self.waiting and self.free_rows:
            seq = self.waiting.popleft()
            seq.row = self.free_rows.pop()
            self.running.append(seq)
            return [seq]
        return list(self.running)

    def step(self, batch: list[Sequence]) -> None:
        """Compute the new tokens of the batch, equally many for each sequence, and append a token to each."""
        new_token_ids = [seq.token_ids[seq.num_computed_tokens :] for seq in batch]
        starts = torch.tensor([seq.num_computed_tokens for seq in batch])  # [num_seqs]
        positions = starts[:, None] + torch.arange(len(new_token_ids[0]))  # [num_seqs, num_new_tokens]
        rows = torch.tensor([seq.row for seq in batch])[:, None]  # [num_seqs, 1]
        attend = partial(self.attend, rows, positions)
        hidden = self.model(torch.tensor(new_token_ids).flatten(), positions.flatten(), attend)
        token_ids = self.model.next_tokens(hidden.unflatten(0, positions.shape)[:, -1])
        for seq in batch:
            seq.num_computed_tokens = len(seq.token_ids)
        self.count(self.running)
        for seq, token_id in zip(batch, token_ids, strict=True):
            self.append(seq, token_id)
            if seq.is_finished:
                self.running.remove(seq)
                self.free_rows.append(seq.row)

    def append(self, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        num_output_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        seq.is_finished = token_id in self.model.end_token_ids or num_output_tokens == seq.max_tokens

    def attend(self, rows: Tensor, positions: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Let each token attend to the tokens of its row up to its own position.

        q and the result: [num_seqs * num_new_tokens, num_heads, head_dim]
        """
        k_cache, v_cache = self.kv_cache[:, layer]  # [num_rows, max_model_len, num_kv_heads, head_dim] each
        k_cache[rows, positions], v_cache[rows, positions] = (x.unflatten(0, positions.shape) for x in (k, v))
        q = q.unflatten(0, positions.shape)  # [num_seqs, num_new_tokens, num_heads, head_dim]
        seen = torch.arange(int(positions.max()) + 1)  # [seq_len] of the longest
        q, k, v = (x.transpose(1, 2) for x in (q, k_cache[rows, seen], v_cache[rows, seen]))
        is_seen = seen <= positions[:, None, :, None]  # [num_seqs, 1, num_new_tokens, seq_len]
        out = F.scaled_dot_product_attention(q, k, v, is_seen, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def count(self, running: list[Sequence]) -> None:
        """Add a step to the totals: waste = 1 - num_stored / num_reserved."""
        self.num_steps += 1
        self.num_stored += sum(seq.num_computed_tokens for seq in running)
        self.num_reserved += len(running) * self.max_model_len
        self.max_num_running = max(self.max_num_running, len(running))


if __name__ == "__main__":
    engine = Engine(TINY_QWEN3, num_slots=1024, max_model_len=256)
    questions = sys.argv[1:] or ["What is the KV cache?", "What is a block table?"]
    prompts = [engine.model.encode(question) for question in questions]
    for token_ids in engine.generate(prompts, max_tokens=100):
        print(engine.model.decode(token_ids))
