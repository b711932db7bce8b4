"""Chapter 5: a block table that grows with its sequence."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hypothesis import strategies as st

from nanovllm.extras.learn.drawing import draw_pool
from nanovllm.extras.learn.exercise import Build, Mistake, Seen
from nanovllm.extras.learn.given import one_file, subclass_of
from nanovllm.extras.learn.texts import Text


def run(answer: ModuleType, case: Any) -> Iterator[Seen]:
    """Let sequences grow by one token at a time, in the order of `turns`."""
    num_blocks, block_size, turns = case
    blocks = answer.Blocks(num_blocks, block_size)
    seqs = {name: one_file.Sequence([], 0, 1) for name in "ABC"}
    for name in turns:
        seq = seqs[name]
        seq.token_ids.append(len(seq.token_ids))
        is_placed = blocks.try_grow(seq)
        label = Text(f"{name} gets token {len(seq.token_ids) - 1}", f"{name} 得到第 {len(seq.token_ids) - 1} 个 token")
        tables = {name: list(seq.block_table) for name, seq in seqs.items() if seq.block_table}
        yield Seen(label, (is_placed, tables, list(blocks.free)), draw_pool(blocks, seqs))
        if not is_placed:
            seq.token_ids.pop()


def describe(case: Any) -> Text:
    num_blocks, block_size, turns = case
    return Text(
        f"{num_blocks} blocks of {block_size} tokens. Sequences get a token in this order: {' '.join(turns)}.",
        f"{num_blocks} 个块，每块 {block_size} 个 token。依次得到一个 token 的序列：{' '.join(turns)}。",
    )


EXERCISES = (
    Build(
        name="grow_table",
        chapter="05_blocks_and_tables",
        title=Text("A block table that grows", "会增长的块表"),
        task=Text(
            "A sequence has just got a token. If its blocks have no slot for it, take one more block from the free\n"
            "blocks (`self.free.pop()`), and put it at the end of the block table. If no block is free, change "
            "nothing\n"
            "and return False. `self.num_blocks_for(n)` is the number of blocks that n tokens need.",
            "一个序列刚得到一个 token。如果它的块里没有空位，就从空闲块里再取一个（`self.free.pop()`），"
            "放到块表末尾。\n"
            "如果没有空闲块，什么都不要改，返回 False。`self.num_blocks_for(n)` 是 n 个 token 需要的块数。",
        ),
        hints=(
            Text(
                "Compare the number of blocks that the tokens need with the length of the block table.",
                "比较这些 token 需要的块数和块表的长度。",
            ),
            Text(
                "There are three cases: there is a slot; there is none but a free block; there is neither.",
                "有三种情况：有空位；没有空位但有空闲块；两者都没有。",
            ),
            Text(
                "`if self.num_blocks_for(len(seq.token_ids)) > len(seq.block_table):` is the first line.",
                "第一行是 `if self.num_blocks_for(len(seq.token_ids)) > len(seq.block_table):`。",
            ),
        ),
        answer=subclass_of("on_demand", "BlockManager", "Blocks", ("try_grow",), ("Sequence",)),
        holes=("Blocks.try_grow",),
        run=run,
        examples=((2, 2, "AAAAA"), (3, 2, "ABABAB"), (1, 1, "AB"), (3, 4, "AAAABBBBA")),
        cases=lambda: st.tuples(st.integers(1, 4), st.integers(1, 4), st.text("ABC", min_size=1, max_size=10)),
        describe=describe,
        mistakes=(
            Mistake(
                Text("A block too late", "晚了一个块"),
                Text(
                    "The new token is already in `token_ids`: its slot must exist now. With `>`, 4 tokens in blocks of "
                    "4 need one block, and 5 need two.",
                    "新 token 已经在 `token_ids` 里：现在就要有它的位置。4 个 token 需要一个 4 格的块，5 个需要两个。",
                ),
                (("self.num_blocks_for(len(seq.token_ids))", "self.num_blocks_for(len(seq.token_ids) - 1)"),),
            ),
            Mistake(
                Text("A block too early", "早了一个块"),
                Text(
                    "A table takes a block when it has a token for it, not when the last block is full.",
                    "有 token 要放时才取块，而不是上一个块满了就取。",
                ),
                (("self.num_blocks_for(len(seq.token_ids))", "self.num_blocks_for(len(seq.token_ids) + 1)"),),
            ),
            Mistake(
                Text("A full pool is not noticed", "没有发现块已用完"),
                Text("If no block is free, return False.", "没有空闲块时要返回 False。"),
                (("                return False\n", "                return True\n"),),
            ),
        ),
    ),
)
