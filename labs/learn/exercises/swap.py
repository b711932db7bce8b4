"""Chapter 9: copy the blocks of a preempted sequence to host memory, and later back, instead of computing again."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs import mixed_batches
from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.simulation import (
    Parts,
    Request,
    Simulation,
    Step,
    Traffic,
    describe_traffic,
    traffics,
)
from labs.learn.texts import Text
from labs.learn.whole_runs import explain_difference, is_same_step, run_whole

ANSWER = '''
from labs.mixed_batches import BlockManager, Sequence


class Blocks(BlockManager):
    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        super().__init__(num_blocks, block_size)
        self.host_free = list(range(num_host_blocks))  # free blocks in host memory
        self.host_tables = {}  # the host blocks of each sequence that is swapped out, in the order of its tokens
        self.swap_outs = []  # (block, host block): copied before the step computes
        self.swap_ins = []  # (host block, block): copied before the step computes

    def try_admit(self, seq: Sequence) -> bool:
        return self.try_swap_in(seq) if seq in self.host_tables else super().try_admit(seq)

    def try_swap_out(self, seq: Sequence) -> bool:
        """Move the computed tokens of `seq` to host memory. Return False, and change nothing, if they do not fit."""
        num_host = self.num_blocks_for(seq.num_computed_tokens)
        if num_host > len(self.host_free):
            return False
        host_table = [self.host_free.pop() for _ in range(num_host)]
        self.swap_outs += zip(seq.block_table, host_table)
        self.host_tables[seq] = host_table
        self.release(seq)
        return True

    def try_swap_in(self, seq: Sequence) -> bool:
        """Move `seq` back to blocks for all of its tokens. Return False, and change nothing, if too few are free."""
        num_new = self.num_blocks_for(len(seq.token_ids))
        if num_new > len(self.free):
            return False
        seq.block_table = [self.free.pop() for _ in range(num_new)]
        host_table = self.host_tables.pop(seq)
        self.swap_ins += zip(host_table, seq.block_table)
        self.host_free += host_table
        return True
'''
OUT = "        self.swap_outs += zip(seq.block_table, host_table)\n"
OUT_CHECK = "        if num_host > len(self.host_free):\n            return False\n"


class Case(NamedTuple):
    num_host_blocks: int
    traffic: Traffic


class Scheduler(mixed_batches.Scheduler):
    """Swaps the preempted sequence out if host memory has enough free blocks; otherwise it is computed again."""

    block_manager: Any  # the answer's

    def make_room(self, seq: Any) -> bool:
        while not self.block_manager.try_grow(seq):
            last = self.running.pop()
            if not self.block_manager.try_swap_out(last):
                self.block_manager.release(last)
            self.waiting.appendleft(last)
            self.num_preemptions += 1
            if last is seq:
                return False
        return True


class Swapping(Simulation):
    """Copies blocks to and from host memory before each step."""

    def __init__(self, parts: Parts, traffic: Traffic) -> None:
        super().__init__(parts, traffic)
        self.host_slots: dict[int, int] = {}

    def step(self, chunks: list[tuple[Any, int]]) -> Step:
        manager, size = self.manager, self.traffic.block_size
        moves = [f"block {a} → host {b}" for a, b in manager.swap_outs]
        moves += [f"host {a} → block {b}" for a, b in manager.swap_ins]
        for pairs, source, destination in (
            (manager.swap_outs, self.slots, self.host_slots),
            (manager.swap_ins, self.host_slots, self.slots),
        ):
            for a, b in pairs:
                for i in range(size):
                    destination[b * size + i] = source.get(a * size + i, -1)
        manager.swap_outs, manager.swap_ins = [], []
        tables = {self.names[seq]: list(table) for seq, table in manager.host_tables.items()}
        host = " ".join(
            [*(f"{name} {table}" for name, table in sorted(tables.items())), f"free {list(manager.host_free)}"]
        )
        return super().step(chunks)._replace(moves=tuple(moves), host=host)


def run(answer: ModuleType, case: Case) -> Iterator[Seen]:
    def make_blocks(num_blocks: int, block_size: int) -> Any:
        return answer.Blocks(num_blocks, block_size, case.num_host_blocks)

    return run_whole(Swapping(Parts(block_manager=make_blocks, scheduler=Scheduler), case.traffic))


def describe(case: Case) -> Text:
    traffic = describe_traffic(case.traffic)
    return Text(
        f"{traffic.en}  \nBlocks in host memory: {case.num_host_blocks}.",
        f"{traffic.zh}  \n主机内存的块数：{case.num_host_blocks}。",
    )


EXERCISES = (
    Build(
        name="swap",
        chapter="09_when_memory_is_full",
        title=Text("Swap instead of computing again", "换出，而不是重算"),
        task=Text(
            "A sequence was preempted. Copy its blocks to host memory, so that nothing is computed twice.\n"
            "`try_swap_out(seq)`: take as many host blocks as the computed tokens need (`self.host_free.pop()`). If "
            "too\n"
            "few are free, change nothing, and return False. Note the copies: append (block, host block) to\n"
            "`self.swap_outs`, for the first blocks of the table in their order. Keep the list of host blocks in\n"
            "`self.host_tables[seq]`, then `self.release(seq)`, and return True. `seq.num_computed_tokens` stays.\n"
            "`try_swap_in(seq)`: take as many blocks as all tokens need (`self.free.pop()`) for `seq.block_table`. If "
            "too\n"
            "few are free, change nothing, and return False. Append (host block, block) to `self.swap_ins`. The host\n"
            "blocks are free again (put them at the end of `self.host_free`), and `self.host_tables` has no entry of\n"
            "`seq` any more. Return True. The copies are made before the step computes.\n\n"
            "Example: blocks of 4, table [6, 1], 5 computed tokens, host blocks [0, 1, 2] are free. Swapping out "
            "notes\n"
            "(6, 2) and (1, 1), and host block 0 is left. Later, with the new table [3, 8], it notes (2, 3) and (1, "
            "8).",
            "一个序列被抢占了。把它的块复制到主机内存，这样什么都不用重算。\n"
            "`try_swap_out(seq)`：按已计算的 token 需要的块数取主机块（`self.host_free.pop()`）。空闲的不够时，"
            "什么都不要改，\n"
            "返回 False。记下要做的复制：按顺序对块表的前几块，把 (块, 主机块) 加到 `self.swap_outs` 末尾。\n"
            "把主机块的列表存到 `self.host_tables[seq]`，然后 `self.release(seq)`，返回 True。"
            "`seq.num_computed_tokens` 不变。\n"
            "`try_swap_in(seq)`：按全部 token 需要的块数取块（`self.free.pop()`），填好 `seq.block_table`。"
            "空闲的不够时，\n"
            "什么都不要改，返回 False。把 (主机块, 块) 加到 `self.swap_ins` 末尾。主机块又空闲了（放到 "
            "`self.host_free` 末尾），\n"
            "`self.host_tables` 里不再有 `seq`。返回 True。复制在这一步计算之前完成。\n\n"
            "例：每块 4 个槽位，块表 [6, 1]，已计算 5 个 token，空闲主机块 [0, 1, 2]。换出时记下 (6, 2) 和 (1, 1)，\n"
            "剩下 0 号主机块。以后换入时，新块表是 [3, 8]，记下 (2, 3) 和 (1, 8)。",
        ),
        names=(
            "self.free (list)",
            "self.num_blocks_for(n)",
            "self.release(seq)",
            "seq.token_ids",
            "seq.num_computed_tokens",
            "seq.block_table",
        ),
        hints=(
            Text(
                "Both methods begin alike: how many blocks are needed, and are they free? Only then change anything.",
                "两个方法的开头相同：需要几块，够不够？之后才改动。",
            ),
            Text(
                "Out: `self.num_blocks_for(seq.num_computed_tokens)` host blocks. In: "
                "`self.num_blocks_for(len(seq.token_ids))` blocks, because the newest token needs a slot, too.",
                "换出：`self.num_blocks_for(seq.num_computed_tokens)` 个主机块。换入："
                "`self.num_blocks_for(len(seq.token_ids))` 个块，因为最新的 token 也要有槽位。",
            ),
            Text(
                "`self.swap_outs += zip(seq.block_table, host_table)` pairs the blocks in order, and stops at the end "
                "of "
                "the shorter list. `self.host_tables.pop(seq)` returns the list and removes the entry.",
                "`self.swap_outs += zip(seq.block_table, host_table)` 按顺序配对，到较短的列表结束为止。"
                "`self.host_tables.pop(seq)` 返回列表，并删掉这一项。",
            ),
        ),
        answer=ANSWER,
        holes=("Blocks.try_swap_out", "Blocks.try_swap_in"),
        run=run,
        examples=(
            Case(4, Traffic(4, 2, 8, (Request((1, 2), 5), Request((0, 1), 5)))),
            Case(4, Traffic(6, 2, 9, (Request((1, 2), 5), Request((0, 1), 5), Request((2, 2), 5)))),
            Case(1, Traffic(4, 2, 8, (Request((1, 2), 5), Request((0, 1), 5)))),
            Case(4, Traffic(6, 2, 2, (Request((1, 2), 6), Request((0, 1, 2, 0, 1, 2, 1, 1), 1)))),
            Case(2, Traffic(5, 2, 6, (Request((1, 2), 6), Request((0, 1), 6), Request((2,), 6)))),
            Case(3, Traffic(5, 2, 8, (Request((1, 2, 0), 6), Request((0, 1, 2), 6)))),
            Case(5, Traffic(3, 1, 4, (Request((1,), 3), Request((2,), 5), Request((0,), 3)))),  # two in one step
        ),
        cases=lambda: st.builds(Case, st.sampled_from((4, 3, 2, 1, 0)), traffics()),
        describe=describe,
        is_same=is_same_step,
        draw=explain_difference,
        mistakes=(
            Mistake(
                Text("The counter is reset", "计数归零了"),
                Text(
                    "K and V come back with the copies. If `num_computed_tokens` is 0, all tokens are computed again, "
                    "and the copies were made for nothing.",
                    "K 和 V 会随复制回来。如果 `num_computed_tokens` 是 0，全部 token 还要重算，复制就白做了。",
                ),
                (
                    (
                        "        self.host_tables[seq] = host_table\n",
                        "        self.host_tables[seq] = host_table\n        seq.num_computed_tokens = 0\n",
                    ),
                ),
            ),
            Mistake(
                Text("Empty blocks are copied", "复制了空块"),
                Text(
                    "A table may have blocks for tokens that are not computed yet, for example of a long prompt. "
                    "Nothing "
                    "is in them. Count the blocks of the computed tokens.",
                    "块表里可能有还没计算的 token 的块，例如长提示词的后半部分。里面什么都没有。应按已计算的 token "
                    "数块。",
                ),
                (("self.num_blocks_for(seq.num_computed_tokens)", "len(seq.block_table)"),),
            ),
            Mistake(
                Text("Full host memory is not noticed", "没有发现主机内存已满"),
                Text(
                    "Host memory is limited, too. If it has too few free blocks, return False before anything is "
                    "changed: then the sequence is computed again.",
                    "主机内存也有限。空闲的主机块不够时，要在改动之前返回 False，这个序列就改为重算。",
                ),
                ((OUT_CHECK, ""),),
            ),
            Mistake(
                Text("Source and destination are swapped", "源和目标写反了"),
                Text(
                    "`swap_outs` has pairs (block, host block): from the block to the host block.",
                    "`swap_outs` 里是 (块, 主机块)：从块复制到主机块。",
                ),
                ((OUT, "        self.swap_outs += zip(host_table, seq.block_table)\n"),),
            ),
            Mistake(
                Text("The blocks are released before they are noted", "还没记下就归还了块"),
                Text(
                    "After `release`, the block table is empty, so no copy is noted, and the K and V are lost.",
                    "`release` 之后块表是空的，一次复制也没有记下，K 和 V 就丢了。",
                ),
                (
                    (OUT, "        self.release(seq)\n" + OUT),
                    ("= host_table\n        self.release(seq)\n", "= host_table\n"),
                ),
            ),
            Mistake(
                Text("The blocks are not released", "没有归还块"),
                Text(
                    "The purpose of swapping out is to get free blocks. The copies are made before any other sequence "
                    "writes to them, so they can be released now.",
                    "换出就是为了腾出空闲块。复制会在别的序列写入之前完成，所以现在就可以归还。",
                ),
                (("        self.release(seq)\n", ""),),
            ),
            Mistake(
                Text("Too few blocks for the newest token", "最新的 token 没有块"),
                Text(
                    "The sequence also has a token that is not computed yet. If the computed tokens fill their blocks, "
                    "it needs one more block, in this step.",
                    "序列还有一个没计算的 token。如果已计算的 token 正好填满它们的块，这一步就还要一块。",
                ),
                (("self.num_blocks_for(len(seq.token_ids))", "self.num_blocks_for(seq.num_computed_tokens)"),),
            ),
            Mistake(
                Text("The host blocks are not given back", "没有归还主机块"),
                Text(
                    "After the copies in, the host blocks are free. Otherwise host memory is full after a few "
                    "preemptions, and everything is computed again.",
                    "换入之后，主机块就空闲了。不归还的话，几次抢占之后主机内存就满了，以后全都要重算。",
                ),
                (("        self.host_free += host_table\n", ""),),
            ),
            Mistake(
                Text("The sequence is still swapped out", "序列仍算作已换出"),
                Text(
                    "`host_tables` still has an entry. If the sequence is preempted again when host memory is full, it "
                    "should be computed again, but is given the old copy from host blocks that others may have now.",
                    "`host_tables` 里还有它。如果它再次被抢占时主机内存已满，本应重算，却会从旧的主机块换入，"
                    "而那些主机块可能已经给了别的序列。",
                ),
                (("self.host_tables.pop(seq)", "self.host_tables[seq]"),),
            ),
            Mistake(
                Text("The blocks come back in another order", "换入的顺序不对"),
                Text(
                    "Entry i of the new table must get the content of entry i of the old one. Pair the lists in the "
                    "same "
                    "order as when swapping out.",
                    "新块表的第 i 项必须得到旧块表第 i 项的内容。配对的顺序要和换出时相同。",
                ),
                (("zip(host_table, seq.block_table)", "zip(reversed(host_table), seq.block_table)"),),
            ),
            Mistake(
                Text("A swap in without enough blocks", "块不够就换入"),
                Text(
                    "If fewer blocks are free than the sequence needs, it waits: return False before anything is "
                    "changed. `pop` from an empty list raises IndexError.",
                    "空闲块不够时，序列要继续等：在改动之前返回 False。对空列表 `pop` 会抛出 IndexError。",
                ),
                (("        if num_new > len(self.free):\n            return False\n", ""),),
            ),
            Mistake(
                Text("Host memory that suffices exactly is refused", "恰好够用的主机内存被拒绝了"),
                Text(
                    "`num_host` may be equal to the number of free host blocks: use `>`, not `>=`.",
                    "`num_host` 可以等于空闲主机块的个数：用 `>`，不用 `>=`。",
                ),
                (("num_host > len(self.host_free)", "num_host >= len(self.host_free)"),),
            ),
            Mistake(
                Text("The wrong memory is checked", "检查错了内存"),
                Text(
                    "Swapping out needs free blocks in host memory: look at `self.host_free`.",
                    "换出需要主机内存里有空闲块：要看 `self.host_free`。",
                ),
                (("num_host > len(self.host_free)", "num_host > len(self.free)"),),
            ),
            Mistake(
                Text("Nothing is copied back", "没有复制回来"),
                Text(
                    (
                        "The new blocks of the sequence hold something else. Note a copy for each host block in "
                        "`self.swap_ins`."
                    ),
                    "序列的新块里是别的内容。要为每个主机块在 `self.swap_ins` 里记下一次复制。",
                ),
                (("        self.swap_ins += zip(host_table, seq.block_table)\n", ""),),
            ),
            Mistake(
                Text("The host table is lost", "主机块表丢了"),
                Text(
                    ("`self.host_tables[seq]` must be the list of host blocks, or nothing is known to copy back."),
                    "`self.host_tables[seq]` 必须是主机块的列表，否则不知道该把什么复制回来。",
                ),
                (("        self.host_tables[seq] = host_table\n", "        self.host_tables[seq] = []\n"),),
            ),
            Mistake(
                Text("The way back is swapped", "换入的方向反了"),
                Text(
                    "A pair of `swap_ins` is (host block, block): from host memory to the pool.",
                    "`swap_ins` 的一对是 (主机块, 块)：从主机内存到块池。",
                ),
                (("zip(host_table, seq.block_table)", "zip(seq.block_table, host_table)"),),
            ),
            Mistake(
                Text("Earlier copies are lost", "之前的复制丢了"),
                Text(
                    (
                        "A step can swap out several sequences. Append to `self.swap_outs`; a new list forgets "
                        "the copies of the sequence before."
                    ),
                    "一步可能换出好几个序列。要追加到 `self.swap_outs`；新建列表会忘掉前一个序列的复制。",
                ),
                (
                    (
                        "        self.swap_outs += zip(seq.block_table, host_table)\n",
                        "        self.swap_outs = list(zip(seq.block_table, host_table))\n",
                    ),
                ),
            ),
            Mistake(
                Text("The host table is lost when blocks are short", "块不够时丢了主机块表"),
                Text(
                    (
                        "If too few blocks are free, change nothing: check before `pop`. The sequence needs its "
                        "host blocks when it is tried again."
                    ),
                    "空闲块不够时什么都不要改：先检查，再 `pop`。下次再试时，序列还需要它的主机块。",
                ),
                (
                    (
                        "        if num_new > len(self.free):\n            return False\n",
                        (
                            "        host_table = self.host_tables.pop(seq)\n"
                            "        if num_new > len(self.free):\n            return False\n"
                        ),
                    ),
                    ("        host_table = self.host_tables.pop(seq)\n        self.swap_ins", "        self.swap_ins"),
                ),
            ),
        ),
    ),
)
