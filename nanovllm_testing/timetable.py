"""The steps of a run as a table: which tokens of each sequence a step computes, who waits, and who is preempted.

    step      A      B   free   waiting
       1   0…5+    0…1      0
       2     6+              0   B           preempts B

The cells are the positions of the computed tokens. A plus says that the sequence gets a new token.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Step
from nanovllm.sequence import Sequence
from nanovllm_testing.fake_kv_cache import table_of

MAX_ROWS = 16  # the last ones


@dataclass
class Row:
    """One step: its chunks, and the state after it was scheduled."""

    cells: dict[str, str] = field(default_factory=dict)
    num_free: int = 0
    waiting: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def label(seq: Sequence) -> str:
    """Return the name of a sequence: A, or A.1 for its second sample."""
    return f"{seq.request_id}.{seq.sample_index}" if seq.sample_index else seq.request_id


def make_row(step: Step, waiting: Iterable[Sequence], blocks: BlockManager) -> Row:
    """Return the row of a step that is scheduled."""
    sampled = set(map(id, step.samples))
    cells = {label(seq): draw_chunk(start, num_new) + "+" * (id(seq) in sampled) for seq, start, num_new in step.chunks}
    for seq in step.samples:
        cells.setdefault(label(seq), "+")  # a sample that begins with its parent's token
    notes = [f"preempts {', '.join(label(seq) for seq in step.preempted)}"] if step.preempted else []
    notes += [f"copies block {', '.join(f'{a} to {b}' for a, b in step.copies)}"] if step.copies else []
    return Row(cells, blocks.num_free_blocks, [label(seq) for seq in waiting], notes)


def draw_chunk(start: int, num_new: int) -> str:
    if num_new < 1:
        return f"{num_new} tokens"
    return str(start) if num_new == 1 else f"{start}…{start + num_new - 1}"


def draw_timetable(rows: list[Row]) -> list[str]:
    """Return the lines of a table of the last steps."""
    names = sorted({name for row in rows for name in (*row.cells, *row.waiting)})
    lines = [["step", *names, "free", "waiting", ""]]
    first = max(0, len(rows) - MAX_ROWS)
    for i, row in enumerate(rows[first:], first + 1):
        cells = [row.cells.get(name, "") for name in names]
        lines.append([str(i), *cells, str(row.num_free), " ".join(row.waiting), "; ".join(row.notes)])
    drawn = draw_columns(lines)
    return [*drawn[:1], f"(the first {first} steps are left out)", *drawn[1:]] if first else drawn


def draw_columns(lines: list[list[str]]) -> list[str]:
    """Align the columns: all but the last two to the right."""
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    drawn = []
    for line in lines:
        cells = list(zip(line, widths, strict=True))
        right = [cell.rjust(width) for cell, width in cells[:-2]]
        left = [cell.ljust(width) for cell, width in cells[-2:]]
        drawn.append("   ".join([*right, *left]).rstrip())
    return drawn


def draw_state(seqs: Iterable[Sequence]) -> list[str]:
    """Return a line for each sequence that has blocks: its block table, and its tokens."""
    return [
        f"{label(seq)}: block table {table_of(seq)}, {seq.num_computed_tokens} of {seq.num_tokens} tokens computed"
        for seq in seqs
        if len(seq.block_table)
    ]
