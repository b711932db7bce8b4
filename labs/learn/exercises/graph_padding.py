"""Chapter 11: a batch of decodes is padded to the next recorded graph size."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.texts import Text

MAX_BLOCKS = 3  # of a sequence
BLOCK_SIZE = 2
GARBAGE = 99  # what a row stores that attends to no token: a deep layer's K and V depend on what it read

SOLUTION = '''
from bisect import bisect_left

import torch


class Graphs:
    """Graphs of decode steps, one for each of `sizes` rows. They read their inputs from buffers at fixed addresses."""

    def __init__(self, sizes, max_num_blocks, record):
        self.sizes = sizes  # ascending
        self.input_ids = torch.zeros(sizes[-1], dtype=torch.int64)
        self.slot_mapping = torch.zeros(sizes[-1], dtype=torch.int64)
        self.seq_lens = torch.zeros(sizes[-1], dtype=torch.int64)
        self.block_tables = torch.zeros(sizes[-1], max_num_blocks, dtype=torch.int64)
        buffers = self.input_ids, self.slot_mapping, self.seq_lens, self.block_tables
        self.graphs = {size: record(size, *buffers) for size in sizes}

    def replay(self, input_ids, slot_mapping, seq_lens, block_tables):
        """Compute a step of decodes -> [num_decodes]. The inputs have a row for each; block_tables may be narrower."""
        n, width = block_tables.shape
        size = self.sizes[bisect_left(self.sizes, n)]
        self.input_ids[:n] = input_ids
        self.slot_mapping[:n] = slot_mapping
        self.seq_lens[:n] = seq_lens
        self.block_tables[:n, :width] = block_tables
        self.slot_mapping[n:size] = 0
        self.seq_lens[n:size] = 0
        return self.graphs[size]()[:n]
'''


class Replay(NamedTuple):
    """What a step has done."""

    size: int
    """Rows of the graph that was replayed."""
    results: tuple[int, ...]
    damage: tuple[Text, ...]
    """Slots that rows of padding, or rows at a wrong place, have overwritten or read."""
    cache: tuple[int, ...]
    """What is in the slots, without the null block."""

    def __repr__(self) -> str:
        return f"size={self.size} results={list(self.results)}"


class Device:
    """A cache of tokens, and graphs that store and read as decodes do. A result is the sum of the tokens read."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = [0] * (num_blocks * BLOCK_SIZE)
        self.owners: dict[int, str] = {}  # slot -> the token that belongs there: "B[2]"
        self.batch: list[str] = []  # of the step that runs
        self.replayed: list[int] = []
        self.damage: list[Text] = []

    def record(self, size: int, *buffers: torch.Tensor) -> Any:
        return lambda: self.replay(size, *buffers)

    def replay(self, size: int, *buffers: torch.Tensor) -> torch.Tensor:
        self.replayed.append(size)
        input_ids, slot_mapping, seq_lens, block_tables = (buffer.tolist() for buffer in buffers)
        for row in range(size):
            slot = slot_mapping[row] % len(self.cache)
            owner = self.owners.get(slot, "")
            if slot and owner.split("[")[0] != self.name_of(row):
                en = f"Row {row} ({self.name_of(row)}) overwrote slot {slot} ({owner or 'free'})"
                self.damage.append(
                    Text(en, f"第 {row} 行（{self.name_of(row)}）覆盖了 {slot} 号槽位（{owner or '空闲'}）")
                )
            self.cache[slot] = input_ids[row] if seq_lens[row] else GARBAGE
        results = []
        for row in range(size):
            num_tokens, blocks = seq_lens[row], block_tables[row]
            if num_tokens and row >= len(self.batch):
                en = f"Row {row} (padding) read {num_tokens} tokens through the block table {blocks}"
                self.damage.append(Text(en, f"第 {row} 行（padding）通过块表 {blocks} 读了 {num_tokens} 个 token"))
            slots = [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(num_tokens)]
            results.append(sum([self.cache[slot] for slot in slots]))
        return torch.tensor(results)

    def name_of(self, row: int) -> str:
        return self.batch[row] if row < len(self.batch) else "padding"


