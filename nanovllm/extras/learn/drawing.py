"""Draw the state of a pool of blocks and of sequences, in plain text."""

from collections.abc import Mapping
from typing import Any

from nanovllm.extras.learn.texts import count


def draw_pool(blocks: Any, seqs: Mapping[str, Any]) -> str:
    """Return lines: for each block the sequences that own it, then the free order and the block tables."""
    names = {i: "".join(name for name, seq in seqs.items() if i in seq.block_table) for i in range(blocks.num_blocks)}
    width = max(3, *(len(name) for name in names.values()), len(str(blocks.num_blocks)))
    lines = [
        "block  " + " ".join(f"{i:>{width}}" for i in names),
        "owner  " + " ".join(f"{name or '·':>{width}}" for name in names.values()),
        "free   " + (" ".join(map(str, blocks.free)) or "none"),
    ]
    for name, seq in seqs.items():
        if seq.block_table:
            lines.append(f"table {name} {seq.block_table}, {count(len(seq.token_ids), 'token')}")
    return "\n".join(lines)


def draw_account(blocks: Any, seqs: Mapping[str, Any]) -> str:
    """Return the pool, and a line that adds up its blocks: each is owned or free, and never both."""
    owned = len({block_id for seq in seqs.values() for block_id in seq.block_table})
    total = owned + len(blocks.free)
    wrong = "" if total == blocks.num_blocks else f", not {blocks.num_blocks}!"
    return f"{draw_pool(blocks, seqs)}\nowned + free = {owned} + {len(blocks.free)} = {total}{wrong}"
