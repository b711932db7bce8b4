"""Allocate a block when a token needs it, and preempt a sequence when no block is free.

`paged.py` reserves blocks for the longest possible answer, even if the answer ends early. Here a sequence allocates a
block when it has a token for it, so that more sequences run at the same time. If no block is free, the newest sequence
frees its blocks and waits (preemption). Later, all of its tokens are computed again, prompt and output.

A prompt is still computed in a step of its own, for which all other sequences wait.

    python -m labs.on_demand "What is the KV cache?" "What is a block table?"

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


class BlockManager:
    """Allocates and frees blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = list(range(num_blocks))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def try_admit(self, seq: Sequence) -> bool:
        """Allocate blocks for all tokens of `seq`, computed or not. Return False if too few are free."""
        num_new = self.num_blocks_for(len(seq.token_ids))
        if num_new > len(self.free):
            return False
        seq.block_table = [self.free.pop() for _ in range(num_new)]
        seq.num_computed_tokens = 0
        return True

    def try_grow(self, seq: Sequence) -> bool:
        """Allocate a block for the newest token if it needs one. Return False if no block is free."""
        if self.num_blocks_for(len(seq.token_ids)) > len(seq.block_table):
            if not self.free:
                return False
            seq.block_table.append(self.free.pop())
        return True

    def release(self, seq: Sequence) -> None:
        self.free += seq.block_table
        seq.block_table = []


class Scheduler:
    """Decides which sequences each step computes."""

    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of their arrival
        self.num_preemptions = 0

    def schedule(self) -> list[Sequence]:
        """Return the next waiting sequence if there are blocks for its tokens, otherwise all running sequences."""
        if self.waiting and self.block_manager.try_admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
            return self.running[-1:]
        for seq in list(self.running):
            if seq in self.running:  # only the end of `running` is preempted
                self.make_room(seq)
        return list(self.running)

    def make_room(self, seq: Sequence) -> bool:
        """Preempt the newest sequences until `seq` has its block. Return False if `seq` itself was preempted."""
        while not self.block_manager.try_grow(seq):
            last = self.running.pop()
            self.block_manager.release(last)
            self.waiting.appendleft(last)
            self.num_preemptions += 1
            if last is seq:
                return False
        return True

    def finish(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.block_manager.release(seq)


class Engine:
    def __init__(self, folder: str | Path, num_blocks: int, block_size: int) -> None:
        self.model = Model(folder)
        # K and V of each layer, block and offset
        shape = (2, self.model.num_layers, num_blocks, block_size, self.model.num_kv_heads, self.model.head_dim)
        self.kv_cache = torch.zeros(shape)
        self.block_size = block_size
        self.max_model_len = min(self.model.max_model_len, num_blocks * block_size)
        self.scheduler = Scheduler(BlockManager(num_blocks, block_size))
        self.num_steps = self.num_stored = self.num_reserved = self.max_num_running = 0

    def generate(self, prompts: list[list[int]], max_tokens: int | list[int]) -> list[list[int]]:
        """Return the greedy output tokens of each prompt. `max_tokens` is one limit, or one for each prompt."""
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        seqs = [Sequence(list(prompt), len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)]
        for seq in seqs:
            self.check(seq)
        self.scheduler.waiting.extend(seqs)
        while self.scheduler.waiting or self.scheduler.running:
            self.step(self.scheduler.schedule())
        return [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]

    def check(self, seq: Sequence) -> None:
        most = seq.num_prompt_tokens + seq.max_tokens
        if not 1 <= seq.num_prompt_tokens < most <= self.max_model_len:
            raise ValueError(f"prompt and max_tokens must be >= 1, together <= {self.max_model_len}, got {most}")

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
        self.count(self.scheduler.running)
        for seq, token_id in zip(batch, token_ids, strict=True):
            self.append(seq, token_id)
            if seq.is_finished:
                self.scheduler.finish(seq)

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
        num_blocks = self.scheduler.block_manager.num_blocks_for(seq_len)
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
    engine = Engine(TINY_QWEN3, num_blocks=24, block_size=4)  # few: it preempts
    questions = sys.argv[1:] or ["What is the KV cache?", "What is a block table?"]
    prompts = [engine.model.encode(question) for question in questions]
    for token_ids in engine.generate(prompts, max_tokens=60):
        print(engine.model.decode(token_ids))
    print(f"steps: {engine.num_steps}, preemptions: {engine.scheduler.num_preemptions}")
