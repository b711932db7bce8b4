"""Attention sinks and a window: a sequence of any length keeps its first block and its last WINDOW blocks of K and V.

"Efficient Streaming Language Models with Attention Sinks" (Xiao et al. 2023, https://arxiv.org/abs/2309.17453): models
attend strongly to their first tokens. With a window only, the text breaks down when these leave the cache. With them it
stays fluent. The block table of a long text, with SINKS = 1 and WINDOW = 3:

    block        0   1   2   3   4   5   6        a query in block 6 reads the blocks 0, 4, 5, 6
    block table [7   0   0   0   4   2   9]       blocks 1 … 3 are released: null blocks keep their entries

As in the paper, positions are those inside the cache: the sinks are right before the window. Rotary attention depends
only on distances, so that is one rotation of the query: back by the number of tokens in between, for the sinks only.

Unlike in the paper, the window moves by whole blocks, so a token sees between (WINDOW - 1) * block_size + 1 and
WINDOW * block_size tokens of it, and the prompt is computed under the same mask. The model forgets what has left the
window. `max_model_len` still limits the text, and a prefix hit needs all blocks of the prefix. Each sequence attends by
itself in PyTorch: this bounds the memory, costs speed, and has no CUDA graphs. `nanovllm test` reports the released
blocks as faults, because it expects the K and V of all tokens.

    LLM(model, extension="examples/extensions/streaming_llm.py")
    nanovllm serve MODEL --extension examples/extensions/streaming_llm.py
    nanovllm bench compare examples/extensions/streaming_llm.py
"""

from array import array

import torch
from torch import Tensor

from nanovllm.block_manager import BlockManager
from nanovllm.layers.attention import AttentionMetadata, LoadedModel, TorchAttention, softmax_attention
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence

SINKS, WINDOW, CHUNK = 1, 8, 4  # blocks; a step computes at most CHUNK blocks of one prompt
MAX_BLOCKS = SINKS + WINDOW + CHUNK
NULL_BLOCK = 0


class StreamingScheduler(Scheduler):
    def share_of(self, seq: Sequence, budget: int) -> int:
        return min(super().share_of(seq, budget), CHUNK * self.block_manager.block_size)


class StreamingBlockManager(BlockManager):
    """A sequence owns at most MAX_BLOCKS blocks, whatever its length."""

    @property
    def capacity(self) -> int:
        return 2**31 - 1 if self.num_blocks >= MAX_BLOCKS else super().capacity

    def num_missing_blocks(self, seq: Sequence) -> int:
        num_owned = len(seq.block_table) - seq.block_table.count(NULL_BLOCK)
        return min(super().num_missing_blocks(seq), MAX_BLOCKS - num_owned)

    def try_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Release what the next token cannot see any more, and allocate as before."""
        first = seq.num_computed_tokens // self.block_size - WINDOW + 1  # the window of the next token begins here
        for i in reversed(range(SINKS, first)):
            if seq.block_table[i] == NULL_BLOCK:
                break  # and so are those before it
            self.release(seq.block_table[i])
            seq.block_table[i] = NULL_BLOCK
        return super().try_allocate(seq, num_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        table = parent.block_table
        parent.block_table = array("i", [block_id for block_id in table if block_id != NULL_BLOCK])
        super().fork(parent, child)
        parent.block_table, child.block_table = table, table[:]

    def release(self, block_id: int) -> None:
        if block_id != NULL_BLOCK:
            super().release(block_id)


class StreamingAttention(TorchAttention):
    def replace_layers(self, loaded: LoadedModel) -> None:
        super().replace_layers(loaded)
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=loaded.device)
        self.frequencies = 1.0 / loaded.shape.rope_theta ** (steps / self.head_dim)  # [head_dim / 2]

    def attend(self, q: Tensor, layer_cache: Tensor, metadata: AttentionMetadata, weigh=softmax_attention) -> Tensor:
        out = torch.empty_like(q)
        starts, lens = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
        for i, table in enumerate(metadata.block_tables):
            rows = slice(starts[i], starts[i + 1])
            if rows.start < rows.stop:
                out[rows] = self.attend_one(q[rows], layer_cache, table, lens[i])
        return out

    def attend_one(self, q: Tensor, layer_cache: Tensor, table: Tensor, length: int) -> Tensor:
        """Attend from the last n tokens of a sequence: q [n, num_heads, head_dim] -> as q"""
        size, n = self.block_size, len(q)
        own = torch.arange(length - n, length, device=q.device)[:, None]  # [n, 1], positions of the queries
        first = own // size - WINDOW + 1  # [n, 1], the first block of each query's window
        blocks = torch.arange(-(-length // size), device=q.device)
        blocks = blocks[(blocks < SINKS) | (blocks >= first[0])]  # those that a query sees
        k, v = layer_cache[:, table[blocks]].flatten(1, 2)  # [num_keys, num_kv_heads, head_dim] each
        keys = (blocks[:, None] * size + torch.arange(size, device=q.device)).flatten()  # [num_keys], their positions
        v = v.masked_fill((keys >= length)[:, None, None], 0)  # after the end there may be anything, even NaN

        is_sink = keys < SINKS * size
        is_seen = (keys <= own) & (is_sink | (keys // size >= first))  # [n, num_keys]
        gap = (first - SINKS).clamp(min=0) * size  # [n, 1], tokens between the sinks and each query's window
        scores = torch.where(is_sink, self.score(self.rotate_back(q, gap), k), self.score(q, k))
        probs = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1).to(v.dtype)
        return torch.einsum("hgnk,khd->nhgd", probs, v).flatten(1, 2)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        """Return q k^T / sqrt(head_dim): [num_kv_heads, group, n, num_keys]"""
        groups = q.unflatten(1, (self.num_kv_heads, -1))  # [n, num_kv_heads, group, head_dim]
        return torch.einsum("nhgd,khd->hgnk", groups, k).float() * self.head_dim**-0.5

    def rotate_back(self, q: Tensor, distance: Tensor) -> Tensor:
        """q: [n, num_heads, head_dim], as if each were `distance`: [n, 1] tokens earlier"""
        angles = (distance * self.frequencies)[:, None]  # [n, 1, head_dim / 2]
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        first, second = q.chunk(2, dim=-1)
        return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


attention_backend = StreamingAttention
block_manager_cls = StreamingBlockManager
scheduler_cls = StreamingScheduler