def run(answer: ModuleType, case: Any) -> Iterator[Seen]:
    """Run decode steps. Each is a set of sequences; a sequence gets one token more in each of its steps."""
    sizes, batches = case
    names = sorted({name for batch in batches for name in batch})
    device = Device(1 + MAX_BLOCKS * len(names))
    graphs = answer.Graphs(list(sizes), MAX_BLOCKS, device.record)
    tables = {name: [1 + i + j * len(names) for j in range(MAX_BLOCKS)] for i, name in enumerate(names)}
    lens = dict.fromkeys(names, 0)
    for number, batch in enumerate(batches, 1):
        rows = [(10 * (names.index(name) + 1) + lens[name], tables[name], lens[name]) for name in batch]
        for name in batch:
            slot = tables[name][lens[name] // BLOCK_SIZE] * BLOCK_SIZE + lens[name] % BLOCK_SIZE
            device.owners[slot] = f"{name}[{lens[name]}]"
            lens[name] += 1
        device.batch, device.replayed, device.damage = list(batch), [], []
        results = graphs.replay(*make_inputs(rows))
        size = device.replayed[-1] if device.replayed else 0
        value = Replay(size, tuple(map(int, results)), tuple(device.damage), tuple(device.cache[BLOCK_SIZE:]))
        label = Text(f"step {number}: {' '.join(batch)}", f"第 {number} 步：{' '.join(batch)}")
        yield Seen(label, value, draw_cache(device.cache, tables))


def make_inputs(rows: list[tuple[int, list[int], int]]) -> list[torch.Tensor]:
    """Return input_ids, slot_mapping, seq_lens, block_tables of (token, block table, tokens before it)."""
    width = max(num // BLOCK_SIZE + 1 for _, _, num in rows)
    slots = [table[num // BLOCK_SIZE] * BLOCK_SIZE + num % BLOCK_SIZE for _, table, num in rows]
    tables = [
        [block if i <= num // BLOCK_SIZE else 0 for i, block in enumerate(table[:width])] for _, table, num in rows
    ]
    columns = [[token for token, _, _ in rows], slots, [num + 1 for _, _, num in rows], tables]
    return [torch.tensor(column) for column in columns]


def draw_cache(cache: list[int], tables: dict[str, list[int]]) -> str:
    """Return lines: the tokens in each block, and whose block it is."""
    blocks = [cache[i : i + BLOCK_SIZE] for i in range(0, len(cache), BLOCK_SIZE)]
    owners = {block: name for name, table in tables.items() for block in table}
    lines = [
        f"block {i:2} {owners.get(i, 'null'):>4}   {' '.join(f'{token:3}' for token in block)}"
        for i, block in enumerate(blocks)
    ]
    return "\n".join(line for line, block in zip(lines, blocks, strict=True) if any(block))


def draw_damage(case: Any, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Say what rows of padding have overwritten or read."""
    if yours is None or not isinstance(yours.value, Replay):
        return []
    return [(note, "") for note in yours.value.damage[:2]]


def describe(case: Any) -> Text:
    sizes, batches = case
    steps = " | ".join(" ".join(batch) for batch in batches)
    return Text(
        f"Graphs of {', '.join(map(str, sizes))} rows, blocks of {BLOCK_SIZE} tokens. The sequences of the steps: "
        f"{steps}. "
        f"Token i of A is 10 + i, of B 20 + i, and so on. A row of length 0 stores {GARBAGE}.",
        f"录制了 {'、'.join(map(str, sizes))} 行的 graph，每块 {BLOCK_SIZE} 个 token。各步的序列：{steps}。"
        f"A 的第 i 个 token 是 10 + i，B 的是 20 + i，依此类推。长度为 0 的行存入 {GARBAGE}。",
    )


@st.composite
def cases(draw: Any) -> Any:
    batch = st.lists(st.sampled_from("ABCD"), min_size=1, max_size=4, unique=True).map(tuple)
    batches = draw(st.lists(batch, min_size=1, max_size=MAX_BLOCKS * BLOCK_SIZE).map(tuple))
    sizes = draw(st.sampled_from([(4,), (2, 4), (1, 4), (1, 2, 4), (1, 2, 4, 8)]))
    return sizes, batches


EXERCISES = (
    Build(
        name="graph_padding",
        chapter="11_making_it_fast",
        title=Text("Pad a batch to a recorded graph", "把 batch 填充到录制过的大小"),
        task=Text(
            "CUDA graphs were recorded for some batch sizes, for example 1, 2, 4 and 8 rows. A graph reads its\n"
            "inputs from buffers whose addresses are part of the recording. Write `replay`: choose the smallest\n"
            "recorded size that is not smaller than the batch, copy the inputs into the first rows of the buffers,\n"
            "and make the other rows of this graph *padding*. Then run `self.graphs[size]()`, which returns a\n"
            "result for each of its rows, and return those of the batch.\n\n"
            "Each row writes its K and V to slot `slot_mapping[row]`, then reads `seq_lens[row]` tokens through\n"
            "`block_tables[row]`. A row of padding must neither overwrite nor read a sequence: its slot is 0, in\n"
            "the null block, which belongs to nobody, and its length is 0. The buffers still have the rows of the\n"
            "step before.\n\n"
            "    3 decodes, sizes [1, 2, 4, 8]: the graph of 4; slot_mapping [9, 14, 2, 0], seq_lens [4, 7, 1, 0]",
            "已经为若干种 batch 大小录制了 CUDA graph，例如 1、2、4、8 行。graph 从缓冲区读输入，缓冲区的地址是录\n"
            "制内容的一部分。请写 `replay`：选不小于 batch 的最小的录制大小，把输入复制到缓冲区的前几行，把这个\n"
            "graph 的其余行变成**填充**（padding）。然后运行 `self.graphs[size]()`，它为每一行返回一个结果；返回属\n"
            "于 batch 的那些。\n\n"
            "每一行先把自己的 K 和 V 写到槽位 `slot_mapping[row]`，再通过 `block_tables[row]` 读 `seq_lens[row]`\n"
            "个 token。填充行既不能覆盖、也不能读取任何序列：它的槽位是 0，在不属于任何序列的占位块里；它的长度\n"
            "是 0。注意：缓冲区里还留着上一步的行。\n\n"
            "    3 个解码，大小 [1, 2, 4, 8]：用 4 行的 graph；slot_mapping [9, 14, 2, 0]，seq_lens [4, 7, 1, 0]",
        ),
        hints=(
            Text(
                "`bisect_left(self.sizes, n)` is the index of the first size that is at least n.",
                "`bisect_left(self.sizes, n)` 是第一个不小于 n 的大小的下标。",
            ),
            Text(
                "Assign to slices, `self.input_ids[:n] = input_ids`: this copies into the buffer. `self.input_ids = "
                "input_ids` would only give another tensor the name.",
                "对切片赋值，`self.input_ids[:n] = input_ids`，才是复制到缓冲区里。`self.input_ids = input_ids` "
                "只是让这个名字指向另一个张量。",
            ),
            Text(
                "Padding: `self.slot_mapping[n:size] = 0` and `self.seq_lens[n:size] = 0`. At the end: "
                "`return self.graphs[size]()[:n]`.",
                "填充：`self.slot_mapping[n:size] = 0` 和 `self.seq_lens[n:size] = 0`。最后："
                "`return self.graphs[size]()[:n]`。",
            ),
        ),
        answer=SOLUTION,
        holes=("Graphs.replay",),
        run=run,
        examples=(
            ((1, 2, 4), ("ABC", "ABC", "AC", "A", "AB")),
            ((4,), ("ABCD", "AB", "BA", "CBA")),
            ((2, 4), ("A", "AB", "ABC", "ABCD")),
            ((1, 2, 4, 8), ("ABCD", "DCB")),
        ),
        cases=cases,
        describe=describe,
        draw=draw_damage,
        mistakes=(
            Mistake(
                Text("Padding overwrites a sequence", "填充行覆盖了别的序列"),
                Text(
                    "Rows behind the batch still have the slots of the step before. The graph writes there too, and "
                    "destroys K and V of a sequence. Set the slots of padding to 0, in the null block.",
                    "batch 后面的行还留着上一步的槽位。graph 也会往那里写，毁掉某个序列的 K 和 V。"
                    "要把填充行的槽位设为 0，即占位块里的位置。",
                ),
                (("        self.slot_mapping[n:size] = 0\n", ""),),
            ),
            Mistake(
                Text("Padding reads a sequence", "填充行读取了别的序列"),
                Text(
                    "Rows behind the batch still have the lengths of the step before, so the graph reads that many "
                    "tokens for nothing, through an old block table. The length of padding is 0.",
                    "batch 后面的行还留着上一步的长度，graph 会按旧的块表白白读那么多 token。填充行的长度应为 0。",
                ),
                (("        self.seq_lens[n:size] = 0\n", ""),),
            ),
            Mistake(
                Text("Slot -1 is the last slot", "槽位 -1 是最后一个槽位"),
                Text(
                    "Some kernels skip rows with the slot -1, but these graphs do not: as an index, -1 is the last "
                    "slot "
                    "of the cache, which belongs to a sequence. Use slot 0, in the null block.",
                    "有些 kernel 会跳过槽位为 -1 的行，这里的 graph 不会：作为下标，-1 是缓存的最后一个槽位，"
                    "它属于某个序列。"
                    "应该用占位块里的 0 号槽位。",
                ),
                (("self.slot_mapping[n:size] = 0", "self.slot_mapping[n:size] = -1"),),
            ),
            Mistake(
                Text("Results of padding are returned", "返回了填充行的结果"),
                Text(
                    "The graph returns a result for each of its rows. Return only those of the batch, the first n.",
                    "graph 为每一行都返回结果。只返回属于 batch 的前 n 个。",
                ),
                (("self.graphs[size]()[:n]", "self.graphs[size]()"),),
            ),
            Mistake(
                Text("A graph that is too small", "选的 graph 太小"),
                Text(
                    "The graph must have at least as many rows as the batch; the last sequences are not computed "
                    "otherwise. Choose the smallest size that is not smaller than n.",
                    "graph 的行数至少要和 batch 一样多，否则最后几个序列没有计算。要选不小于 n 的最小的大小。",
                ),
                (
                    (
                        "self.sizes[bisect_left(self.sizes, n)]",
                        "[one for one in self.sizes if one <= n or one == self.sizes[0]][-1]",
                    ),
                ),
            ),
            Mistake(
                Text("A size that fits exactly is skipped", "跳过了恰好合适的大小"),
                Text(
                    "A batch of 4 fits the graph of 4. With `bisect_right`, or with `size > n`, it gets the graph of "
                    "8, "
                    "and the largest batch gets none.",
                    "大小为 4 的 batch 正好用 4 行的 graph。用 `bisect_right` 或 `size > n`，它会用 8 行的 graph，"
                    "最大的 batch 则找不到 graph。",
                ),
                (("self.sizes[bisect_left(self.sizes, n)]", "[one for one in self.sizes if one > n][0]"),),
            ),
            Mistake(
                Text("Always the largest graph", "总是用最大的 graph"),
                Text(
                    "The results are right, but one decode computes as many rows as the largest batch. Choose the "
                    "smallest size that fits.",
                    "结果是对的，但一个解码也要计算最大 batch 那么多行。应该选放得下的最小的大小。",
                ),
                (("self.sizes[bisect_left(self.sizes, n)]", "self.sizes[-1]"),),
            ),
            Mistake(
                Text("The graph does not see the new tensor", "graph 看不到新的张量"),
                Text(
                    "The addresses of the buffers are part of the recording. An assignment to `self.input_ids` changes "
                    "the name, not the buffer: the graph still reads the old tokens. Copy into it: "
                    "`self.input_ids[:n] = …`.",
                    "缓冲区的地址是录制内容的一部分。给 `self.input_ids` 赋值只改变名字，不改变缓冲区：graph "
                    "读到的仍是旧的 "
                    "token。要复制进去：`self.input_ids[:n] = …`。",
                ),
                (("self.input_ids[:n] = input_ids", "self.input_ids = input_ids"),),
            ),
        ),
    ),
)
