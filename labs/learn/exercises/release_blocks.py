"""Chapter 5: a sequence that ends gives its blocks back, the last one first, and shared ones only as the last owner."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs import one_file
from labs.learn.drawing import compare_fields, draw_account
from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.given import subclass_of
from labs.learn.texts import Text, count


class Released(NamedTuple):
    """The state after a call."""

    free: list[int]
    num_owners: list[int]
    tables: dict[str, list[int]]
    cached: list[int]
    """Blocks whose content can be found: releasing a block does not change that."""

    def compare(self, other: "Released") -> tuple[str, str]:
        return compare_fields(self, other)


class Pool(NamedTuple):
    """A case. Sequence i shares the first blocks of the sequence before it, and owns more."""

    spare: int
    """Blocks that are free from the beginning."""
    tables: tuple[tuple[int, int], ...]
    """(blocks shared with the sequence before, more blocks) of A, B, …"""
    order: tuple[int, ...]
    """Which of the remaining sequences is released next."""


def run(answer: ModuleType, case: Pool) -> Iterator[Seen]:
    blocks = answer.Blocks(case.spare + sum(more for _, more in case.tables), 4)
    seqs: dict[str, Any] = {}
    for (shared, more), name in zip(case.tables, "ABCD", strict=False):
        seq = one_file.Sequence([], 0, 1)
        before = list(seqs.values())[-1].block_table[:shared] if seqs else []
        for block_id in before:
            blocks.num_owners[block_id] += 1
        seq.block_table = before + [one_file.BlockManager.take(blocks) for _ in range(more)]
        seq.token_ids = [0] * (4 * len(seq.block_table))
        seqs[name] = seq
    blocks.block_of_hash = {bytes([block_id]): block_id for block_id in range(blocks.num_blocks)}
    blocks.hash_of_block = {block_id: bytes([block_id]) for block_id in range(blocks.num_blocks)}
    remaining = list(seqs)
    for number in case.order[: len(seqs)]:
        name = remaining.pop(number % len(remaining))
        before = list(seqs[name].block_table)
        blocks.release(seqs[name])
        tables = {name: list(seq.block_table) for name, seq in seqs.items()}
        label = Text(f"release({name}), whose table was {before}", f"release({name})，它的块表是 {before}")
        cached = sorted(blocks.block_of_hash.values())
        state = Released(list(blocks.free), list(blocks.num_owners), tables, cached)
        yield Seen(label, state, draw_account(blocks, seqs))


def describe(case: Pool) -> Text:
    en, zh, length = [], [], 0
    for name, (shared, more) in zip("ABCD", case.tables, strict=False):
        shared = min(shared, length)
        length = shared + more
        before = chr(ord(name) - 1)
        en.append(f"{name} owns {count(more, 'block')}" + (f", and shares {shared} of {before}" if shared else ""))
        zh.append(f"{name} 有 {more} 个块" + (f"，并共享 {before} 的前 {shared} 块" if shared else ""))
    if case.spare:
        en.append(f"{count(case.spare, 'more block')} free")
        zh.append(f"另有 {case.spare} 个空闲块")
    return Text(". ".join(en) + ".", "。".join(zh) + "。")


LOOP = "        for block_id in reversed(seq.block_table):\n"
FREE = "                self.free[block_id] = None\n"

EXERCISES = (
    Build(
        name="release_blocks",
        chapter="05_blocks_and_tables",
        title=Text("Give the blocks back", "归还块"),
        task=Text(
            "A sequence has ended and releases its blocks. A block may have several owners: `self.num_owners[i]` "
            "counts\n"
            "them. Only a block without owners becomes free. The sequence's last block becomes free first, because\n"
            "other sequences may still use the beginning of a text. At the end, the block table is empty.\n"
            "`self.free` is a dict whose keys are the free blocks, in the order in which they will be taken:\n"
            "`self.free[7] = None` puts block 7 at its end.\n\n"
            "Example: `A.block_table` is [0, 1, 2], and B also owns block 0. After `release(A)`, 2 and then 1 have "
            "been\n"
            "put at the end of `self.free`, `self.num_owners` is [1, 0, 0], and `A.block_table` is [].",
            "一个序列结束了，要归还它的块。一个块可能有几个所有者，`self.num_owners[i]` 是它们的个数。"
            "没有所有者的块才变成\n"
            "空闲块。序列的最后一块最先变空闲，因为别的序列还可能用到一段文本的开头。最后块表要清空。\n"
            "`self.free` 是一个 dict，它的键是空闲块，按取用的顺序排列：`self.free[7] = None` 把 7 号块放到末尾。\n\n"
            "例：`A.block_table` 是 [0, 1, 2]，B 也拥有 0 号块。`release(A)` 之后，2 和 1 先后放到 `self.free` 末尾，\n"
            "`self.num_owners` 是 [1, 0, 0]，`A.block_table` 是 []。",
        ),
        names=("self.free", "self.num_owners", "seq.block_table"),
        hints=(
            Text(
                "`reversed(seq.block_table)` begins with the last block.",
                "`reversed(seq.block_table)` 从最后一块开始。",
            ),
            Text(
                "For each block there is one owner less. Then, only if there is none left, the block is free.",
                "每个块都少一个所有者。然后，一个所有者都不剩时，它才是空闲块。",
            ),
            Text(
                "In the loop: `self.num_owners[block_id] -= 1`, then `if not self.num_owners[block_id]:` and the line "
                "that puts the block at the end of `self.free`. After the loop: `seq.block_table = []`.",
                "循环里：`self.num_owners[block_id] -= 1`，再写 `if not self.num_owners[block_id]:`，"
                "下面是把块放到 `self.free` 末尾的那一行。循环之后：`seq.block_table = []`。",
            ),
        ),
        answer=subclass_of("one_file", "BlockManager", "Blocks", ("release",), ("Sequence",)),
        holes=("Blocks.release",),
        engine_parts=(("Blocks.release", "BlockManager.release"),),
        run=run,
        examples=(
            Pool(1, ((0, 3),), (0,)),
            Pool(0, ((0, 2), (1, 2), (2, 1)), (0, 0, 0)),
            Pool(2, ((0, 3), (3, 1)), (1, 0)),
            Pool(0, ((0, 3), (1, 2)), (0, 0)),
        ),
        cases=lambda: st.builds(
            Pool,
            st.integers(0, 2),
            st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=3).map(tuple),
            st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple),
        ),
        describe=describe,
        mistakes=(
            Mistake(
                Text("The first block becomes free first", "第一块最先变空闲"),
                Text(
                    "The block that became free first is also overwritten first. Then the beginning of a prompt is "
                    "lost "
                    "first, although other requests most likely need it. No token changes, but the prefix cache finds "
                    "less.",
                    "最先变空闲的块最先被覆盖。这样，提示词的开头最先丢失，而别的请求最可能用到的正是开头。"
                    "输出的 token 不变，但前缀缓存的命中会变少。",
                ),
                (("reversed(seq.block_table)", "seq.block_table"),),
            ),
            Mistake(
                Text("A shared block becomes free", "共享的块变成了空闲块"),
                Text(
                    "Another sequence still reads this block. If it is free, the next sequence takes and overwrites "
                    "it.",
                    "另一个序列还在读这个块。它一旦变空闲，下一个序列就会拿走并覆盖它。",
                ),
                (("            if not self.num_owners[block_id]:\n" + FREE, FREE[4:]),),
            ),
            Mistake(
                Text("Free while there is one owner left", "还剩一个所有者就变空闲"),
                Text(
                    "After the subtraction, `num_owners` counts the owners that are left. At 1 another sequence still "
                    "owns the block, and at 0 no sequence does.",
                    "减 1 之后，`num_owners` 是剩下的所有者数。等于 1 时，还有一个序列拥有这个块；等于 0 时才没有。",
                ),
                (("if not self.num_owners[block_id]", "if self.num_owners[block_id] == 1"),),
            ),
            Mistake(
                Text("The owners are not counted down", "所有者数没有减"),
                Text(
                    "`num_owners` still counts the sequence that has ended. The block never becomes free, and the pool "
                    "gets smaller with each request.",
                    "`num_owners` 还算着已结束的序列。这个块永远不会变空闲，每个请求都会让块池变小。",
                ),
                (("            self.num_owners[block_id] -= 1\n", ""),),
            ),
            Mistake(
                Text("The table keeps its blocks", "块表没有清空"),
                Text(
                    "A sequence that has released its blocks may not refer to them: another sequence gets them. If the "
                    "sequence was preempted and is released again, its blocks are free twice.",
                    "归还之后，序列不能再指向这些块，因为它们会分给别的序列。如果它再归还一次，同一个块就空闲了两次。",
                ),
                (("        seq.block_table = []\n", ""),),
            ),
            Mistake(
                Text("The block just freed is taken next", "刚归还的块最先被取走"),
                Text(
                    "New free blocks belong at the end of `self.free`. At the front they would be overwritten next, "
                    "and "
                    "old content that no request needs would stay.",
                    "新的空闲块应放在 `self.free` 末尾。放在开头，它们马上会被覆盖，而没人需要的旧内容反而留着。",
                ),
                ((FREE, "                self.free = {block_id: None, **self.free}\n"),),
            ),
            Mistake(
                Text("A shared block ends the loop", "遇到共享的块就停止"),
                Text(
                    "The sequence no longer owns the shared block and the blocks before it: each of them has one owner "
                    "less.",
                    "共享的块和它前面的块，这个序列都不再拥有：每一块的所有者都要减 1。",
                ),
                ((FREE, FREE + "            else:\n                break\n"),),
            ),
            Mistake(
                Text("The table changes during the loop", "循环中修改了块表"),
                Text(
                    "A loop over a list skips an element when an earlier one is removed. Every second block is lost: "
                    "it "
                    "is neither owned nor free.",
                    "遍历列表时删掉前面的元素，就会跳过后一个。每隔一个块就丢一个：既没有所有者，也不空闲。",
                ),
                ((LOOP, "        for block_id in seq.block_table:\n            seq.block_table.remove(block_id)\n"),),
            ),
            Mistake(
                Text("The last owner does not free the block", "最后一个所有者没有释放块"),
                Text(
                    "Count the owner down first, and then look whether none is left. In this order, the "
                    "count is still 1 for the last owner.",
                    "先减去所有者，再看是不是没有了。按这里的顺序，最后一个所有者检查时个数还是 1。",
                ),
                (
                    (
                        "            self.num_owners[block_id] -= 1\n"
                        "            if not self.num_owners[block_id]:\n"
                        "                self.free[block_id] = None\n",
                        "            if not self.num_owners[block_id]:\n"
                        "                self.free[block_id] = None\n"
                        "            self.num_owners[block_id] -= 1\n",
                    ),
                ),
            ),
            Mistake(
                Text("A shared block keeps its owner", "共享的块没有减去所有者"),
                Text(
                    "Each block of the table has one owner less, also a shared one. Otherwise it never becomes free: "
                    "when its last owner ends, `num_owners` is still 2.",
                    "块表里的每一块都少一个所有者，共享的块也一样。否则它永远不会变空闲："
                    "最后一个所有者结束时，`num_owners` 还是 2。",
                ),
                (
                    (
                        "            self.num_owners[block_id] -= 1\n            if not self.num_owners[block_id]:\n",
                        "            if self.num_owners[block_id] == 1:\n"
                        "                self.num_owners[block_id] = 0\n",
                    ),
                ),
            ),
            Mistake(
                Text("All owners are removed", "去掉了所有的所有者"),
                Text(
                    "Only one sequence leaves. Another owner still reads the block, so subtract 1.",
                    "离开的只是一个序列，别的所有者还在读这个块，所以只减 1。",
                ),
                (("            self.num_owners[block_id] -= 1\n", "            self.num_owners[block_id] = 0\n"),),
            ),
            Mistake(
                Text("Only the last block is released", "只释放了最后一块"),
                Text(
                    "All blocks of the table lose an owner, from the last to the first.",
                    "块表里所有的块都少一个所有者，从最后一块到第一块。",
                ),
                (("reversed(seq.block_table)", "seq.block_table[-1:]"),),
            ),
            Mistake(
                Text("Blocks that were free are lost", "原来空闲的块丢了"),
                Text(
                    "Other blocks are free already. Add to `self.free`; a new dict forgets them.",
                    "已经有别的空闲块。应该加到 `self.free` 里；新建一个字典会把它们忘掉。",
                ),
                (("        for block_id in reversed", "        self.free = {}\n        for block_id in reversed"),),
            ),
            Mistake(
                Text("The content is forgotten", "忘掉了块的内容"),
                Text(
                    "A free block keeps its content and its hash until another sequence takes it. Until then "
                    "a later prompt can find it, so leave the prefix cache alone.",
                    "空闲块在被别的序列取走之前，保留它的内容和哈希值，后来的提示词还能找到它。所以不要动前缀缓存。",
                ),
                (
                    (
                        "                self.free[block_id] = None\n",
                        "                self.free[block_id] = None\n"
                        "                self.block_of_hash.pop(self.hash_of_block.pop(block_id, None), None)\n",
                    ),
                ),
            ),
        ),
    ),
)
