"""Store K and V in blocks, with block tables and a slot mapping: paged attention.

`continuous.py` keeps a row of `max_model_len` slots for each sequence. Here memory is cut into small blocks. A sequence
has a table of its blocks, which may be anywhere in memory, and reserves only what its prompt and `max_tokens` may need.
These are still blocks for its longest possible answer.

    python -m labs.paged "What is the KV cache?" "What is a block table?"

    token_ids            [ 11  7  42  5 | 90  13 ]     prompt | output
    num_computed_tokens    5     K and V of the first five are in the cache; the sixth is the next step's input
    block_table          [ 7, 2 ]     with block_size 4: block 7 holds tokens 0 … 3, block 2 holds token 4 and will
                                      hold token 5
"""

import sys
from collections import deque
from dataclasses import dataclass, field
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
    block_table: list[int] = field(default_factory=list)  # the blocks that hold them, block_size tokens each


class Engine:
    def __init__(self, folder: str | Path, num_blocks: int, block_size: int) -> None:
        self.model = Model(folder)
        # K and V of each layer, block and offset
        shape = (2, self.model.num_layers, num_blocks, block_size, self.model.num_kv_heads, self.model.head_dim)
        self.kv_cache = torch.zeros(shape)
        self.free_blocks, self.block_size = list(range(num_blocks)), block_size
        self.max_model_len = min(self.model.max_model_len, num_blocks * block_size)
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
        """Return the next waiting sequence if enough blocks are free for it, otherwise all running sequences."""
        if self.waiting:
            seq = self.waiting[0]
            num_blocks = -(-(seq.num_prompt_tokens + seq.max_tokens) // self.block_size)  # rounded up
            if num_blocks <= len(self.free_blocks):
                self.waiting.popleft()
                seq.block_table = [self.free_blocks.pop() for _ in range(num_blocks)]
                self.running.append(seq)
                return [seq]
        return list(self.running)

    def step(self, batch: list[Sequence]) -> None:
        """Compute the new tokens of the batch, equally many for each sequence, and append a token to each."""
        input_ids, positions, slots = [], [], []
        for seq in batch:
            for position in range(seq.num_computed_tokens, len(seq.token_ids)):
                input_ids.append(seq.token_ids[position])
                positions.append(position)
                # a slot is a token's address in the cache
                block_id = seq.block_table[position // self.block_size]
                slots.append(block_id * self.block_size + position % self.block_size)
        attend = partial(self.attend, batch, torch.tensor(slots))
        hidden = self.model(torch.tensor(input_ids), torch.tensor(positions), attend)
        token_ids = self.model.next_tokens(hidden.unflatten(0, (len(batch), -1))[:, -1])
        for seq in batch:
            seq.num_computed_tokens = len(seq.token_ids)
        self.count(self.running)
        for seq, token_id in zip(batch, token_ids, strict=True):
            self.append(seq, token_id)
            if seq.is_finished:
                self.running.remove(seq)
                self.free_blocks += seq.block_table

    def append(self, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        num_output_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        seq.is_finished = token_id in self.model.end_token_ids or num_output_tokens == seq.max_tokens

    def attend(self, batch: list, slot_mapping: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Let each token attend to its sequence up to its own position. q, result: [num_tokens, num_heads, head_dim]

        K and V are stored first, because a prompt also attends to its own tokens.
        """
        k_cache, v_cache = self.kv_cache[:, layer].flatten(1, 2)  # views: [num_slots, num_kv_heads, head_dim] each
        k_cache[slot_mapping], v_cache[slot_mapping] = k, v
        return self.attend_to_blocks(q.unflatten(0, (len(batch), -1)), layer, batch).flatten(0, 1)

    def attend_to_blocks(self, q: Tensor, layer: int, seqs: list[Sequence]) -> Tensor:
        """q and the result: [num_seqs, num_new_tokens, num_heads, head_dim]"""
        num_new_tokens = q.shape[1]
        starts = torch.tensor([seq.num_computed_tokens for seq in seqs])  # [num_seqs], before this step
        positions = starts[:, None] + torch.arange(num_new_tokens)  # [num_seqs, num_new_tokens]
        seq_len = int(positions.max()) + 1  # of the longest
        num_blocks = -(-seq_len // self.block_size)
        # padding is after the last token, and no token attends to it
        tables = [(seq.block_table + [0] * num_blocks)[:num_blocks] for seq in seqs]
        # [num_seqs, num_blocks, block_size, num_kv_heads, head_dim] each, then the blocks of each sequence in a row
        k, v = (blocks[torch.tensor(tables)].flatten(1, 2)[:, :seq_len] for blocks in self.kv_cache[:, layer])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        is_seen = torch.arange(seq_len) <= positions[:, None, :, None]  # [num_seqs, 1, num_new_tokens, seq_len]
        return F.scaled_dot_product_attention(q, k, v, is_seen, enable_gqa=True).transpose(1, 2)

    def count(self, running: list[Sequence]) -> None:
        """Add a step to the totals: waste = 1 - num_stored / num_reserved."""
        self.num_steps += 1
        self.num_stored += sum(seq.num_computed_tokens for seq in running)
        self.num_reserved += sum(len(seq.block_table) * self.block_size for seq in running)
        self.max_num_running = max(self.max_num_running, len(running))


if __name__ == "__main__":
    engine = Engine(TINY_QWEN3, num_blocks=256, block_size=4)
    questions = sys.argv[1:] or ["What is the KV cache?", "What is a block table?"]
    prompts = [engine.model.encode(question) for question in questions]
    for token_ids in engine.generate(prompts, max_tokens=100):
        print(engine.model.decode(token_ids))
