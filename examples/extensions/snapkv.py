"""SnapKV: after the prompt, keep the K and V of the tokens that its end attends to, and free the blocks of the others.

"SnapKV: LLM Knows What You are Looking for Before Generation" (Li et al. 2024, https://arxiv.org/abs/2404.14469). The
last WINDOW tokens of a prompt vote: their attention, summed over them and pooled over neighbours, chooses KEPT - WINDOW
earlier tokens for each layer and each K/V head. These and the window are moved to the front of the sequence's blocks:

    prompt of 12 tokens, blocks of 4          [ 0 1 2 3 | 4 5 6 7 | 8 9 10 11 ]      three blocks
    KEPT 8, WINDOW 4; the votes are for       [ 0 2 3 6 | 8 9 10 11 ]                two blocks, the third is free

Keys keep the rotation of their positions in the text, so only slots and lengths change: `make_metadata` counts them
from what is kept. A preempted sequence computes its prompt again, in full, and then its output with the kept tokens.

It saves memory, and time of decodes after long prompts. The prompt itself still needs all of its blocks, and the choice
costs the scores of WINDOW queries in PyTorch. The paper chooses for each query head; here, the heads that share K and V
vote together. Blocks are overwritten, so they are never shared: the prefix cache is off, and n must be 1. Prompts of at
most KEPT tokens stay whole. `nanovllm test` reports faults, because it expects the K and V of all tokens.

    LLM(model, extension="examples/extensions/snapkv.py")
    nanovllm serve MODEL --extension examples/extensions/snapkv.py
    nanovllm bench compare examples/extensions/snapkv.py
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.block_manager import BlockManager
from nanovllm.layers.attention import AttentionMetadata, TorchAttention
from nanovllm.model_runner import ModelRunner
from nanovllm.scheduler import Scheduler, Step
from nanovllm.sequence import Sequence

KEPT, WINDOW, POOL = 256, 16, 5  # tokens; POOL neighbours get the largest vote among them


def num_dropped(seq: Sequence, num_computed_tokens: int) -> int:
    """Return the number of tokens that are not in the cache any more, when some tokens are computed."""
    return max(0, seq.num_prompt_tokens - KEPT) if num_computed_tokens >= seq.num_prompt_tokens else 0


class SnapScheduler(Scheduler):
    block_manager: "SnapBlockManager"

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.max_num_batched_tokens < WINDOW:
            raise ValueError(f"max_num_batched_tokens must be at least {WINDOW}, because the tokens of a window vote "
                             f"in one step, got {self.max_num_batched_tokens}")  # fmt: skip

    def add(self, seq: Sequence) -> None:
        if seq.children:
            raise ValueError(f"n must be 1 with snapkv, got {1 + len(seq.children)}; send the prompt several times")
        super().add(seq)

    def share_of(self, seq: Sequence, budget: int) -> int:
        """Return a chunk that ends with the prompt, or leaves at least WINDOW tokens of it to the last chunk."""
        num_tokens, left = super().share_of(seq, budget), seq.num_prompt_tokens - seq.num_computed_tokens
        if left <= 0 or seq.num_prompt_tokens <= KEPT:
            return num_tokens
        return left if num_tokens >= left else max(0, min(num_tokens, left - WINDOW))

    def update(self, step: Step, new_token_ids: list[int]) -> list[tuple[int, Sequence]]:
        for seq, start, num_new_tokens in step.chunks:
            if start < seq.num_prompt_tokens == start + num_new_tokens:
                self.block_manager.truncate(seq)
        return super().update(step, new_token_ids)


class SnapBlockManager(BlockManager):
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, *args) -> None:
        super().__init__(num_blocks, block_size, False, *args)

    def num_missing_blocks(self, seq: Sequence) -> int:
        num_tokens = seq.num_tokens - num_dropped(seq, seq.num_computed_tokens)
        return max(0, -(-num_tokens // self.block_size) - len(seq.block_table))

    def try_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        return super().try_allocate(seq, num_tokens - num_dropped(seq, seq.num_computed_tokens))

    def truncate(self, seq: Sequence) -> None:
        """Free the blocks behind the kept tokens. The forward pass has moved these to the front."""
        num_blocks = -(-min(KEPT, seq.num_prompt_tokens) // self.block_size)
        for block_id in seq.block_table[num_blocks:]:
            self.release(block_id)
        del seq.block_table[num_blocks:]


@dataclass(frozen=True)
class SnapMetadata(AttentionMetadata):
    ends_prompt: Tensor  # [num_tokens] int32, 1 for tokens of a chunk after which some tokens are dropped


class SnapRunner(ModelRunner):
    metadata_cls = SnapMetadata

    def make_metadata(self, step: Step, metadata: AttentionMetadata) -> SnapMetadata:
        """Count slots and lengths from what is kept."""
        size = self.backend.block_size
        slots, lens = metadata.slot_mapping.clone(), metadata.seq_lens.clone()
        ends: list[int] = []
        for i, (seq, start, num_new_tokens) in enumerate(step.chunks):
            dropped = num_dropped(seq, start)
            if dropped:
                places = np.arange(start - dropped, start - dropped + num_new_tokens)
                rows = slice(len(ends), len(ends) + num_new_tokens)
                slots[rows] = torch.from_numpy(np.array(seq.block_table)[places // size] * size + places % size)
                lens[i] -= dropped
            ends += [int(num_dropped(seq, start + num_new_tokens) > dropped)] * num_new_tokens
        ends_prompt = torch.tensor(ends, dtype=torch.int32)
        metadata = replace(metadata, slot_mapping=slots, seq_lens=lens)
        return SnapMetadata(**vars(metadata), ends_prompt=ends_prompt)


class SnapAttention(TorchAttention):
    def attend(self, q: Tensor, layer_cache: Tensor, metadata: Any, *others: Any) -> Tensor:
        out = super().attend(q, layer_cache, metadata, *others)
        for i in range(metadata.num_decodes, len(metadata.seq_lens)):
            begin, end = metadata.cu_seqlens_q[i : i + 2].tolist()
            if metadata.ends_prompt[begin]:
                self.compact(q[end - WINDOW : end], layer_cache, metadata.block_tables[i], int(metadata.seq_lens[i]))
        return out

    def compact(self, q: Tensor, layer_cache: Tensor, table: Tensor, length: int) -> None:
        """Choose tokens by the votes of the window, and move their K and V to the first slots of `table`.

        q: [WINDOW, num_heads, head_dim]; length: of the prompt
        """
        positions = torch.arange(length, device=q.device)
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size  # [length]
        kv = layer_cache.flatten(1, 2)[:, slots]  # [2, length, num_kv_heads, head_dim], a copy
        groups = q.unflatten(1, (self.num_kv_heads, -1))  # [WINDOW, num_kv_heads, group, head_dim]
        scores = torch.einsum("nhgd,khd->hgnk", groups, kv[0]).float() * self.head_dim**-0.5
        probs = scores.masked_fill(positions > positions[-WINDOW:, None], -torch.inf).softmax(dim=-1)
        votes = probs[..., :-WINDOW].sum(dim=(1, 2))  # [num_kv_heads, length - WINDOW]
        votes = F.max_pool1d(votes, POOL, stride=1, padding=POOL // 2)
        ranked = votes.sort(descending=True, stable=True).indices  # pooling makes neighbours equal: take the first ones
        chosen = ranked[:, : KEPT - WINDOW].sort().values  # [num_kv_heads, KEPT - WINDOW]
        kept = torch.cat((chosen, positions[-WINDOW:].expand(len(chosen), -1)), dim=1).T  # [KEPT, num_kv_heads]
        layer_cache.flatten(1, 2)[:, slots[:KEPT]] = kv.gather(
            1, kept[None, :, :, None].expand(2, -1, -1, kv.shape[-1])
        )


attention_backend = SnapAttention
block_manager_cls = SnapBlockManager
runner_cls = SnapRunner
scheduler_cls = SnapScheduler
