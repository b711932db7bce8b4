"""Chapter 5: a waiting sequence gets all of its blocks, or none."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs import one_file
from labs.learn.drawing import compare_fields, draw_account
from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.given import subclass_of
from labs.learn.texts import Text, count


class Admitted(NamedTuple):
    """What `try_admit` returned, and the state after it."""

    result: Any
    free: list[int]
    tables: dict[str, list[int]]
    num_computed_tokens: int

    def compare(self, other: "Admitted") -> tuple[str, str]:
        return compare_fields(self, other)


class Arrivals(NamedTuple):
    """A case: sequences that come one after another. A sequence with an output has run before, and lost its blocks."""

    num_blocks: int
    block_size: int
    seqs: tuple[tuple[int, int], ...]
    """(tokens of the prompt, tokens of the output so far) of A, B, …"""


def run(answer: ModuleType, case: Arrivals) -> Iterator[Seen]:
    """Admit the sequences in turn. If one does not fit, the oldest ends, and the sequence is tried once more."""
    blocks = answer.Blocks(case.num_blocks, case.block_size)
    seqs: dict[str, Any] = {}
    for name, (prompt, output) in zip("ABCDE", case.seqs, strict=False):
        seq = seqs[name] = one_file.Sequence([0] * (prompt + output), prompt, output + 3)
        seq.num_computed_tokens = max(0, prompt + output - 1) if output else 0  # before it lost its blocks
        for _ in range(2):
            result = blocks.try_admit(seq)
            label = Text(
                f"try_admit({name}), which has {count(prompt + output, 'token')}",
                f"try_admit({name})，它有 {prompt + output} 个 token",
            )
            tables = {name: list(seq.block_table) for name, seq in seqs.items() if seq.block_table}
            value = Admitted(result, list(blocks.free), tables, seq.num_computed_tokens)
            yield Seen(label, value, draw_account(blocks, seqs))
            oldest = next((one for one in seqs.values() if one is not seq and one.block_table), None)
            if result or oldest is None:
                break
            blocks.release(oldest)


def describe(case: Arrivals) -> Text:
    en = [f"{count(case.num_blocks, 'block')} of {count(case.block_size, 'token')}."]
    zh = [f"{case.num_blocks} 个块，每块 {case.block_size} 个 token。"]
    for name, (prompt, output) in zip("ABCDE", case.seqs, strict=False):
        more, more_zh = (f" and {output} of output", f"，输出 {output} 个") if output else ("", "")
        en.append(f"{name} has {count(prompt, 'token')} of prompt{more}.")
        zh.append(f"{name} 的提示词有 {prompt} 个 token{more_zh}。")
    return Text(" ".join(en), "".join(zh))


NEEDED = "        num_new = self.num_blocks_for(len(seq.token_ids))\n"
CHECK = "        if num_new > len(self.free):\n            return False\n"
TAKE = "        seq.block_table = [self.free.pop() for _ in range(num_new)]\n"
ONE_BY_ONE = """        table = []
        for _ in range(num_new):
            if not self.free:
                return False
            table.append(self.free.pop())
        seq.block_table = table
