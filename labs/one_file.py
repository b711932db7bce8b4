"""Rung 6: a complete engine in one file: prefix cache, chunked prefill, preemption.

Rung 5 reserved blocks for the longest answer, computed equal beginnings again, and let all wait for a long prompt.
Here a sequence takes a block when it has a token for it; if none is free, the newest sequence gives its blocks back and
is computed again later (preemption). Full blocks are found again by their tokens (prefix cache). A step computes at
most `max_num_batched_tokens`: the newest token of each sequence first, then pieces of prompts (chunked prefill).

    python -m labs.one_file "What is the KV cache?" "What is a block table?"

Reads from top to bottom. `Sequence` is one request. `BlockManager` knows which block is whose: integers only.
`Scheduler` decides which sequence computes how many tokens in a step. `Engine` makes tensors of that decision, runs the
model, and appends the tokens. The network is in `model.py`, and asks `Engine.attend` in each layer.

    token_ids            [ 11  7  42  5 | 90  13 ]     prompt | output
    num_computed_tokens    5     K and V of the first five are in the cache; the sixth is the next step's input
    block_table          [ 7, 2 ]     with block_size 4: tokens 0 … 3 lie in block 7, tokens 4 and 5 in block 2
"""

import sys
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
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
    num_computed_tokens: int = 0  # whose K and V are in the cache
    block_table: list[int] = field(default_factory=list)  # where they lie: block_size tokens in each block
    block_keys: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed


