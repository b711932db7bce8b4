"""Chapter 7: a block with several owners is copied before one of them writes to it."""

from labs.learn.exercise import Build, Mistake
from labs.learn.given import subclass_of
from labs.learn.samples import EXAMPLES, describe_samples, draw_overwrites, run_samples, samples
from labs.learn.texts import Text

IS_SHARED = "i < len(seq.block_table) and self.num_owners[seq.block_table[i]] > 1"
COPIES = "                self.copies.append((source, block_id))\n"
NO_BLOCK = "            if not self.free:\n                return False\n"

EXERCISES = (
    Build(
        name="copy_on_write",
        chapter="07_sharing",
        title=Text("Copy-on-write", "写时复制"),
        task=Text(
            "`seq` has a new token, and its first `seq.num_computed_tokens` tokens are stored. Give the next token a\n"
            "slot that only `seq` writes to:\n"
            "- Its block is in the table and has one owner: nothing to do.\n"
            "- Its block is in the table and has more owners: take a block, replace the last entry of the table by "
            "it,\n"
            "  count one owner less for the old block, and append (old block, new block) to `self.copies`.\n"
            "- The table ends before it: take a block, and append it to the table.\n"
            "Return True. If a block is needed and `self.free` is empty, change nothing, and return False.\n"
            "`self.take()` takes a block and counts its owner.\n\n"
            "Example: blocks of 4; A and B have the table [7, 2], each stores 5 tokens and has a sixth. Block 5 is "
            "free.\n"
            "`try_grow(A)`: A's table is [7, 5], `self.copies` is [(2, 5)]. `try_grow(B)`: nothing, B owns block 2 "
            "alone.",
            "`seq` 有一个新 token；它的前 `seq.num_computed_tokens` 个 token 已经存好。给下一个 token 一个只有 `seq` "
            "会写的槽位：\n"
            "- 它的块在块表里，只有一个所有者：什么都不用做。\n"
            "- 它的块在块表里，还有别的所有者：取一个块，换掉块表的最后一项，旧块少一个所有者，\n"
            "  并把 (旧块, 新块) 加到 `self.copies` 末尾。\n"
            "- 块表还没有它的块：取一个块，加到块表末尾。\n"
            "返回 True。如果需要块而 `self.free` 是空的，什么都不要改，返回 False。`self.take()` 取一个块，"
            "并记一个所有者。\n\n"
            "例：每块 4 个槽位，A 和 B 的块表都是 [7, 2]，各存了 5 个 token，各有第 6 个。5 号块空闲。\n"
            "`try_grow(A)`：A 的块表变成 [7, 5]，`self.copies` 是 [(2, 5)]。`try_grow(B)`：什么都不用做，2 号块只属于 "
            "B 了。",
        ),
        names=(
            "self.free",
            "self.take()",
            "self.num_owners",
            "self.copies",
            "self.block_size",
            "self.num_blocks_for(n)",
            "seq.token_ids",
            "seq.num_computed_tokens",
            "seq.block_table",
        ),
        hints=(
            Text(
                "Entry `i = seq.num_computed_tokens // self.block_size` of the table is the block that is written to "
                "next. If the last block is full, the table has no entry i yet.",
                "下一个要写的块是块表的第 `i = seq.num_computed_tokens // self.block_size` 项。"
                "如果最后一块已满，块表还没有第 i 项。",
            ),
            Text(
                "`is_shared = i < len(seq.block_table) and self.num_owners[seq.block_table[i]] > 1`. A block is needed "
                "if `is_shared`, or if `i == len(seq.block_table)`.",
                "`is_shared = i < len(seq.block_table) and self.num_owners[seq.block_table[i]] > 1`。`is_shared` 为真，"
                "或者 `i == len(seq.block_table)` 时，需要一个块。",
            ),
            Text(
                "For a shared block: `source = seq.block_table.pop()`, `self.num_owners[source] -= 1`, "
                "`self.copies.append((source, block_id))`. In both cases `seq.block_table.append(block_id)` follows.",
                "共享的块：`source = seq.block_table.pop()`，`self.num_owners[source] -= 1`，"
                "`self.copies.append((source, block_id))`。两种情况最后都是 `seq.block_table.append(block_id)`。",
            ),
        ),
        answer=subclass_of("one_file", "BlockManager", "Blocks", ("try_grow",), ("Sequence",)),
        holes=("Blocks.try_grow",),
        engine_parts=(("Blocks.try_grow", "BlockManager.try_grow"),),
        run=run_samples,
        examples=EXAMPLES,
        cases=samples,
        describe=describe_samples,
        draw=draw_overwrites,
        mistakes=(
            Mistake(
                Text("Two sequences write to one block", "两个序列写同一个块"),
                Text(
                    "The block has another owner, which has its own next token. The second one overwrites K and V of "
                    "the first. Copy the block before writing if `num_owners` is larger than 1.",
                    "这个块还有别的所有者，它有自己的下一个 token。后写的会覆盖先写的 K 和 V。"
                    "`num_owners` 大于 1 时，写之前要先复制。",
                ),
                ((IS_SHARED, "False"),),
            ),
            Mistake(
                Text("A copy for the only owner", "只有一个所有者也复制"),
                Text(
                    "The last owner writes in place: no other sequence reads the block. With three samples there are "
                    "two copies, not three. Compare with `> 1`.",
                    "最后一个所有者直接原地写，因为没有别的序列读这个块。三个样本只复制两次，不是三次。应与 `> 1` "
                    "比较。",
                ),
                (("[seq.block_table[i]] > 1", "[seq.block_table[i]] >= 1"),),
            ),
            Mistake(
                Text("The content is not copied", "没有复制内容"),
                Text(
                    "The new block is in the table, but it is empty: K and V of the tokens before are still only in "
                    "the "
                    "old block. The pair (old, new) belongs in `self.copies`.",
                    "新块在块表里，但它是空的：前面 token 的 K 和 V 还只在旧块里。要把 (旧块, 新块) 加到 "
                    "`self.copies`。",
                ),
                ((COPIES, ""),),
            ),
            Mistake(
                Text("The table keeps the old block", "块表里还是旧块"),
                Text(
                    "The content is copied to the new block, but the table still has the old one, and the next token "
                    "is "
                    "written there. No table has the new block, so it is lost.",
                    "内容复制到了新块，但块表里还是旧块，下一个 token 仍写到旧块里。新块不在任何块表里，就丢了。",
                ),
                (
                    (
                        "                source = seq.block_table.pop()\n",
                        "                source = seq.block_table[i]\n",
                    ),
                    (COPIES, COPIES + "                return True\n"),
                ),
            ),
            Mistake(
                Text("The old block keeps its owner", "旧块的所有者没有减"),
                Text(
                    "The sequence has left the old block. If it is still counted, the last owner makes a copy that it "
                    "does not need, and the block never becomes free.",
                    "这个序列已经不用旧块了。如果还算着它，最后一个所有者会多复制一次，而且旧块永远不会变空闲。",
                ),
                (("                self.num_owners[source] -= 1\n", ""),),
            ),
            Mistake(
                Text("Source and destination are swapped", "源和目标写反了"),
                Text(
                    "Pairs are (source, destination). Swapped, the empty new block is copied over the old one, whose "
                    "other owners lose K and V.",
                    "每一对是 (源, 目标)。写反的话，空的新块会覆盖旧块，旧块的其他所有者就丢了 K 和 V。",
                ),
                (("(source, block_id)", "(block_id, source)"),),
            ),
            Mistake(
                Text("A full block is copied", "复制了已满的块"),
                Text(
                    "If the last block is full, the next token goes to a new block. Full blocks are shared for ever: "
                    "no sequence writes to them, and the token would still have no slot after the copy.",
                    "最后一块满了，下一个 token 就放到新块里。已满的块可以一直共享：没有序列再写它，"
                    "复制没有用，而且这个 token 还是没有槽位。",
                ),
                (("i = seq.num_computed_tokens // self.block_size", "i = len(seq.block_table) - 1"),),
            ),
            Mistake(
                Text("No free block for a copy", "没有空闲块可供复制"),
                Text(
                    "A copy needs a free block, as growth does. If there is none, return False before anything is "
                    "changed: the scheduler then preempts a sequence.",
                    "复制和变长一样需要空闲块。没有时，要在改动任何东西之前返回 False，由调度器去抢占一个序列。",
                ),
                ((NO_BLOCK, "            if not self.free and not is_shared:\n                return False\n"),),
            ),
            Mistake(
                Text("Two owners are not enough", "两个所有者时没有复制"),
                Text(
                    "`> 2` forgets that `num_owners` counts `seq` itself, too: 2 means that one other sequence reads "
                    "the block.",
                    "`> 2` 忽略了 `num_owners` 也包括 `seq` 自己：等于 2 就说明还有一个别的序列在读这个块。",
                ),
                (("[seq.block_table[i]] > 1", "[seq.block_table[i]] > 2"),),
            ),
            Mistake(
                Text("A table that is full does not grow", "满的块表没有增长"),
                Text(
                    "There are two reasons to take a block: the block to write to is shared, or there is "
                    "none for the newest token.",
                    "取块有两个理由：要写的块是共享的，或者最新的 token 没有块。",
                ),
                (("if is_shared or self.num_blocks_for(len(seq.token_ids)) > len(seq.block_table):", "if is_shared:"),),
            ),
            Mistake(
                Text("The wrong block is replaced", "替换错了块"),
                Text(
                    "The next token is written to the last block of the table, so that block is replaced by its copy.",
                    "下一个 token 写在块表的最后一块里，所以用副本替换的是那一块。",
                ),
                (("seq.block_table.pop()", "seq.block_table.pop(0)"),),
            ),
            Mistake(
                Text("The old block becomes free", "旧的块变成了空闲"),
                Text(
                    "The other owner still reads the old block. It only loses one owner.",
                    "另一个所有者还在读旧的块，它只是少了一个所有者。",
                ),
                (
                    (
                        "                self.copies.append((source, block_id))\n",
                        "                self.copies.append((source, block_id))\n"
                        "                self.free[source] = None\n",
                    ),
                ),
            ),
            Mistake(
                Text("The old block has one owner", "旧的块只剩一个所有者"),
                Text(
                    "With three samples, two owners are left. Subtract 1; do not set the count to 1.",
                    "有三个样本时还剩两个所有者。要减 1，不能设为 1。",
                ),
                (("self.num_owners[source] -= 1", "self.num_owners[source] = 1"),),
            ),
            Mistake(
                Text("The new block has too many owners", "新块的所有者太多"),
                Text(
                    "`take` has already counted one owner of the new block. With two, it is never free again.",
                    "`take` 已经给新块计了一个所有者。计成两个，它就再也不会变空闲。",
                ),
                (
                    (
                        "                self.copies.append((source, block_id))\n",
                        "                self.copies.append((source, block_id))\n"
                        "                self.num_owners[block_id] += 1\n",
                    ),
                ),
            ),
        ),
    ),
)
