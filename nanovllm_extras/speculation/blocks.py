"""Blocks for drafts: taken before it is known whether the drafts are right, and given back if they are not."""

from nanovllm.block_manager import BlockManager
from nanovllm_extras.full_sequence import Sequence


def reserve(blocks: BlockManager, seq: Sequence, num_tokens: int) -> None:
    """Extend the block table of `seq` to cover `num_tokens` tokens. There must be free blocks.

    Unlike `try_allocate` it registers no block that these tokens fill: `schedule()` has not begun the step yet.
    """
    assert not seq.has_shared_tail
    while seq.block_table.length * blocks.block_size < num_tokens:
        blocks._append(seq, blocks._take(seq))


def shrink(blocks: BlockManager, seq: Sequence, num_tokens: int) -> list[int]:
    """Shrink the block table of `seq` to cover `num_tokens` tokens. Return the other blocks, the last one first.

    No other sequence owns them, and the prefix cache does not know them: they were for drafts.
    """
    table, num_blocks = seq.block_table, -(-num_tokens // blocks.block_size)
    given_back = table.view(num_blocks)[::-1].tolist()
    if hasattr(blocks, "num_groups"):  # of layers
        given_back += blocks.take_windows(seq, num_blocks)
    for block_id in given_back:
        blocks._disown(block_id)
    table.data[num_blocks : table.length] = 0  # rows are zero behind their tables' ends
    table.length = num_blocks
    return given_back
