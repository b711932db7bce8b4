"""Chapter 7: the prefix cache learns full blocks, and forgets a block that is taken for other text."""

from labs.learn.exercise import Build, Mistake
from labs.learn.given import subclass_of
from labs.learn.prefixes import (
    Visit,
    Visits,
    describe_visits,
    draw_wrong_blocks,
    one_by_one,
    run_visits,
    visits,
)
from labs.learn.texts import Text

ANSWER = subclass_of("one_file", "BlockManager", "Blocks", ("take", "register"), ("Sequence",))
FORGET = """        if block_id in self.hash_of_block:
            del self.block_of_hash[self.hash_of_block.pop(block_id)]
"""
KEEP_FIRST = "            if block_hash not in self.block_of_hash:\n"
KEEP = "                self.block_of_hash[block_hash], self.hash_of_block[block_id] = block_id, block_hash\n"

EXERCISES = (
    Build(
        name="register_blocks",
        chapter="07_sharing",
        title=Text("Register blocks, and forget them", "登记块，忘掉块"),
        task=Text(
            "The prefix cache is two dicts: `self.block_of_hash` (hash → block) and `self.hash_of_block` (block → "
            "hash).\n"
            "Write two methods.\n"
            "`take()` returns the block that became free first, which is the first key of the dict `self.free`. "
            "Remove\n"
            "it from `self.free`, and set `self.num_owners` of it to 1. Other text will be written to it: if it has a\n"
            "hash, remove it from both dicts.\n"
            "`register(seq, num_before)` is called after a step. `seq` had `num_before` computed tokens before it, "
            "and\n"
            "has `seq.num_computed_tokens` now. Put the blocks that have become full in this step into both dicts.\n"
            "`self.hash_block(seq, i)` is the hash of block i of the table. If another block has the same hash "
            "already\n"
            "(two sequences computed the same tokens), that first block stays, and the new one is not registered.\n\n"
            "Example: blocks of 2, table [3, 0], `num_before` 1 and now 3: block 3 (entry 0) has become full.",
            "前缀缓存是两个字典：`self.block_of_hash`（哈希值 → 块）和 `self.hash_of_block`（块 → 哈希值）。"
            "写两个方法。\n"
            "`take()` 返回最早变空闲的块，也就是字典 `self.free` 的第一个键。把它从 `self.free` 里取出，\n"
            "把它的 `self.num_owners` 设为 1。它会写入别的文本：如果它有哈希值，要从两个字典里都删掉。\n"
            "`register(seq, num_before)` 在一步之后调用。这一步之前，`seq` 有 `num_before` 个已计算的 token，\n"
            "现在有 `seq.num_computed_tokens` 个。把这一步里填满的块加到两个字典里。`self.hash_block(seq, i)`\n"
            "是块表第 i 项的哈希值。如果已有别的块是这个哈希值（两个序列算了同样的 token），就保留先来的块，"
            "不登记新的。\n\n"
            "例：每块 2 个 token，块表是 [3, 0]，`num_before` 是 1，现在是 3：3 号块（第 0 项）填满了。",
        ),
        names=(
            "self.free",
            "self.num_owners",
            "self.block_of_hash",
            "self.hash_of_block",
            "self.hash_block(seq, i)",
            "self.block_size",
            "seq.num_computed_tokens",
            "seq.block_table",
        ),
        hints=(
            Text(
                "`next(iter(self.free))` is the first key. The full blocks after the step are the entries 0 … "
                "`seq.num_computed_tokens // self.block_size - 1`.",
                "`next(iter(self.free))` 是第一个键。这一步之后，满块是第 0 项到第 "
                "`seq.num_computed_tokens // self.block_size - 1` 项。",
            ),
            Text(
                "`self.hash_of_block.pop(block_id)` returns the hash and removes the entry: use it to delete the other "
                "entry.",
                "`self.hash_of_block.pop(block_id)` 返回哈希值，并删掉这一项；用它去删另一个字典里的那一项。",
            ),
            Text(
                "`register` is a loop over `range(num_before // self.block_size, seq.num_computed_tokens // "
                "self.block_size)`. In it, write both dicts only if the hash is not in `self.block_of_hash`.",
                "`register` 是对 `range(num_before // self.block_size, seq.num_computed_tokens // self.block_size)` "
                "的循环。循环里，只有哈希值不在 `self.block_of_hash` 里时，才写两个字典。",
            ),
        ),
        answer=ANSWER,
        holes=("Blocks.take", "Blocks.register"),
        engine_parts=(
            ("Blocks.take", "BlockManager.take"),
            ("Blocks.register", "BlockManager.register"),
        ),
        run=run_visits,
        examples=(
            one_by_one(3, 2, (0, 1, 2, 1, 0), (2, 2, 1), (0, 1, 2, 1, 2)),
            one_by_one(2, 2, (0, 1, 2), (2, 2, 1), (2, 2, 0)),
            Visits(6, 2, 9, ((Visit((0, 1, 2)), Visit((0, 1, 0))), (Visit((2, 2, 2, 2, 2)),), (Visit((0, 1, 1)),))),
            Visits(6, 2, 3, ((Visit((0, 1, 2, 1, 0), True),), (Visit((0, 1, 2, 1, 1)),), (Visit((2,)),))),
            Visits(4, 2, 9, ((Visit((0, 1, 2)), Visit((0, 1, 0))), (Visit((2, 2, 1, 1, 1)),), (Visit((0, 1, 1)),))),
            Visits(6, 2, 9, ((Visit((0, 0, 0, 0, 0), True),) * 2, (Visit((0,)),), (Visit((0,)),))),
        ),
        cases=lambda: visits(has_chunks=True),
        describe=describe_visits,
        draw=draw_wrong_blocks,
        mistakes=(
            Mistake(
                Text("A stale hash", "过期的哈希值"),
                Text(
                    "The block is taken for other text, but the cache still has its old hash. The next sequence that "
                    "begins with the old text finds the block, and reads K and V of the other text.",
                    "这个块已用于别的文本，缓存里却还是旧的哈希值。下一个以旧文本开头的序列会找到它，读到别的文本的 K "
                    "和 V。",
                ),
                ((FORGET, ""),),
            ),
            Mistake(
                Text("The block is forgotten in one dict only", "只从一个字典里删了"),
                Text(
                    "`hash_of_block` still says which hash the block had. When the block is taken again, this hash is "
                    "removed, although another block may have it by then.",
                    "`hash_of_block` 里还留着这个块以前的哈希值。再次取这个块时，会按它去删，"
                    "而那时它可能属于另一个块。",
                ),
                (("self.hash_of_block.pop(block_id)", "self.hash_of_block[block_id]"),),
            ),
            Mistake(
                Text("The block freed last is taken", "取了最后变空闲的块"),
                Text(
                    "The block that became free first has been unused for the longest time (least recently used). "
                    "Taking the newest one overwrites what was used a moment ago.",
                    "最早变空闲的块，最久没有用过（最近最少使用，LRU）。取最新的块，会覆盖刚刚用过的内容。",
                ),
                (("next(iter(self.free))", "next(reversed(self.free))"),),
            ),
            Mistake(
                Text("The taken block has no owner", "取走的块没有所有者"),
                Text(
                    "`num_owners` of the block is still 0. When its sequence releases it, the count becomes -1, and "
                    "the "
                    "block never becomes free again.",
                    "这个块的 `num_owners` 还是 0。序列归还它时会变成 -1，它就再也不会变空闲。",
                ),
                (("        self.num_owners[block_id] = 1\n", ""),),
            ),
            Mistake(
                Text("A block that is not full is registered", "登记了没填满的块"),
                Text(
                    "More tokens will be written to the block, so its text is not known yet. Only full blocks can be "
                    "shared by their hash: round down.",
                    "这个块还要写入别的 token，它的文本还没定。只有满块才能按哈希值共享：要向下取整。",
                ),
                (("seq.num_computed_tokens // self.block_size)", "self.num_blocks_for(seq.num_computed_tokens))"),),
            ),
            Mistake(
                Text("A block is registered before it is computed", "还没算就登记了"),
                Text(
                    "A step may compute only a part of a prompt. The blocks of the rest are empty, and a sequence that "
                    "finds them reads nothing useful. Count `num_computed_tokens`, not `token_ids`.",
                    "一步可能只算了提示词的一部分，其余的块还是空的，找到它们的序列读不到有用的内容。"
                    "要看 `num_computed_tokens`，不是 `token_ids`。",
                ),
                (("seq.num_computed_tokens // self.block_size)", "len(seq.token_ids) // self.block_size)"),),
            ),
            Mistake(
                Text("A block that continues is left out", "漏了接着填满的块"),
                Text(
                    "If the step before has left a block partly filled, that block becomes full in this step: the "
                    "first "
                    "entry is `num_before // self.block_size`, rounded down.",
                    "上一步没填满的块，会在这一步填满：第一项是 `num_before // self.block_size`，要向下取整。",
                ),
                (("range(num_before // self.block_size,", "range(self.num_blocks_for(num_before),"),),
            ),
            Mistake(
                Text("All full blocks are registered in each step", "每一步都登记所有满块"),
                Text(
                    "The blocks before `num_before // self.block_size` were registered in an earlier step. Going "
                    "through "
                    "all of them again takes longer with each step, and registers copies that were left out before.",
                    "`num_before // self.block_size` 之前的块，在以前的步里已经处理过。每步都从头处理，会越来越慢，"
                    "还会把以前没有登记的相同块登记进去。",
                ),
                (("range(num_before // self.block_size,", "range(0,"),),
            ),
            Mistake(
                Text("The second of two equal blocks replaces the first", "后来的块替换了先来的"),
                Text(
                    "Both blocks have the same K and V. If the second one replaces the first, the first still has an "
                    "entry in `hash_of_block`; when it is taken, the hash of the second is forgotten. Keep the first.",
                    "两个块的 K 和 V 相同。如果后来的替换先来的，先来的在 `hash_of_block` 里还有一项；取走它时，"
                    "后来的块的哈希值就被删掉。应保留先来的。",
                ),
                ((KEEP_FIRST + KEEP, KEEP[4:]),),
            ),
            Mistake(
                Text("The second of two equal blocks gets the hash, too", "后来的块也记了哈希值"),
                Text(
                    "`block_of_hash` keeps the first block, but `hash_of_block` has both. When the second one is "
                    "taken, "
                    "the entry of the first is removed, and its content is never found again.",
                    "`block_of_hash` 保留了先来的块，`hash_of_block` 却两个都有。取走后来的块时，"
                    "先来的那一项会被删掉，它的内容就再也找不到了。",
                ),
                (
                    (
                        KEEP,
                        "                self.block_of_hash[block_hash] = block_id\n"
                        "            self.hash_of_block[block_id] = block_hash\n",
                    ),
                ),
            ),
            Mistake(
                Text("The taken block stays free", "取走的块还是空闲的"),
                Text(
                    "`next(iter(self.free))` only reads the block. Delete it from `self.free`, or the next "
                    "call takes it again.",
                    "`next(iter(self.free))` 只是读。要从 `self.free` 里删掉，否则下一次会再取到它。",
                ),
                (("        del self.free[block_id]\n", ""),),
            ),
            Mistake(
                Text("The hash still names the block", "哈希仍然指向这个块"),
                Text(
                    "Both dicts must forget the block. `block_of_hash` still finds it, although it will hold "
                    "other tokens.",
                    "两个字典都要忘掉这个块。否则 `block_of_hash` 还会找到它，而里面将是别的 token。",
                ),
                (
                    (
                        "            del self.block_of_hash[self.hash_of_block.pop(block_id)]\n",
                        "            self.hash_of_block.pop(block_id)\n",
                    ),
                ),
            ),
            Mistake(
                Text("The whole prefix cache is forgotten", "忘掉了整个前缀缓存"),
                Text(
                    "Only the content of the taken block is lost. The other blocks can still be found.",
                    "丢掉的只是取走的那个块的内容，其他的块仍然可以找到。",
                ),
                (
                    (
                        "            del self.block_of_hash[self.hash_of_block.pop(block_id)]\n",
                        "            self.hash_of_block.clear()\n            self.block_of_hash.clear()\n",
                    ),
                ),
            ),
            Mistake(
                Text("Nothing is registered", "什么都没有登记"),
                Text(
                    "Register each block that has become full since `num_before`.",
                    "从 `num_before` 起填满的每个块都要登记。",
                ),
                (("range(num_before // self.block_size, seq.num_computed_tokens // self.block_size)", "range(0)"),),
            ),
            Mistake(
                Text("Only the first block is registered", "只登记了第一块"),
                Text(
                    "All full blocks are registered: a long prompt fills several in one step.",
                    "所有满的块都要登记：长提示词一步就会填满好几块。",
                ),
                (
                    (
                        "range(num_before // self.block_size, seq.num_computed_tokens // self.block_size)",
                        "range(num_before // self.block_size, min(1, seq.num_computed_tokens // self.block_size))",
                    ),
                ),
            ),
            Mistake(
                Text("The last full block is left out", "漏了最后一个满块"),
                Text(
                    "The end of `range` is not included, so `num_computed_tokens // block_size` is right: it "
                    "is the number of full blocks.",
                    "`range` 不含终点，所以 `num_computed_tokens // block_size` 就对了：它是满块的个数。",
                ),
                (
                    (
                        "range(num_before // self.block_size, seq.num_computed_tokens // self.block_size)",
                        "range(num_before // self.block_size, seq.num_computed_tokens // self.block_size - 1)",
                    ),
                ),
            ),
            Mistake(
                Text("The wrong block is registered", "登记错了块"),
                Text(
                    "Hash `i` belongs to block `i` of the table, not to its last block.",
                    "第 `i` 个哈希对应块表的第 `i` 块，而不是最后一块。",
                ),
                (("self.hash_block(seq, i), seq.block_table[i]", "self.hash_block(seq, i), seq.block_table[-1]"),),
            ),
            Mistake(
                Text("The two dicts are exchanged", "两个字典写反了"),
                Text(
                    "`block_of_hash` has hashes as keys and blocks as values; `hash_of_block` is the other way round.",
                    "`block_of_hash` 的键是哈希、值是块；`hash_of_block` 正相反。",
                ),
                (
                    (
                        "self.block_of_hash[block_hash], self.hash_of_block[block_id] = block_id, block_hash",
                        "self.hash_of_block[block_hash], self.block_of_hash[block_id] = block_id, block_hash",
                    ),
                ),
            ),
            Mistake(
                Text("The block does not know its hash", "块不知道自己的哈希"),
                Text(
                    "Without an entry in `hash_of_block`, `take` cannot evict the block: the prefix cache "
                    "finds it after it was overwritten.",
                    "`hash_of_block` 里没有这一项，`take` 就无法清除它：块被覆盖之后，前缀缓存还会找到它。",
                ),
                (
                    (
                        "self.block_of_hash[block_hash], self.hash_of_block[block_id] = block_id, block_hash",
                        "self.block_of_hash[block_hash] = block_id",
                    ),
                ),
            ),
        ),
    ),
)