"""

EXERCISES = (
    Build(
        name="admit_whole",
        chapter="05_blocks_and_tables",
        title=Text("All blocks or none", "要么全给，要么不给"),
        task=Text(
            "A sequence waits. Admit it if enough blocks are free for all of its tokens (prompt and output: it may "
            "have\n"
            "run before, and lost its blocks). Then put as many blocks as its tokens need into `seq.block_table`, set\n"
            "`seq.num_computed_tokens` to 0, and return True. If too few blocks are free, change nothing, and return\n"
            "False. `self.free` is a list: take blocks from its end, with `pop()`. `self.num_blocks_for(n)` is the\n"
            "number of blocks that n tokens need.\n\n"
            "Example: blocks of 4 tokens, free blocks [0, 1, 2]. A sequence of 9 tokens gets the table [2, 1, 0]. For "
            "a\n"
            "sequence of 13 tokens the result is False, and the free blocks are still [0, 1, 2].",
            "一个序列在等待。如果空闲块放得下它的全部 token（提示词和输出：它可能运行过，后来失去了块），就接纳它："
            "按需要的块数\n"
            "填好 `seq.block_table`，把 `seq.num_computed_tokens` 设为 0，返回 True。空闲块不够时，什么都不要改，返回 "
            "False。\n"
            "`self.free` 是一个列表：用 `pop()` 从末尾取块。`self.num_blocks_for(n)` 是 n 个 token 需要的块数。\n\n"
            "例：每块 4 个槽位，空闲块为 [0, 1, 2]。9 个 token 的序列得到块表 [2, 1, 0]。13 个 token 的序列得到 "
            "False，\n"
            "空闲块仍是 [0, 1, 2]。",
        ),
        names=(
            "self.free (list)",
            "self.num_blocks_for(n)",
            "self.block_size",
            "seq.token_ids",
            "seq.num_computed_tokens",
            "seq.block_table",
        ),
        hints=(
            Text(
                "First compare: how many blocks are needed, and how many are free? Take blocks only after that.",
                "先比较：需要几块，有几块空闲？然后才取块。",
            ),
            Text(
                "`num_new = self.num_blocks_for(len(seq.token_ids))`. If it is larger than `len(self.free)`, return "
                "False.",
                "`num_new = self.num_blocks_for(len(seq.token_ids))`。如果它大于 `len(self.free)`，返回 False。",
            ),
            Text(
                "`seq.block_table = [self.free.pop() for _ in range(num_new)]` takes the blocks.",
                "`seq.block_table = [self.free.pop() for _ in range(num_new)]` 一次取出这些块。",
            ),
        ),
        answer=subclass_of("on_demand", "BlockManager", "Blocks", ("try_admit",), ("Sequence",)),
        holes=("Blocks.try_admit",),
        run=run,
        examples=(
            Arrivals(3, 4, ((9, 0), (4, 0))),
            Arrivals(3, 4, ((13, 0), (5, 0), (8, 0))),
            Arrivals(4, 2, ((3, 2), (2, 0), (1, 3))),
            Arrivals(3, 2, ((4, 0), (2, 1))),
            Arrivals(7, 4, ((5, 0), (2, 0))),
        ),
        cases=lambda: st.builds(
            Arrivals,
            st.sampled_from((3, 4, 2, 1)),
            st.sampled_from((2, 3, 4, 1)),
            st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=4).map(tuple),
        ),
        describe=describe,
        mistakes=(
            Mistake(
                Text("Some blocks are taken although the sequence does not fit", "放不下，却已取走一些块"),
                Text(
                    "The loop takes blocks until none is left, and then returns False. No table has these blocks, and "
                    "they are not free either: they are lost. Compare the numbers first.",
                    "循环取块，取到一个不剩才返回 False。这些块不在任何块表里，也不空闲，就这样丢了。应当先比较数目。",
                ),
                ((CHECK + TAKE, ONE_BY_ONE),),
            ),
            Mistake(
                Text("A sequence that waits keeps some blocks", "等待中的序列占着一些块"),
                Text(
                    "The sequence does not run, but its blocks are not free for others. Two such sequences can wait "
                    "for each other for ever.",
                    "这个序列没有运行，别的序列却用不了它的块。两个这样的序列可能永远互相等待。",
                ),
                ((CHECK + TAKE, ONE_BY_ONE.replace("table = []", "table = seq.block_table = []")),),
            ),
            Mistake(
                Text("The last free block is never used", "最后一个空闲块永远用不上"),
                Text(
                    "If exactly as many blocks are free as the sequence needs, it fits: `>`, not `>=`. With `>=`, a "
                    "request that needs the whole pool waits for ever.",
                    "空闲块数正好等于需要的块数时，放得下：用 `>`，不用 `>=`。用 `>=`，"
                    "需要整个块池的请求会永远等下去。",
                ),
                (("num_new > len(self.free)", "num_new >= len(self.free)"),),
            ),
            Mistake(
                Text("Tokens are compared with blocks", "拿 token 数和块数比较"),
                Text(
                    "`len(self.free)` counts blocks. A sequence of 9 tokens needs 3 blocks of 4, not 9.",
                    "`len(self.free)` 数的是块。每块 4 个槽位时，9 个 token 的序列需要 3 块，不是 9 块。",
                ),
                (("num_new > len(self.free)", "len(seq.token_ids) > len(self.free)"),),
            ),
            Mistake(
                Text("The number of blocks is rounded down", "块数向下取整"),
                Text(
                    "`len(seq.token_ids) // self.block_size` leaves out the tokens of the last, partly filled block: 9 "
                    "tokens need 3 blocks of 4, and 9 // 4 is 2.",
                    "`len(seq.token_ids) // self.block_size` 漏掉了没填满的最后一块：每块 4 个槽位时，"
                    "9 个 token 需要 3 块，而 9 // 4 等于 2。",
                ),
                ((NEEDED, "        num_new = len(seq.token_ids) // self.block_size\n"),),
            ),
            Mistake(
                Text("Only the prompt is counted", "只算了提示词"),
                Text(
                    "A sequence that has run before and lost its blocks has an output, too. K and V of all its tokens "
                    "are computed again, "
                    "so all of them need a slot.",
                    "运行过、后来失去了块的序列还有输出。它的全部 token 的 K 和 V 都要重新计算，所以每个 token "
                    "都要有槽位。",
                ),
                ((NEEDED, "        num_new = self.num_blocks_for(seq.num_prompt_tokens)\n"),),
            ),
            Mistake(
                Text("Blocks for the whole future answer", "连将来的输出也预留了"),
                Text(
                    "Admission counts only the tokens that the sequence has now. Blocks for `max_tokens` would be "
                    "empty for a long time, and fewer sequences would run.",
                    "接纳时只算序列现有的 token。按 `max_tokens` 预留的块会空很久，能同时运行的序列就少了。",
                ),
                ((NEEDED, "        num_new = self.num_blocks_for(seq.num_prompt_tokens + seq.max_tokens)\n"),),
            ),
            Mistake(
                Text("`num_computed_tokens` is not reset", "`num_computed_tokens` 没有归零"),
                Text(
                    "The new blocks are empty. If `num_computed_tokens` still counts tokens whose blocks were "
                    "lost, their K and V are never computed, and the sequence reads what is left in the blocks.",
                    "新块是空的。如果 `num_computed_tokens` 还是失去块之前的数，这些 token 的 K 和 V 就不会再算，"
                    "序列读到的是块里残留的内容。",
                ),
                (("        seq.num_computed_tokens = 0\n", ""),),
            ),
            Mistake(
                Text("A refused sequence is changed", "拒绝的序列也改了"),
                Text(
                    "If the result is False, nothing has changed. Set `num_computed_tokens` to 0 only after the "
                    "comparison.",
                    "返回 False 时，什么都不能改。比较之后才把 `num_computed_tokens` 设为 0。",
                ),
                ((NEEDED, "        seq.num_computed_tokens = 0\n" + NEEDED),),
            ),
            Mistake(
                Text("The blocks are in the order of `free`", "块按 `free` 里的顺序排列"),
                Text(
                    "The last free block is taken first, as by `pop()`, so it is the first one of the table: the "
                    "example asks for [2, 1, 0]. A slice such as `self.free[-n:]` keeps the order of the list.",
                    "最后一个空闲块最先取走（和 `pop()` 一样），所以它是块表里的第一块：例子要求 [2, 1, 0]。"
                    "`self.free[-n:]` 这样的切片保持列表的顺序。",
                ),
                (
                    (
                        TAKE,
                        "        seq.block_table = self.free[len(self.free) - num_new :]\n"
                        "        del self.free[len(self.free) - num_new :]\n",
                    ),
                ),
            ),
            Mistake(
                Text("Too few free blocks are not noticed", "没有发现空闲块不够"),
                Text(
                    "`pop` from an empty list raises IndexError: the engine stops, with blocks that are already taken.",
                    "对空列表 `pop` 会抛出 IndexError：引擎停了，而且有些块已经被取走。",
                ),
                ((CHECK, ""),),
            ),
            Mistake(
                Text("One block too many", "多了一个块"),
                Text(
                    "`len // block_size + 1` counts one block too many if the last block is full. Round up: "
                    "`self.num_blocks_for(n)`.",
                    "最后一块刚好填满时，`len // block_size + 1` 会多算一块。应向上取整：`self.num_blocks_for(n)`。",
                ),
                (
                    (
                        "        num_new = self.num_blocks_for(len(seq.token_ids))\n",
                        "        num_new = len(seq.token_ids) // self.block_size + 1\n",
                    ),
                ),
            ),
            Mistake(
                Text("A block for each token", "每个 token 一个块"),
                Text(
                    "A block has `block_size` slots. `self.num_blocks_for(n)` is the number of blocks for n tokens.",
                    "一个块有 `block_size` 个槽位。`self.num_blocks_for(n)` 是 n 个 token 需要的块数。",
                ),
                (
                    (
                        "        num_new = self.num_blocks_for(len(seq.token_ids))\n",
                        "        num_new = len(seq.token_ids)\n",
                    ),
                ),
            ),
            Mistake(
                Text("Computed tokens get no blocks", "已计算的 token 没有块"),
                Text(
                    "A preempted sequence has lost its blocks, whatever `num_computed_tokens` still says. "
                    "All of its tokens need slots.",
                    "被抢占的序列已经没有块了，不管 `num_computed_tokens` 还是多少。它的所有 token 都需要位置。",
                ),
                (
                    (
                        "        num_new = self.num_blocks_for(len(seq.token_ids))\n",
                        "        num_new = self.num_blocks_for(len(seq.token_ids) - seq.num_computed_tokens)\n",
                    ),
                ),
            ),
            Mistake(
                Text("The first free blocks are taken", "取了最前面的空闲块"),
                Text(
                    "`self.free.pop()` takes the block that became free last. `pop(0)` also moves all other "
                    "entries of the list.",
                    "`self.free.pop()` 取最后变为空闲的块。`pop(0)` 还要移动列表里的其他各项。",
                ),
                (("self.free.pop()", "self.free.pop(0)"),),
            ),
            Mistake(
                Text("The blocks are still free", "取走的块还是空闲的"),
                Text(
                    "A slice copies the numbers and leaves them in `self.free`. The next sequence gets the "
                    "same blocks. `pop()` also removes them.",
                    "切片只是复制了块号，块仍在 `self.free` 里，下一个序列会拿到同样的块。`pop()` 会把它们取走。",
                ),
                (("[self.free.pop() for _ in range(num_new)]", "self.free[::-1][:num_new]"),),
            ),
            Mistake(
                Text("Tokens count as computed", "token 算作已计算"),
                Text(
                    "The sequence has slots now, but nothing in them: all tokens are still to be computed. "
                    "Set `num_computed_tokens` to 0.",
                    "序列现在有了槽位，但里面什么都没有：所有 token 都还要计算。应把 `num_computed_tokens` 设为 0。",
                ),
                (("seq.num_computed_tokens = 0", "seq.num_computed_tokens = len(seq.token_ids)"),),
            ),
            Mistake(
                Text("The result is missing", "没有返回值"),
                Text(
                    "A function without `return` gives None, which counts as False: the caller believes that "
                    "the sequence still waits.",
                    "没有 `return` 的函数返回 None，等于 False：调用者会以为这个序列还在等待。",
                ),
                (("        return True\n", ""),),
            ),
            Mistake(
                Text("Any free block suffices", "有一个空闲块就准入"),
                Text(
                    "The sequence needs `num_new` blocks, not one. Compare with the number of free blocks.",
                    "序列需要 `num_new` 个块，不是一个。应与空闲块的个数比较。",
                ),
                (("num_new > len(self.free)", "not self.free"),),
            ),
        ),
    ),
)
