"""The common prefix of two lists, cut at the end token."""

from itertools import takewhile

END = 0


def verify(seq, drafts, sampled, blocks):
    num_right = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(drafts, sampled, strict=False))))
    ends = [i for i, token in enumerate(sampled[:num_right]) if token == END]
    num_new = ends[0] + 1 if ends else num_right + 1
    seq.num_computed_tokens = len(seq.token_ids) + num_new - 1
    seq.token_ids = seq.token_ids + sampled[:num_new]
    spare = len(seq.block_table) - blocks.num_blocks_for(seq.num_computed_tokens)
    for _ in range(spare):
        blocks.free.setdefault(seq.block_table.pop())
