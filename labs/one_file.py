"""A complete engine in one file: paged KV cache, preemption, chunked prefill, prefix cache, copy-on-write.

The engine computes greedy answers to many prompts at a time. A transformer needs the keys and values (K and V) of all
earlier tokens. They never change, so a cache keeps them, in blocks of `block_size` tokens. Computing a prompt is called
prefill; computing only the newest token is called decode. A step is one forward pass over tokens of many sequences.

In `prefix_cache.py`, each of several answers to one prompt would compute and store the end of the prompt. Here the
prompt is computed once. Then its sequence is forked: all answers share its blocks. The last block may be partly filled.
If it has several owners, a sequence copies it before it writes its next token (copy-on-write). The last owner writes
without a copy.

Greedy answers to one prompt would all be the same. So the i-th answer begins with the i-th most likely first token, and
continues greedily, as in CoT-decoding (Wang and Zhou 2024, https://arxiv.org/abs/2402.10200). This needs no random
numbers, so that each answer can be compared with that of a simpler program. The first answer is the greedy one.

    python -m labs.one_file "What is the KV cache?" "What is a block table?"

`Sequence` is one answer. `BlockManager` keeps which sequences own each block; it uses only integers. `Scheduler`
decides how many tokens of each sequence a step computes. `Engine` builds the tensors, runs the model, and appends the
tokens. Start at `Engine.step`, then read `Scheduler.schedule`. The network is in `model.py`, and calls `Engine.attend`
in each layer. nanovllm adds sampling, requests that arrive while others run, streamed text and fast kernels.

    token_ids            [ 11  7  42  5 | 90  13 ]     prompt | output
    num_computed_tokens    5     K and V of the first five are in the cache; the sixth is the next step's input
    block_table          [ 7, 2 ]     with block_size 4: block 7 holds tokens 0 … 3, block 2 holds token 4 and will
                                      hold token 5
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
    num_computed_tokens: int = 0  # tokens whose K and V are in the cache
    block_table: list[int] = field(default_factory=list)  # the blocks that hold them, block_size tokens each
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, computed when first needed
    children: list["Sequence"] = field(default_factory=list)  # the prompt's other answers, until they start


class BlockManager:
    """Allocates, shares and frees blocks.

    A block is free if no sequence owns it. A free block keeps its content, and can be found again until it is allocated
    to another sequence. The block that was freed first is allocated first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = dict.fromkeys(range(num_blocks))  # in the order in which blocks were freed
        self.num_owners = [0] * num_blocks
        self.block_of_hash: dict[bytes, int] = {}  # the prefix cache
        self.hash_of_block: dict[int, bytes] = {}
        self.copies: list[tuple[int, int]] = []  # (source, destination), copied before the next forward pass

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def hash_block(self, seq: Sequence, i: int) -> bytes:
        """Return a hash of full block `i` and of the hash before it, and so of all tokens up to the block's end."""
        for j in range(len(seq.block_hashes), i + 1):
            tokens = seq.token_ids[j * self.block_size : (j + 1) * self.block_size]
            seq.block_hashes.append(sha256(repr((seq.block_hashes[-1:], tokens)).encode()).digest())
        return seq.block_hashes[i]

    def find(self, seq: Sequence) -> list[int]:
        """Return the cached blocks that `seq` begins with, without its last token: a step needs that token's logits."""
        hits = []
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            block_id = self.block_of_hash.get(self.hash_block(seq, i))
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def try_admit(self, seq: Sequence) -> bool:
        """Share the cached blocks and allocate blocks for the other tokens. Return False if too few are free."""
        hits = self.find(seq)
        num_new = self.num_blocks_for(len(seq.token_ids)) - len(hits)
        num_free_hits = sum(block_id in self.free for block_id in hits)  # free, but not to be overwritten
        if num_new > len(self.free) - num_free_hits:
            return False
        for block_id in hits:
            self.free.pop(block_id, None)
            self.num_owners[block_id] += 1
        seq.block_table = hits + [self.take() for _ in range(num_new)]
        seq.num_computed_tokens = len(hits) * self.block_size
        return True

    def try_grow(self, seq: Sequence) -> bool:
        """Give the newest token a block that only `seq` writes to. Return False if no block is free.

        A and B have the block table [7, 2], with block_size 4. Each has a sixth token, and block 5 is free:

        A  [7, 2]  ->  [7, 5]    block 2 has two owners: A writes to a copy of it, block 5 (copy-on-write)
        B  [7, 2]  ->  [7, 2]    B is now the only owner of block 2: it writes without a copy
        """
        i = seq.num_computed_tokens // self.block_size  # of the block that is written to next
        is_shared = i < len(seq.block_table) and self.num_owners[seq.block_table[i]] > 1
        if is_shared or self.num_blocks_for(len(seq.token_ids)) > len(seq.block_table):
            if not self.free:
                return False
            block_id = self.take()
            if is_shared:
                source = seq.block_table.pop()
                self.num_owners[source] -= 1
                self.copies.append((source, block_id))
            seq.block_table.append(block_id)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, whose tokens begin with the computed tokens of `parent`, share all blocks of `parent`."""
        for block_id in parent.block_table:
            self.num_owners[block_id] += 1
        child.block_table = parent.block_table.copy()
        child.num_computed_tokens = parent.num_computed_tokens

    def take(self) -> int:
        """Return the block that was freed first, and evict its content from the prefix cache."""
        block_id = next(iter(self.free))
        del self.free[block_id]
        if block_id in self.hash_of_block:
            del self.block_of_hash[self.hash_of_block.pop(block_id)]
        self.num_owners[block_id] = 1
        return block_id

    def register(self, seq: Sequence, num_before: int) -> None:
        """Add to the prefix cache the blocks that have become full since `seq` had `num_before` computed tokens."""
        for i in range(num_before // self.block_size, seq.num_computed_tokens // self.block_size):
            block_hash, block_id = self.hash_block(seq, i), seq.block_table[i]
            # If two sequences compute the same tokens in the same step, the prefix cache keeps the first block.
            if block_hash not in self.block_of_hash:
                self.block_of_hash[block_hash], self.hash_of_block[block_id] = block_id, block_hash

    def release(self, seq: Sequence) -> None:
        """Free the blocks, the last block first: other sequences most likely need the beginning of a prompt."""
        for block_id in reversed(seq.block_table):
            self.num_owners[block_id] -= 1
            if not self.num_owners[block_id]:
                self.free[block_id] = None
        seq.block_table = []


class Scheduler:
    """Decides what each step computes: for each sequence, the tokens that are not computed yet, up to the budget."""

    def __init__(self, block_manager: BlockManager, max_num_batched_tokens: int) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of their arrival
        self.num_preemptions = self.num_cached_tokens = 0

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Return (sequence, number of new tokens) for each sequence of the next step. With a budget of 8:

        A  20 tokens, 19 computed    gets 1: a decode            budget left: 7
        B  11 tokens,  4 computed    gets 7: a prefill chunk     budget left: 0
        C  30 tokens, waits          is not admitted in this step
        """
        budget, chunks, preemptions_before = self.max_num_batched_tokens, [], self.num_preemptions
        for seq in list(self.running):
            if not budget or seq not in self.running:  # only the end of `running` is preempted: no chunk is lost
                break
            if self.make_room(seq):
                num_new_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, budget)
                chunks.append((seq, num_new_tokens))
                budget -= num_new_tokens
        # after a preemption, a step admits no sequence: that sequence would soon be preempted again
        while budget and self.waiting and self.num_preemptions == preemptions_before:
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
        """Preempt the newest sequences until `seq` has its block. Return False if `seq` itself was preempted."""
        while not self.block_manager.try_grow(seq):
            last = self.running.pop()
            self.block_manager.release(last)
            self.waiting.appendleft(last)
            self.num_preemptions += 1
            if last is seq:
                return False
        return True

    def fork(self, parent: Sequence) -> list[Sequence]:
        """Start and return the other answers to the prompt that `parent` has computed."""
        children, parent.children = parent.children, []
        for child in children:
            self.block_manager.fork(parent, child)
        place = self.running.index(parent) + 1  # they arrived with `parent`
        self.running[place:place] = children
        return children

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
        self.num_steps = self.num_stored = self.num_reserved = self.max_num_running = self.num_copies = 0

    def generate(self, prompts: list[list[int]], max_tokens: int | list[int], n: int = 1) -> list[list[int]]:
        """Return the output tokens of `n` answers to each prompt: first those to the first prompt.

        `max_tokens` is one limit, or one for each prompt. The i-th answer begins with the i-th most likely first token.
        """
        if not 1 <= n <= self.model.vocab_size:
            raise ValueError(f"n must be >= 1 and <= {self.model.vocab_size}, the number of first tokens, got {n}")
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        seqs = [Sequence(list(prompt), len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)]
        for seq in seqs:
            self.check(seq)
            seq.children = [Sequence(seq.token_ids.copy(), seq.num_prompt_tokens, seq.max_tokens) for _ in range(n - 1)]
        answers = [answer for seq in seqs for answer in (seq, *seq.children)]
        self.scheduler.waiting.extend(seqs)
        while self.scheduler.waiting or self.scheduler.running:
            self.step(self.scheduler.schedule())
        return [seq.token_ids[seq.num_prompt_tokens :] for seq in answers]

    def check(self, seq: Sequence) -> None:
        most = seq.num_prompt_tokens + seq.max_tokens
        if not 1 <= seq.num_prompt_tokens < most <= self.max_model_len:
            raise ValueError(f"prompt and max_tokens must be >= 1, together <= {self.max_model_len}, got {most}")

    def step(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Compute all chunks in one forward pass, and append a token to each sequence with no token left to compute."""
        input_ids, positions, slots, ends = [], [], [], []
        for seq, num_new_tokens in chunks:
            for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_new_tokens):
                input_ids.append(seq.token_ids[position])
                positions.append(position)
                # a slot is a token's address in the cache
                block_id = seq.block_table[position // self.block_size]
                slots.append(block_id * self.block_size + position % self.block_size)
            ends.append(len(input_ids))
        self.copy_blocks()
        attend = partial(self.attend, chunks, torch.tensor(slots))
        hidden = self.model(torch.tensor(input_ids), torch.tensor(positions), attend)
        logits = self.model.logits(hidden[torch.tensor(ends) - 1])  # [num_chunks, vocab_size], after each chunk
        top_token_ids = logits.topk(max(1 + len(seq.children) for seq, _ in chunks)).indices.tolist()
        for seq, num_new_tokens in chunks:
            seq.num_computed_tokens += num_new_tokens
            self.scheduler.block_manager.register(seq, seq.num_computed_tokens - num_new_tokens)
        self.count(self.scheduler.running)
        for (seq, _), token_ids in zip(chunks, top_token_ids, strict=True):
            if seq.num_computed_tokens == len(seq.token_ids):  # otherwise the next step continues its prompt
                for answer, token_id in zip([seq, *self.scheduler.fork(seq)], token_ids, strict=False):
                    self.append(answer, token_id)
                    if answer.is_finished:
                        self.scheduler.finish(answer)

    def copy_blocks(self) -> None:
        """Copy each block that a sequence needs for itself, before this step writes to any block."""
        manager = self.scheduler.block_manager
        for source, destination in manager.copies:
            self.kv_cache[:, :, destination] = self.kv_cache[:, :, source]
        self.num_copies += len(manager.copies)
        manager.copies = []

    def append(self, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        num_output_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        seq.is_finished = token_id in self.model.end_token_ids or num_output_tokens == seq.max_tokens

    def attend(self, chunks: list, slot_mapping: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Let each token attend to its sequence up to its own position. q, result: [num_tokens, num_heads, head_dim]

        K and V are stored first, because a chunk also attends to its own tokens. Then one call computes all decodes,
        and one call each longer chunk. nanovllm needs only two calls: flash-attn computes all longer chunks in one.
        """
        k_cache, v_cache = self.kv_cache[:, layer].flatten(1, 2)  # views: [num_slots, num_kv_heads, head_dim] each
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
        """Add a step to the totals: waste = 1 - num_stored / num_reserved. A shared block counts once."""
        stored = {}  # the number of tokens in each block
        for seq in running:
            for i, block_id in enumerate(seq.block_table):
                stored[block_id] = max(0, min(seq.num_computed_tokens - i * self.block_size, self.block_size))
        self.num_steps += 1
        self.num_stored += sum(stored.values())
        self.num_reserved += len(stored) * self.block_size
        self.max_num_running = max(self.max_num_running, len(running))


if __name__ == "__main__":
    engine = Engine(TINY_QWEN3, num_blocks=24, block_size=4, max_num_batched_tokens=16)  # few: it preempts
    questions = sys.argv[1:] or ["What is paged attention?", "What is copy-on-write?"]
    prompts = [engine.model.encode(question) for question in questions]
    for token_ids in engine.generate(prompts, max_tokens=60, n=2):
        print(engine.model.decode(token_ids))
    found, preemptions = engine.scheduler.num_cached_tokens, engine.scheduler.num_preemptions
    print(f"tokens found in the prefix cache: {found}, preemptions: {preemptions}, copied blocks: {engine.num_copies}")
