"""Chapter 5: a block table that grows with its sequence."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs import one_file
from labs.learn.drawing import compare_fields, draw_account
from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.given import subclass_of
from labs.learn.texts import Text, count

NEEDED = "self.num_blocks_for(len(seq.token_ids))"


class Grown(NamedTuple):
    """What `try_grow` returned, and the state after it."""

    result: Any
    tables: dict[str, list[int]]
    free: list[int]

    def compare(self, other: "Grown") -> tuple[str, str]:
        return compare_fields(self, other)


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
        yield Seen(label, Grown(is_placed, tables, list(blocks.free)), draw_account(blocks, seqs))
        if not is_placed:
            seq.token_ids.pop()


def describe(case: Any) -> Text:
    num_blocks, block_size, turns = case
    return Text(
        f"{count(num_blocks, 'block')} of {count(block_size, 'token')}. Sequences get a token in this order: "
        f"{' '.join(turns)}.",
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
            "and return False. `self.num_blocks_for(n)` is the number of blocks that n tokens need.\n\n"
            "Example: blocks of 2 tokens, free blocks [0, 1], block table [2]. A second token fits. A third one needs "
            "a\n"
            "block: the table becomes [2, 1], and the free blocks are [0].",
            "一个序列刚得到一个 token。如果它的块里没有空位，就从空闲块里再取一个（`self.free.pop()`），"
            "放到块表末尾。\n"
            "如果没有空闲块，什么都不要改，返回 False。`self.num_blocks_for(n)` 是 n 个 token 需要的块数。\n\n"
            "例：每块 2 个槽位，空闲块为 [0, 1]，块表为 [2]。第 2 个 token 放得下；第 3 个需要新块，块表变成 [2, 1]，"
            "空闲块变成 [0]。",
        ),
        names=("self.free (list)", "self.num_blocks_for(n)", "self.block_size", "seq.token_ids", "seq.block_table"),
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
        cases=lambda: st.tuples(
            st.sampled_from((3, 4, 2, 1)), st.sampled_from((2, 3, 4, 1)), st.text("ABC", min_size=1, max_size=10)
        ),
        describe=describe,
        mistakes=(
            Mistake(
                Text("A block too late", "晚了一个块"),
                Text(
                    "The new token is already in `token_ids`, so its slot must exist now: 4 tokens need one block of "
                    "4, and 5 need two.",
                    "新 token 已经在 `token_ids` 里，现在就要有它的槽位：每块 4 个槽位时，4 个 token 需要一块，5 "
                    "个需要两块。",
                ),
                ((NEEDED, "self.num_blocks_for(len(seq.token_ids) - 1)"),),
            ),
            Mistake(
                Text("A block too early", "早了一个块"),
                Text(
                    "A table takes a block when it has a token for it, not when the last block is full. "
                    "`len(seq.token_ids) // self.block_size + 1` also counts one block too many for 4 tokens in blocks "
                    "of 4.",
                    "有 token 要放时才取块，而不是上一个块满了就取。每块 4 个槽位、有 4 个 token 时，"
                    "`len(seq.token_ids) // self.block_size + 1` 也会多算一块。",
                ),
                ((NEEDED, "self.num_blocks_for(len(seq.token_ids) + 1)"),),
            ),
            Mistake(
                Text("A block although there is a slot", "有空位还取块"),
                Text(
                    "If the tokens need as many blocks as the table has, each token has its slot. Take a block only if "
                    "they need more: `>`, not `>=`.",
                    "如果需要的块数等于块表的长度，每个 token 都有位置。需要的更多时才取块：用 `>`，不用 `>=`。",
                ),
                ((f"{NEEDED} >", f"{NEEDED} >="),),
            ),
            Mistake(
                Text("A block when `len % block_size == 0`", "`len % block_size == 0` 时取块"),
                Text(
                    "The new token is already in `token_ids`. In blocks of 4, `len % block_size == 0` holds for token "
                    "number 4, which has just filled the last slot, and not for the first token, which needs a block. "
                    "`len // block_size` blocks mean the same: rounded down, a started block does not count. Compare "
                    "the number of blocks that the tokens need with the length of the table.",
                    "新 token 已经在 `token_ids` 里。每块 4 个槽位时，`len % block_size == 0` 对第 4 个 token 成立，"
                    "而它刚好占了最后一个空位；对需要块的第一个 token 却不成立。取 `len // block_size` 个块也是一样："
                    "向下取整，开了头的块没有算。应比较这些 token 需要的块数和块表的长度。",
                ),
                ((f"{NEEDED} > len(seq.block_table)", "len(seq.token_ids) % self.block_size == 0"),),
            ),
            Mistake(
                Text("A block when `len % block_size == 1`", "`len % block_size == 1` 时取块"),
                Text(
                    "This is nano-vllm's condition. It is right there, because its blocks have 256 slots. In blocks of "
                    "one slot, `len % 1` is never 1, and no token ever gets a block. `(len - 1) % block_size == 0` "
                    "means the same and is always right, and so is comparing the number of blocks that the tokens need "
                    "with the length of the table.",
                    "这是 nano-vllm 的条件。在那里是对的，因为它的每块有 256 个槽位。但每块只有一个槽位时，`len % 1` "
                    "永远不等于 1，任何 token 都得不到块。`(len - 1) % block_size == 0` 意思相同而且总是对的，"
                    "比较需要的块数和块表的长度也总是对的。",
                ),
                ((f"{NEEDED} > len(seq.block_table)", "len(seq.token_ids) % self.block_size == 1"),),
            ),
            Mistake(
                Text("A full pool is not noticed", "没有发现块已用完"),
                Text(
                    "If no block is free, the token has no slot: return False.",
                    "没有空闲块时，这个 token 没有位置：要返回 False。",
                ),
                (("                return False\n", "                return True\n"),),
            ),
            Mistake(
                Text("`pop` from an empty pool", "从空的块池里 `pop`"),
                Text(
                    "Look first whether a block is free. `self.free.pop()` raises IndexError if there is none, and the "
                    "engine stops for all users.",
                    "先看有没有空闲块。没有时，`self.free.pop()` 会抛出 IndexError，整个引擎就停了。",
                ),
                (("            if not self.free:\n                return False\n", ""),),
            ),
            Mistake(
                Text("A token with a slot is refused", "有位置的 token 被拒绝"),
                Text(
                    "A full pool matters only to a sequence that needs a block. If the last block has an empty slot, "
                    "return True.",
                    "只有需要新块的序列才会受块用完的影响。最后一块还有空位时，应返回 True。",
                ),
                (
                    (
                        f"        if {NEEDED}",
                        f"        if not self.free:\n            return False\n        if {NEEDED}",
                    ),
                ),
            ),
            Mistake(
                Text("False without a new block", "没有取块就返回 False"),
                Text(
                    "The result says whether the token has a slot, not whether a block was taken.",
                    "返回值表示这个 token 有没有位置，而不是有没有取块。",
                ),
                (("        return True", "            return True\n        return False"),),
            ),
            Mistake(
                Text("The block is still free", "取走的块还在空闲块里"),
                Text(
                    "`self.free[-1]` reads the block and leaves it in `self.free`. The next sequence gets the same "
                    "block, and both write to it. `pop()` also removes it.",
                    "`self.free[-1]` 只是读，块仍在 `self.free` 里。下一个序列会拿到同一个块，两个序列都往里写。"
                    "`pop()` 会把它取走。",
                ),
                (("self.free.pop()", "self.free[-1]"),),
            ),
            Mistake(
                Text("The block is at the beginning of the table", "新块放到了块表开头"),
                Text(
                    "Entry i of the table is for tokens i × block_size and following. A block at the beginning moves "
                    "all entries, and every token is looked for in another token's slot.",
                    "块表第 i 项存放从第 i × block_size 个开始的 token。放在开头会使所有项后移，"
                    "每个 token 都会去别的 token 的位置上找。",
                ),
                (("seq.block_table.append(self.free.pop())", "seq.block_table.insert(0, self.free.pop())"),),
            ),
            Mistake(
                Text("The first free block is taken", "取了第一个空闲块"),
                Text(
                    "`self.free.pop()` takes the block that became free last. `pop(0)` also moves all other "
                    "entries of the list.",
                    "`self.free.pop()` 取最后变为空闲的块。`pop(0)` 还要移动列表里的其他各项。",
                ),
                (("self.free.pop()", "self.free.pop(0)"),),
            ),
            Mistake(
                Text("The result is missing", "没有返回值"),
                Text(
                    "A function without `return` gives None, which counts as False: the caller believes that "
                    "the token has no slot.",
                    "没有 `return` 的函数返回 None，等于 False：调用者会以为这个 token 没有位置。",
                ),
                (("        return True\n", ""),),
            ),
            Mistake(
                Text("The old blocks are lost", "原来的块丢了"),
                Text(
                    "The new block continues the table; the blocks before it still hold the older tokens. "
                    "Append to the list.",
                    "新块接在块表后面，前面的块里还有更早的 token。应该追加到列表里。",
                ),
                (("seq.block_table.append(self.free.pop())", "seq.block_table = [self.free.pop()]"),),
            ),
            Mistake(
                Text("The token is removed", "删掉了 token"),
                Text(
                    "If no block is free, change nothing and return False. The caller decides what happens "
                    "to the token.",
                    "没有空闲块时什么都不要改，返回 False。这个 token 怎么办由调用者决定。",
                ),
                (
                    (
                        "                return False\n",
                        "                seq.token_ids.pop()\n                return False\n",
                    ),
                ),
            ),
        ),
    ),
)
