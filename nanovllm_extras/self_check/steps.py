"""Three small steps for comparisons: prompts, chunks over cached prefixes, decodes of several lengths, a shared block.

With block_size 16:

    step 1    A prefills 21 tokens (blocks 1 and 2), B prefills 3 (block 3)
    step 2    A decodes; B prefills 7 more tokens; C shares block 1 with A, and prefills 3 tokens behind it (block 4)
    step 3    A, B and C decode, and D, which has one token (block 5)
"""

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from nanovllm.batch import Batch, SamplingBatch, build_batch
from nanovllm.layers.attention import AttentionMetadata
from nanovllm.scheduler import Chunk, make_step
from nanovllm_extras.options.request_params import SamplingParams
from nanovllm_extras.records.full_sequence import Sequence

MIN_MODEL_LEN = 16  # tokens; B has 11
LONG_CONTEXT = 1100  # tokens


def make_steps(block_size: int, max_model_len: int, token_ids: list[int]) -> tuple[list[Batch], int]:
    """Return the batches of the three steps, on the host, and the number of their blocks, with the null block.

    Their tokens are drawn from `token_ids`. No sequence is longer than `max_model_len`, at least `MIN_MODEL_LEN`.
    """
    new_block, tokens = count(1), draw_from(token_ids)
    num_long = min(block_size + 5, max_model_len - 2)  # tokens of A after step 1
    num_shared = block_size if block_size < num_long - 2 else 0

    def make(num_tokens: int, like: Sequence | None = None) -> Sequence:
        """Return a sequence with blocks. The first block and its tokens are those of the sequence `like`."""
        ids = [] if like is None else like.token_ids[:block_size].tolist()
        seq = Sequence("check", ids + [next(tokens) for _ in range(num_tokens)], SamplingParams(temperature=0))
        if like is not None:
            seq.block_table.append(like.block_table[0])
        while len(seq.block_table) * block_size < seq.num_tokens:
            seq.block_table.append(next(new_block))
        return seq

    a, b, d = make(num_long + 2), make(11), make(1)
    c = make(4, like=a if num_shared else None)
    steps: list[list[Chunk]] = [
        [(a, 0, num_long), (b, 0, 3)],
        [(a, num_long, 1), (b, 3, 7), (c, num_shared, 3)],
        [(a, num_long + 1, 1), (b, 10, 1), (c, num_shared + 3, 1), (d, 0, 1)],
    ]
    batches = []
    for chunks in steps:
        for seq, start, num_new_tokens in chunks:
            seq.num_tokens = start + num_new_tokens  # each sequence has caught up, so each gets logits
        num_tokens = sum(num_new_tokens for _, _, num_new_tokens in chunks)
        batches.append(build_batch(make_step(chunks, num_tokens), block_size))
    return batches, next(new_block)


def make_long_steps(block_size: int, max_model_len: int) -> tuple[list[Batch], int]:
    """Return a prompt, a decode behind it, and a chunk of three tokens behind that; and the number of blocks.

    The context is long enough for kernels to split it among processors.
    """
    num_tokens = min(LONG_CONTEXT, max_model_len - 4)
    seq = Sequence("check", [0] * (num_tokens + 4), SamplingParams(temperature=0))
    num_blocks = -(-seq.num_tokens // block_size)
    seq.block_table.extend(range(1, num_blocks + 1))
    batches = []
    for start, num_new_tokens in ((0, num_tokens), (num_tokens, 1), (num_tokens + 1, 3)):
        seq.num_tokens = start + num_new_tokens
        batches.append(build_batch(make_step([(seq, start, num_new_tokens)], num_new_tokens), block_size))
    return batches, num_blocks + 1


def repeat_decodes(batch: Batch, num_decodes: int, added: int, num_token_ids: int) -> Batch:
    """Return `num_decodes` decodes: those of `batch` again and again. Equal decodes write the same K and V.

    `added` rotates them, and is added to their token ids, modulo `num_token_ids`.
    """
    metadata = batch.metadata
    rows = (torch.arange(num_decodes) + added) % len(batch.input_ids)  # [num_decodes]
    offsets = torch.arange(num_decodes + 1, dtype=torch.int32)
    slots, tables, lens = metadata.slot_mapping[rows], metadata.block_tables[rows], metadata.seq_lens[rows]
    return Batch(
        input_ids=(batch.input_ids[rows] + added) % num_token_ids,
        positions=batch.positions[rows],
        metadata=AttentionMetadata.of_decodes(slots, tables, lens, offsets),
        logits_indices=offsets[:-1],
        sampling=SamplingBatch(torch.zeros(num_decodes)),
        copies=[],
    )


def draw_from(token_ids: list[int]) -> Iterator[int]:
    """Yield entries of `token_ids` in a random order that is always the same."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from [token_ids[i] for i in torch.randint(len(token_ids), (64,), generator=generator).tolist()]


def draw_vectors(seed: int, *shape: int) -> Tensor:
    """Return standard normal numbers, float32, on the host. The same seed gives the same numbers."""
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