class BlockManager:
    """Gives blocks, shares them, and takes them back.

    A block is free if no sequence owns it. A free block keeps its content, and can be found again until it is given to
    another sequence. The block that has been free for the longest time is given first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = dict.fromkeys(range(num_blocks))  # in the order in which they were freed
        self.num_owners = [0] * num_blocks
        self.block_of_key: dict[bytes, int] = {}  # the prefix cache
        self.key_of_block: dict[int, bytes] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def key(self, seq: Sequence, i: int) -> bytes:
        """Of full block i: a hash of its tokens and of the key before it, so of all tokens up to its end."""
        for j in range(len(seq.block_keys), i + 1):
            tokens = seq.token_ids[j * self.block_size : (j + 1) * self.block_size]
            seq.block_keys.append(sha256(repr((seq.block_keys[-1:], tokens)).encode()).digest())
        return seq.block_keys[i]

    def find(self, seq: Sequence) -> list[int]:
        """The cached blocks that `seq` begins with. Its last token is never among them: a step needs its logits."""
        hits = []
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            block_id = self.block_of_key.get(self.key(seq, i))
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def try_admit(self, seq: Sequence) -> bool:
        """Share what is cached, and give blocks for all other tokens; False, and nothing done, if too few are free."""
        hits = self.find(seq)
        num_new = self.num_blocks_for(len(seq.token_ids)) - len(hits)
        if num_new > len(self.free) - sum(block_id in self.free for block_id in hits):
            return False
        for block_id in hits:
            self.free.pop(block_id, None)
            self.num_owners[block_id] += 1
        seq.block_table = hits + [self.take() for _ in range(num_new)]
        seq.num_computed_tokens = len(hits) * self.block_size
        return True

    def try_grow(self, seq: Sequence) -> bool:
        """A block for the newest token, if it needs one; False if none is free."""
        if self.num_blocks_for(len(seq.token_ids)) > len(seq.block_table):
            if not self.free:
                return False
            seq.block_table.append(self.take())
        return True

    def take(self) -> int:
        """The block that has been free for the longest time; what it held is forgotten."""
        block_id = next(iter(self.free))
        del self.free[block_id]
        self.block_of_key.pop(self.key_of_block.pop(block_id, b""), None)
        self.num_owners[block_id] = 1
        return block_id

    def register(self, seq: Sequence, num_before: int) -> None:
        """Let others find the blocks that have become full since `seq` had `num_before` computed tokens."""
        for i in range(num_before // self.block_size, seq.num_computed_tokens // self.block_size):
            key, block_id = self.key(seq, i), seq.block_table[i]
            if key not in self.block_of_key:  # else another block with the same tokens stays the one that is found
                self.block_of_key[key], self.key_of_block[block_id] = block_id, key

    def release(self, seq: Sequence) -> None:
        """The last block first: the beginning of a prompt is what others are most likely to need."""
        for block_id in reversed(seq.block_table):
            self.num_owners[block_id] -= 1
            if not self.num_owners[block_id]:
                self.free[block_id] = None
        seq.block_table, seq.num_computed_tokens = [], 0


class Scheduler:
    """No prefill phase and no decode phase: each step lets sequences catch up, as far as the budget goes."""

    def __init__(self, block_manager: BlockManager, max_num_batched_tokens: int) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of their arrival
        self.num_preemptions = self.num_cached_tokens = 0

    def schedule(self) -> list[tuple[Sequence, int]]:
        """(sequence, number of new tokens) for each sequence of the step. With a budget of 8:

        A  20 tokens, 19 computed    gets 1: a decode            budget 7
        B  11 tokens,  4 computed    gets 7: a prefill chunk     budget 0
        C  30 tokens, waits          is not admitted in this step
        """
        budget, chunks, num_preemptions = self.max_num_batched_tokens, [], self.num_preemptions
        for seq in list(self.running):
            if not budget or seq not in self.running:  # an earlier one may have taken its blocks
                break
            if self.make_room(seq):
                num_new_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, budget)
                chunks.append((seq, num_new_tokens))
                budget -= num_new_tokens
        while budget and self.waiting and num_preemptions == self.num_preemptions:
            seq = self.waiting[0]
            if not self.block_manager.try_admit(seq):
                break
            self.num_cached_tokens += seq.num_computed_tokens
            self.running.append(self.waiting.popleft())
            num_new_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, budget)
            chunks.append((seq, num_new_tokens))
            budget -= num_new_tokens
        return chunks

    def make_room(self, seq: Sequence) -> bool:
        """A block for the newest token of `seq`, if need be from the newest sequence; False if that is `seq` itself."""
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
    def __init__(self, folder: str | Path, num_blocks: int, block_size: int, max_num_batched_tokens: int) -> None:
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_num_batched_tokens": max_num_batched_tokens}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be >= 1, got {size}")
        self.model = Model(folder)
        # K and V of each layer, block and offset
        shape = (2, self.model.num_layers, num_blocks, block_size, self.model.num_kv_heads, self.model.head_dim)
        self.kv_cache = torch.zeros(shape)
        self.block_size = block_size
        self.max_model_len = min(self.model.max_model_len, num_blocks * block_size)
        self.scheduler = Scheduler(BlockManager(num_blocks, block_size), max_num_batched_tokens)
        self.num_steps = self.num_stored = self.num_reserved = self.max_num_running = 0

    def generate(self, prompts: list[list[int]], max_tokens: int | list[int]) -> list[list[int]]:
        """Greedy output tokens of each prompt; `max_tokens` for all of them, or one number for each."""
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

    def step(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Compute the tokens of all chunks, end to end, and append a token to each sequence that has caught up."""
        input_ids, positions, slots, ends = [], [], [], []
        for seq, num_new_tokens in chunks:
            start = seq.num_computed_tokens
            for position in range(start, start + num_new_tokens):
                input_ids.append(seq.token_ids[position])
                positions.append(position)
                # a slot is a token's address in the cache
                block_id = seq.block_table[position // self.block_size]
                slots.append(block_id * self.block_size + position % self.block_size)
            ends.append(len(input_ids))
        attend = partial(self.attend, chunks, torch.tensor(slots))
        hidden = self.model(torch.tensor(input_ids), torch.tensor(positions), attend)
        token_ids = self.model.next_tokens(hidden[torch.tensor(ends) - 1])  # of the last token of each chunk
        for seq, num_new_tokens in chunks:
            seq.num_computed_tokens += num_new_tokens
            self.scheduler.block_manager.register(seq, seq.num_computed_tokens - num_new_tokens)
        self.count(self.scheduler.running)
        for (seq, _), token_id in zip(chunks, token_ids, strict=True):
            if seq.num_computed_tokens == len(seq.token_ids):  # else its prompt goes on in the next step
                self.append(seq, token_id)
                if seq.is_finished:
                    self.scheduler.finish(seq)

    def append(self, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        num_output_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        seq.is_finished = token_id in self.model.end_token_ids or num_output_tokens == seq.max_tokens

    def count(self, running: list[Sequence]) -> None:
        """Waste is 1 - num_stored / num_reserved. A block that two sequences share counts twice in both."""
        self.num_steps += 1
        self.num_stored += sum(seq.num_computed_tokens for seq in running)
        self.num_reserved += sum(len(seq.block_table) * self.block_size for seq in running)
        self.max_num_running = max(self.max_num_running, len(running))

    def attend(self, chunks: list, slot_mapping: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [num_tokens, num_heads, head_dim] -> as q: each token attends to its sequence's tokens up to itself

        Store first: a chunk also attends to its own tokens. Then one call for all decodes, and one for each longer
        chunk. flash-attn needs two calls for the same, over the same block tables.
        """
        k_cache, v_cache = self.kv_cache[:, layer].flatten(1, 2)  # [num_slots, num_kv_heads, head_dim] each
        k_cache[slot_mapping], v_cache[slot_mapping] = k, v
        out, row, decodes = torch.empty_like(q), 0, []
        for seq, num_new_tokens in chunks:
            if num_new_tokens == 1:
                decodes.append((row, seq))
            else:
                chunk = slice(row, row + num_new_tokens)
                out[chunk] = self.attend_to_blocks(q[None, chunk], layer, [seq])[0]
            row += num_new_tokens
        if decodes:
            rows = [row for row, _ in decodes]
            out[rows] = self.attend_to_blocks(q[rows, None], layer, [seq for _, seq in decodes])[:, 0]
        return out

    def attend_to_blocks(self, q: Tensor, layer: int, seqs: list[Sequence]) -> Tensor:
        """q: [num_seqs, num_new_tokens, num_heads, head_dim] -> as q"""
        num_new_tokens = q.shape[1]
        starts = torch.tensor([seq.num_computed_tokens for seq in seqs])  # [num_seqs]
        positions = starts[:, None] + torch.arange(num_new_tokens)  # [num_seqs, num_new_tokens]
        seq_len = int(positions.max()) + 1  # of the longest
        num_blocks = self.scheduler.block_manager.num_blocks_for(seq_len)
        # padding is never seen: it stands behind the last token
        tables = [(seq.block_table + [0] * num_blocks)[:num_blocks] for seq in seqs]
        # [num_seqs, num_blocks, block_size, num_kv_heads, head_dim] each, then all blocks of a sequence in a row
        k, v = (blocks[torch.tensor(tables)].flatten(1, 2)[:, :seq_len] for blocks in self.kv_cache[:, layer])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        is_seen = torch.arange(seq_len) <= positions[:, None, :, None]  # [num_seqs, 1, num_new_tokens, seq_len]
        return F.scaled_dot_product_attention(q, k, v, is_seen, enable_gqa=True).transpose(1, 2)


if __name__ == "__main__":
    engine = Engine(TINY_QWEN3, num_blocks=256, block_size=4, max_num_batched_tokens=64)
    prompts = [engine.model.encode(question) for question in sys.argv[1:]]
    for token_ids in engine.generate(prompts, max_tokens=100):
        print(engine.model.decode(token_ids))
