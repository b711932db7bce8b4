"""Draw the state of a pool of blocks and of sequences, in plain text."""

from collections.abc import Mapping
from typing import Any


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
            lines.append(f"table {name} {seq.block_table}, {len(seq.token_ids)} tokens")
    return "\n".join(lines)
