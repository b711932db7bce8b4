"""Draw the state of a pool of blocks and of sequences, in plain text."""

from collections.abc import Mapping
from typing import Any

from labs.learn.texts import count


def draw_pool(blocks: Any, seqs: Mapping[str, Any]) -> str:
    """Return lines: for each block the sequences that own it, then the free order and the block tables."""
    names: dict[int, str] = {}
    for i in range(blocks.num_blocks):
        owners = [name for name, seq in seqs.items() if i in seq.block_table]
        joined = "".join(owners)
        names[i] = joined if len(joined) <= 4 else f"×{len(owners)}"  # A, A.1 and A.2: the tables name them
    width = max(3, *(len(name) for name in names.values()), len(str(blocks.num_blocks)))
    rows: dict[str, list[Any]] = {"block": list(names), "owner": [name or "·" for name in names.values()]}
    if hasattr(blocks, "num_owners"):
        rows["num_owners"] = list(blocks.num_owners)
    start = max(map(len, rows))
    lines = [f"{row:<{start}}  " + " ".join(f"{cell:>{width}}" for cell in cells) for row, cells in rows.items()]
    lines.append(f"{'free':<{start}}  " + (" ".join(map(str, blocks.free)) or "none"))
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


def compare_fields(a: Any, b: Any, hidden: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return the fields of two named tuples that differ, a line for each: "name value".

    Of a dict, only the entries that differ are shown. `hidden` fields are shown only if no other differs.
    """
    differing = [name for name in a._fields if getattr(a, name) != getattr(b, name)]
    first, second = [], []
    for name in [name for name in differing if name not in hidden] or differing:
        one, other = getattr(a, name), getattr(b, name)
        if isinstance(one, dict) and isinstance(other, dict):
            same = {key for key, value in one.items() if key in other and other[key] == value}
            one, other = ({key: value for key, value in both.items() if key not in same} for both in (one, other))
        first.append(f"{name} {one!r}")
        second.append(f"{name} {other!r}")
    return "\n".join(first), "\n".join(second)


def draw_slots(blocks: Any, seqs: Mapping[str, Any], held: Mapping[int, tuple[int, ...]], has_free: bool) -> str:
    """Return a line for each block that is owned, with the tokens in its slots: `held[slot]` ends with the token.

    has_free: also draw free blocks that hold something, and say which blocks the prefix cache finds
    """
    cached = set(blocks.block_of_hash.values()) if has_free else set()
    lines = []
    for block_id in range(blocks.num_blocks):
        names = [name for name, seq in seqs.items() if block_id in seq.block_table]
        texts = [held.get(block_id * blocks.block_size + i) for i in range(blocks.block_size)]
        if names or (has_free and any(texts)):
            tokens = " ".join(f"{text[-1] if text else '.':>2}" for text in texts)
            state = " ".join(names) or "free"
            state += ", cached" if block_id in cached else ""
            lines.append(f"block {block_id}  [ {tokens} ]  {state}  (num_owners {blocks.num_owners[block_id]})")
    return "\n".join([*lines, "free   " + (" ".join(map(str, blocks.free)) or "none")])
