"""Chapter 7: another sample shares all blocks of the sequence that has computed the prompt."""

from labs.learn.exercise import Build, Mistake
from labs.learn.given import subclass_of
from labs.learn.samples import EXAMPLES, describe_samples, draw_overwrites, run_samples, samples
from labs.learn.texts import Text

LOOP = "        for block_id in parent.block_table:\n            self.num_owners[block_id] += 1\n"
TABLE = "        child.block_table = parent.block_table.copy()\n"

EXERCISES = (
    Build(
        name="fork",
        chapter="07_sharing",
        title=Text("Fork a sequence", "分叉一个序列"),
        task=Text(
            "A request wants several answers to one prompt. `parent` has computed the prompt. Let `child` share all\n"
            "blocks of `parent`, also the last one, which may be partly filled: each block gets one more owner\n"
            "(`self.num_owners[block_id]`), and the child gets a block table of its own with the same blocks. The "
            "child\n"
            "has as many computed tokens as the parent. Nothing is copied yet.\n\n"
            "Example: `parent.block_table` is [2, 0], with 5 computed tokens in blocks of 4. After `fork(parent, "
            "child)`\n"
            "both tables are [2, 0], `self.num_owners[2]` and `self.num_owners[0]` have grown by 1, and\n"
            "`child.num_computed_tokens` is 5.",
            "一个请求要对同一个提示词给出几个回答。`parent` 已经算完提示词。让 `child` 共享 `parent` 的所有块，\n"
            "包括可能没填满的最后一块：每块多一个所有者（`self.num_owners[block_id]`），`child` 有自己的块表，"
            "内容相同。\n"
            "`child` 已计算的 token 数与 `parent` 相同。这时还不复制任何块。\n\n"
            "例：每块 4 个槽位，`parent.block_table` 是 [2, 0]，已计算 5 个 token。`fork(parent, child)` 之后，\n"
            "两张块表都是 [2, 0]，`self.num_owners[2]` 和 `self.num_owners[0]` 各加 1，`child.num_computed_tokens` 是 "
            "5。",
        ),
        names=(
            "self.num_owners",
            "parent.block_table",
            "parent.num_computed_tokens",
            "child.block_table",
            "child.num_computed_tokens",
        ),
        hints=(
            Text(
                "Three things change: the owners of each block, the child's table, and its number of computed tokens.",
                "有三处要改：每块的所有者数、`child` 的块表、它已计算的 token 数。",
            ),
            Text(
                "Both tables will change independently, so the child needs a copy of the list.",
                "两张块表以后各变各的，所以 `child` 需要列表的一份副本。",
            ),
            Text(
                "`for block_id in parent.block_table:` `self.num_owners[block_id] += 1`, then "
                "`child.block_table = parent.block_table.copy()`.",
                "`for block_id in parent.block_table:` `self.num_owners[block_id] += 1`，然后 "
                "`child.block_table = parent.block_table.copy()`。",
            ),
        ),
        answer=subclass_of("one_file", "BlockManager", "Blocks", ("fork",), ("Sequence",)),
        holes=("Blocks.fork",),
        engine_parts=(("Blocks.fork", "BlockManager.fork"),),
        run=run_samples,
        examples=EXAMPLES,
        cases=samples,
        describe=describe_samples,
        draw=draw_overwrites,
        mistakes=(
            Mistake(
                Text("The owners are not counted", "没有计所有者"),
                Text(
                    "`num_owners` says who may write to a block, and when it becomes free. If it stays 1, both samples "
                    "write to the same slots, and the first one to end frees blocks that the other one still reads.",
                    "`num_owners` 决定能否直接写一个块，以及它何时变空闲。如果一直是 1，两个样本就会写同样的槽位；"
                    "先结束的样本还会释放另一个仍在读的块。",
                ),
                ((LOOP, ""),),
            ),
            Mistake(
                Text("Two sequences have one table", "两个序列用同一张块表"),
                Text(
                    "`child.block_table = parent.block_table` gives both sequences the same list. When one appends a "
                    "block, the other one has it too, without being counted as an owner. Copy the list.",
                    "`child.block_table = parent.block_table` 让两个序列用同一个列表。一个追加了块，"
                    "另一个的表里也会有，"
                    "却没有计入所有者。要复制列表。",
                ),
                (("parent.block_table.copy()", "parent.block_table"),),
            ),
            Mistake(
                Text("The child computes the prompt again", "`child` 会重算提示词"),
                Text(
                    "If `num_computed_tokens` is 0, the child computes the whole prompt again, and writes to blocks "
                    "that it shares.",
                    "如果 `num_computed_tokens` 是 0，`child` 会把整个提示词再算一遍，还会写它与别人共享的块。",
                ),
                (("        child.num_computed_tokens = parent.num_computed_tokens\n", ""),),
            ),
            Mistake(
                Text("The last block is not shared", "没有共享最后一块"),
                Text(
                    "The partly filled last block is shared too: the child needs K and V of the tokens in it. Only "
                    "when "
                    "a sample writes to it, that sample needs a copy.",
                    "没填满的最后一块也要共享：`child` 需要其中 token 的 K 和 V。等到有样本要写它时，"
                    "那个样本才需要副本。",
                ),
                (
                    ("in parent.block_table:", "in parent.block_table[:-1]:"),
                    ("parent.block_table.copy()", "parent.block_table[:-1]"),
                ),
            ),
            Mistake(
                Text("Two owners, however many samples there are", "不管几个样本，所有者都是两个"),
                Text(
                    "A block of three samples has three owners. With `= 2`, the second one that releases it makes it "
                    "free, although the third one still reads it. Use `+= 1`.",
                    "三个样本的块有三个所有者。写成 `= 2`，第二个样本归还时它就变空闲了，而第三个还在读它。应写 `+= "
                    "1`。",
                ),
                (("self.num_owners[block_id] += 1", "self.num_owners[block_id] = 2"),),
            ),
            Mistake(
                Text("The last block is copied at once", "分叉时就复制了最后一块"),
                Text(
                    "A copy is needed only when a sample writes, and the last owner never needs one. Copying in `fork` "
                    "costs a block and a copy for each child, also if the last block is full.",
                    "样本要写的时候才需要副本，而最后一个所有者根本不需要。在 `fork` 里复制，每个 `child` "
                    "都要多占一块、"
                    "多复制一次，即使最后一块是满的。",
                ),
                (
                    (
                        TABLE,
                        TABLE + "        if self.free:\n            source = child.block_table.pop()\n"
                        "            self.num_owners[source] -= 1\n            child.block_table.append(self.take())\n"
                        "            self.copies.append((source, child.block_table[-1]))\n",
                    ),
                ),
            ),
            Mistake(
                Text("The parent loses its blocks", "`parent` 失去了它的块"),
                Text(
                    "The blocks are shared, not moved. The parent is the first sample, and continues with them.",
                    "块是共享，不是转移。`parent` 就是第一个样本，还要继续用它们。",
                ),
                ((TABLE, "        child.block_table, parent.block_table = parent.block_table, []\n"),),
            ),
            Mistake(
                Text("New blocks for the child", "给 `child` 分了新块"),
                Text(
                    "New blocks are empty: K and V of the prompt are not in them. Sharing needs no block at all.",
                    "新块是空的，里面没有提示词的 K 和 V。共享不需要任何新块。",
                ),
                (
                    (
                        LOOP + TABLE,
                        "        child.block_table = [self.take() for _ in parent.block_table if self.free]\n",
                    ),
                ),
            ),
            Mistake(
                Text("Only the last block gets an owner", "只有最后一块多了所有者"),
                Text(
                    "The child reads all blocks of the table, so each of them gets one more owner.",
                    "`child` 要读块表里所有的块，所以每一块都多一个所有者。",
                ),
                (("in parent.block_table:", "in parent.block_table[-1:]:"),),
            ),
            Mistake(
                Text("The last block gets no owner", "最后一块没有多出所有者"),
                Text(
                    "The child's table has the last block, too. Without a second owner, both write to it, "
                    "and the first that ends frees it.",
                    "`child` 的块表里也有最后一块。不多记一个所有者，两者都会写它，先结束的那个就把它释放了。",
                ),
                (("in parent.block_table:", "in parent.block_table[:-1]:"),),
            ),
            Mistake(
                Text("The newest token counts as computed", "最新的 token 算作已计算"),
                Text(
                    "Only tokens with K and V in the cache are computed. The newest token of the parent is "
                    "not: take its `num_computed_tokens`.",
                    "只有 K 和 V 在缓存里的 token 才算已计算。`parent` 最新的 token 还不是，应取它的 "
                    "`num_computed_tokens`。",
                ),
                (("= parent.num_computed_tokens", "= len(parent.token_ids)"),),
            ),
            Mistake(
                Text("Slots count as computed", "槽位算作已计算"),
                Text(
                    "The last block may be partly filled. Its empty slots are not computed: take the "
                    "`num_computed_tokens` of the parent.",
                    "最后一块可能没填满，空的槽位不算已计算。应取 `parent` 的 `num_computed_tokens`。",
                ),
                (("= parent.num_computed_tokens", "= len(parent.block_table) * self.block_size"),),
            ),
            Mistake(
                Text("The child gets no table", "child 没有块表"),
                Text(
                    "The owners are counted, but the child does not know the blocks. It needs a table of its "
                    "own with the same entries.",
                    "所有者已经计了，但 `child` 不知道有哪些块。它需要一张内容相同的、自己的块表。",
                ),
                (("        child.block_table = parent.block_table.copy()\n", ""),),
            ),
            Mistake(
                Text("Only full blocks are shared", "只共享了满的块"),
                Text(
                    "The last block may be partly filled, and is shared, too. It is copied only when one of "
                    "both writes to it.",
                    "没填满的最后一块也要共享，等到其中一个要写它时才复制。",
                ),
                (
                    (
                        "in parent.block_table:",
                        "in parent.block_table[: parent.num_computed_tokens // self.block_size]:",
                    ),
                    (
                        "parent.block_table.copy()",
                        "parent.block_table[: parent.num_computed_tokens // self.block_size]",
                    ),
                ),
            ),
        ),
    ),
)
