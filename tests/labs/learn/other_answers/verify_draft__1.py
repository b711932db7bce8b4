"""Appends token by token, until one is not the next draft."""

END = 0


def verify(seq, drafts, sampled, blocks):
    for token, draft in zip(sampled, [*drafts, None], strict=True):
        seq.token_ids.append(token)
        if token != draft or token == END:
            break
    seq.num_computed_tokens = len(seq.token_ids) - 1
    num_blocks = -(-seq.num_computed_tokens // blocks.block_size)
    for block_id in reversed(seq.block_table[num_blocks:]):
        blocks.free[block_id] = None
    del seq.block_table[num_blocks:]
