"""What people write first to mend the bugs of `find_the_bug`, and what is still wrong then."""

from labs.learn.seen import Mistake
from labs.learn.texts import Text

CHECK = "        if num_new > len(self.free) - num_free_hits:\n            return False\n"
SHARE = """\
        for block_id in hits:
            self.free.pop(block_id, None)
            self.num_owners[block_id] += 1
"""
FREE = "                self.free[block_id] = None\n"
FIND = "for i in range((len(seq.token_ids) - 1) // self.block_size):"
IS_MISSING = "            if block_id is None:\n"
EVICT = "            del self.block_of_hash[self.hash_of_block.pop(block_id)]\n"
KEEP = "            self.hash_of_block.pop(block_id)\n"
REGISTER = "range(num_before // self.block_size, seq.num_computed_tokens // self.block_size)"
TOKENS = "tokens = seq.token_ids[j * self.block_size : (j + 1) * self.block_size]"
HALF_SHARE = (
    ("        for block_id in parent.block_table:\n", "        for block_id in self.full_blocks(parent):\n"),
    ("child.block_table = parent.block_table.copy()", "child.block_table = self.full_blocks(parent)"),
    (
        "child.num_computed_tokens = parent.num_computed_tokens\n",
        "child.num_computed_tokens = len(child.block_table) * self.block_size\n\n"
        "    def full_blocks(self, seq: Sequence) -> list[int]:\n"
        "        return seq.block_table[: seq.num_computed_tokens // self.block_size]\n",
    ),
)
ADMITTED = (
    "            self.running.append(self.waiting.popleft())\n"
    "            num_new_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, budget)\n"
)
PREEMPT = "            self.block_manager.release(last)\n"
TAKE = "block_id = next(iter(self.free))"
OWNER = "        self.num_owners[block_id] = 1\n"
ROUND_UP = "return -(-num_tokens // self.block_size)  # rounded up"


def undo(hits: str) -> tuple[tuple[str, str], ...]:
    """Return the change that shares first, and gives all hits back if the check fails."""
    back = (
        f"            for block_id in {hits}:\n                self.num_owners[block_id] -= 1\n"
        "                if not self.num_owners[block_id]:\n                    self.free[block_id] = None\n"
    )
    check = f"        if num_new > len(self.free):\n{back}            return False\n"
    return ((CHECK, ""), (SHARE, SHARE + check))


ALL_HITS = Mistake(
    Text("All hits are subtracted", "减去了所有命中的块"),
    Text(
        "A hit that another sequence owns is not in `self.free`, so it needs no subtraction. With it, a request waits "
        "although it fits. Subtract only the hits that are free.",
        "别的序列拥有的命中块本来就不在 `self.free` 里，不必再减。减了的话，放得下的请求也要等。只减去空闲的命中块。",
    ),
    ((CHECK, CHECK.replace("num_free_hits", "len(hits)")),),
)
NO_FREE_HITS = Mistake(
    Text("Free hits are counted twice", "空闲的命中块算了两次"),
    Text(
        "A hit may be free: then it is in `self.free` too, and the request cannot take it as a new block as well. The "
        "check passes, and then `take` finds no block. Before the hits are shared, compare with `len(self.free)` minus "
        "the hits that are free.",
        "命中的块可能是空闲的，这时它也在 `self.free` 里，不能再当新块取走。检查通过了，`take` 却取不到块。"
        "在共享命中块之前检查时，要用 `len(self.free)` 减去空闲的命中块数来比较。",
    ),
    ((CHECK, CHECK.replace(" - num_free_hits", "")),),
)
LATE_CHECK = Mistake(
    Text("A failed admission keeps the hits", "准入失败后没有归还命中的块"),
    Text(
        "After the hits are shared, `len(self.free)` is right to compare with. But now `try_admit` has counted an "
        "owner of each hit and removed it from `self.free`, and returns False: nobody gives these blocks back.",
        "共享命中块之后，与 `len(self.free)` 比较是对的。但这时 `try_admit` 已经给每个命中块加了所有者，"
        "并把它从 `self.free` 里取出，却返回 False：没有人会归还这些块。",
    ),
    ((CHECK, ""), (SHARE, SHARE + "        if num_new > len(self.free):\n            return False\n")),
)
LEAK_MENDED = Text("The leak is mended, the order of the free blocks is not", "不再泄漏了，但空闲块的顺序变了")
LEAK_MENDED_WHY = Text(
    "Owners and free blocks are complete again. But the free hits are at the end of `self.free` now, in the order in "
    "which they were put back, although nobody has used them: they are evicted later than they should be, and each "
    "failed attempt moves them again. Check before anything is changed; then nothing has to be undone.",
    "所有者和空闲块都恢复了。但空闲的命中块现在按放回的顺序排在 `self.free` 的末尾，尽管没有人用过它们："
    "它们会比应有的时间晚被淘汰，而且每失败一次就再移动一次。应在改动任何东西之前检查，那就什么都不用撤销。",
)
OTHER_END = Mistake(
    Text("The block freed last is taken first", "最后释放的块最先被取走"),
    Text(
        "Then the blocks that were used a moment ago are overwritten first. `take` is right: the block that has been "
        "free for longest goes first. What is wrong is the order in which a sequence frees its blocks.",
        "这样，刚刚用过的块会最先被覆盖。`take` 是对的：空闲最久的块最先取走。错的是一个序列释放自己的块的顺序。",
    ),
    ((TAKE, "block_id = next(reversed(self.free))"), ("in reversed(seq.block_table):", "in seq.block_table:")),
)
END_COMPUTED_AGAIN = Mistake(
    Text("Each answer computes the end of the prompt again", "每个回答都重算了提示词的结尾"),
    Text(
        "No answer disturbs another one now. But the last block of the prompt is not shared any more: each answer "
        "needs a block for it at once, and computes its tokens again. Let them share it until one of them writes to "
        "it.",
        "回答之间不再互相干扰。但提示词的最后一块不再共享：每个回答立刻就要一个块，并把其中的 token 重算一遍。"
        "应一直共享，直到有一个回答要写它。",
    ),
    HALF_SHARE,
)
COPY_ALWAYS = Mistake(
    Text("A copy for the only owner", "只有一个所有者也复制"),
    Text(
        "`num_owners` counts the sequence itself. With 1, no other sequence reads the block, and it can be written to "
        "without a copy.",
        "`num_owners` 也包括这个序列自己。等于 1 时没有别的序列读这个块，可以直接写，不用复制。",
    ),
    (("self.num_owners[seq.block_table[i]] > 1", "self.num_owners[seq.block_table[i]] > 0"),),
)

NEAR_REPAIRS: dict[str, tuple[Mistake, ...]] = {
    "bug_1": (
        Mistake(
            Text("Free blocks are forgotten", "空闲的块被忘掉了"),
            Text(
                "Wrong answers are gone, and so are most hits: a free block still holds its content, and can be found "
                "until another sequence takes it. Remove the hash in `take`, not in `release`.",
                "不再有错误的回答，但大部分命中也没有了：空闲的块里内容还在，在别的序列取走它之前都可以找到。"
                "要在 `take` 里删掉哈希，不是在 `release` 里。",
            ),
            ((FREE, f"{FREE}                if block_id in self.hash_of_block:\n        {EVICT}"),),
        ),
        Mistake(
            Text("A hash of other content is good enough", "有别的内容的哈希也算数"),
            Text(
                "`find` now asks whether the block has a hash. But it may be the hash of what it holds now: other "
                "tokens. Let `take` remove the old entry of `block_of_hash`.",
                "`find` 现在会问这个块有没有哈希。但那可能是它现在的内容的哈希，也就是别的 token。"
                "要让 `take` 删掉 `block_of_hash` 里的旧条目。",
            ),
            ((EVICT, KEEP), (IS_MISSING, "            if block_id is None or block_id not in self.hash_of_block:\n")),
        ),
        Mistake(
            Text("The old entry is in the way", "旧条目挡了路"),
            Text(
                "`find` now notices that the block holds other tokens. But the old entry of `block_of_hash` stays, and "
                "`register` adds no block with a hash that is already there: these tokens are never found again. Let "
                "`take` remove the entry.",
                "`find` 现在会发现块里是别的 token。但 `block_of_hash` 里的旧条目还在，而哈希已经存在时，`register` "
                "不会登记新块：这些 token 再也找不到了。要让 `take` 删掉这个条目。",
            ),
            (
                (EVICT, KEEP),
                (
                    IS_MISSING,
                    "            if block_id is None or self.hash_of_block.get(block_id) != self.hash_block(seq, i):\n",
                ),
            ),
        ),
    ),
    "bug_2": (
        NO_FREE_HITS,
        Mistake(
            Text("Only the owners are undone", "只撤销了所有者"),
            Text(
                "The owners are right again, but the free hits were also removed from `self.free`, and are not put "
                "back: no sequence owns them, and they are not free either. Check before anything is changed; then "
                "nothing has to be undone.",
                "所有者的个数恢复了，但空闲的命中块也已从 `self.free` 里取出，没有放回去：没有序列拥有它们，"
                "它们也不是空闲的。应在改动任何东西之前检查，那就什么都不用撤销。",
            ),
            (
                (CHECK, ""),
                (
                    SHARE,
                    f"{SHARE}        if num_new > len(self.free):\n            for block_id in hits:\n"
                    "                self.num_owners[block_id] -= 1\n            return False\n",
                ),
            ),
        ),
        Mistake(LEAK_MENDED, LEAK_MENDED_WHY, undo("hits")),
        Mistake(LEAK_MENDED, LEAK_MENDED_WHY, undo("reversed(hits)")),
        ALL_HITS,
    ),
    "bug_3": (
        ALL_HITS,
        LATE_CHECK,
        Mistake(
            Text("A request that fits exactly is refused", "恰好放得下的请求被拒绝了"),
            Text(
                "`num_new` may be equal to the number of blocks that are left: then the request fits exactly.",
                "`num_new` 可以等于剩下的块数：这时请求恰好放得下。",
            ),
            ((CHECK, CHECK.replace("num_new >", "num_new >=")),),
        ),
    ),
    "bug_4": (
        Mistake(
            Text("A step writes to a shared block", "一步写入了共享的块"),
            Text(
                "Now the last token is computed. But its K and V are written to a cached block, which other sequences "
                "may read at this moment. `find` must leave this block out, so that the sequence gets its own.",
                "现在最后一个 token 会计算了。但它的 K 和 V 写进了缓存的块，而别的序列可能正在读这个块。"
                "`find` 不能返回这个块，这样序列才会得到自己的块。",
            ),
            (
                (FIND, "for i in range(len(seq.token_ids) // self.block_size):"),
                ("len(hits) * self.block_size\n", "min(len(hits) * self.block_size, len(seq.token_ids) - 1)\n"),
            ),
        ),
        Mistake(
            Text("One block less for all prompts", "所有提示词都少找了一块"),
            Text(
                "Only a prompt that ends with a full block has its last token in it. With 5 tokens in blocks of 2, "
                "both full blocks may be found. Look at the blocks before the last token: `len(seq.token_ids) - 1`.",
                "只有提示词恰好填满最后一块时，最后一个 token 才在满块里。"
                "每块 2 个、共 5 个 token 时，两个满块都可以用。"
                "应查找最后一个 token 之前的块：`len(seq.token_ids) - 1`。",
            ),
            ((FIND, "for i in range(len(seq.token_ids) // self.block_size - 1):"),),
        ),
        Mistake(
            Text("A token that is not there", "不存在的 token"),
            Text(
                "All tokens count as computed, so 'at least one new token' is one behind the end of the sequence. The "
                "last token must not count as computed: let `find` leave its block out.",
                "所有 token 都算作已计算，所以“至少一个新 token”就落在了序列末尾之后。最后一个 token 不能算作已计算："
                "`find` 不能返回它的块。",
            ),
            (
                (FIND, "for i in range(len(seq.token_ids) // self.block_size):"),
                (ADMITTED, ADMITTED.replace("min(", "max(1, min(").replace(", budget)", ", budget))")),
            ),
        ),
    ),
    "bug_5": (
        Mistake(
            Text("A block that a step continues is not registered", "接着写满的块没有登记"),
            Text(
                "A block that was partly filled before this step may be full now. Start with the block of token "
                "`num_before`, which is `num_before // block_size`, rounded down.",
                "这一步之前填了一部分的块，现在可能满了。应从 token `num_before` 所在的块开始，"
                "即 `num_before // block_size`，向下取整。",
            ),
            ((REGISTER, REGISTER.replace("num_before // self.block_size,", "self.num_blocks_for(num_before),")),),
        ),
        Mistake(
            Text("The last full block is not registered", "最后一个满块没有登记"),
            Text(
                "The last block of the sequence may be full. Then nothing more is written to it, and it can be shared.",
                "序列的最后一块可能是满的。那就不会再写它，可以共享。",
            ),
            ((REGISTER, REGISTER.replace("size)", "size - 1)")),),
        ),
    ),
    "bug_6": (
        Mistake(
            Text("Two bytes are not enough", "两个字节不够"),
            Text(
                "Qwen3 has 151,936 tokens, and two bytes tell only 65,536 apart. Hash the whole token ids.",
                "Qwen3 有 151,936 个 token，两个字节只能区分 65,536 个。要对完整的 token id 做哈希。",
            ),
            ((TOKENS, f"tokens = [i & 0xFFFF for i in {TOKENS.removeprefix('tokens = ')}]"),),
        ),
        Mistake(
            Text("Large token ids are one", "大的 token id 都成了一个"),
            Text(
                "No exception any more, but all token ids from 255 on have the same hash. Hash the whole token ids.",
                "不再有异常，但从 255 起的所有 token id 哈希都相同。要对完整的 token id 做哈希。",
            ),
            ((TOKENS, f"tokens = [min(i, 255) for i in {TOKENS.removeprefix('tokens = ')}]"),),
        ),
        Mistake(
            Text("Numbers without a separator", "数字之间没有分隔"),
            Text(
                "The tokens 1, 12 and the tokens 11, 2 give the same text: 112. Hash the list, or put a separator "
                "between the numbers.",
                "token 1、12 和 token 11、2 得到同样的文本：112。应对列表做哈希，或者在数字之间加分隔符。",
            ),
            ((TOKENS, f'tokens = "".join(map(str, {TOKENS.removeprefix("tokens = ")}))'),),
        ),
    ),
    "bug_7": (
        OTHER_END,
        Mistake(
            Text("The order of the block numbers", "按块号排序"),
            Text(
                "Block numbers say nothing about the order of the tokens. The first block of the *table* is needed by "
                "most sequences, so it must be freed last: go through the table in reverse.",
                "块号与 token 的顺序无关。*块表*的第一块有最多的序列要用，所以要最后释放：倒着遍历块表。",
            ),
            (("in reversed(seq.block_table):", "in sorted(seq.block_table, reverse=True):"),),
        ),
    ),
    "bug_8": (
        Mistake(
            Text("At least one token", "至少一个 token"),
            Text(
                "No step gets zero tokens now. But the output tokens that the sequence already has are still not part "
                "of the work: it needs more steps than it should. Compute all tokens, not only the prompt.",
                "现在不会再分到 0 个 token。但序列已有的输出 token 还是没有算进工作量，所以步数比应有的多。"
                "要计算全部 token，不只是提示词。",
            ),
            (
                (
                    ADMITTED,
                    "            self.running.append(self.waiting.popleft())\n"
                    "            num_new = max(1, seq.num_prompt_tokens - seq.num_computed_tokens)\n"
                    "            num_new_tokens = min(num_new, budget)\n",
                ),
            ),
        ),
        Mistake(
            Text("The output counts as prompt", "输出算成了提示词"),
            Text(
                "The work is right now. But `max_tokens` is counted from `num_prompt_tokens`: a preempted request "
                "gets more output tokens than it asked for.",
                "工作量对了。但 `max_tokens` 是从 `num_prompt_tokens` 算起的："
                "被抢占过的请求会得到比要求更多的输出 token。",
            ),
            ((PREEMPT, f"{PREEMPT}            last.num_prompt_tokens = len(last.token_ids)\n"),),
        ),
        Mistake(
            Text("The output is thrown away", "丢掉了已有的输出"),
            Text(
                "Only K and V are lost. The user has seen the output tokens; without them they are sampled again, one "
                "step each.",
                "丢的只是 K 和 V。输出的 token 用户已经看到；丢掉的话，要一步一个重新采样。",
            ),
            ((PREEMPT, f"{PREEMPT}            del last.token_ids[last.num_prompt_tokens :]\n"),),
        ),
    ),
    "bug_9": (
        Mistake(
            Text("The first owner that ends frees the block", "第一个结束的所有者就释放了块"),
            Text(
                "`release` now frees every block whose count is 0 or less. But a block that two sequences share has a "
                "count that is one too low: it becomes free while the second one still reads it. Count the owner in "
                "`take`.",
                "`release` 现在会释放所有计数小于等于 0 的块。但两个序列共享的块，计数少了 1："
                "第二个序列还在读，它就变空闲了。"
                "要在 `take` 里把所有者算进去。",
            ),
            (
                (OWNER, OWNER.replace("= 1", "= 0")),
                ("            if not self.num_owners[block_id]:\n", "            if self.num_owners[block_id] <= 0:\n"),
            ),
        ),
        Mistake(
            Text("Only admitted blocks have an owner", "只有准入时的块有所有者"),
            Text(
                "`try_admit` counts the owner now, but `try_grow` calls `take` too: each block that a sequence gets "
                "while it grows is still lost. Count the owner in `take`, which both of them call.",
                "`try_admit` 现在会算上所有者，但 `try_grow` 也调用 `take`：序列变长时得到的块还是会丢。"
                "要在两者都调用的 `take` 里算。",
            ),
            (
                (OWNER, OWNER.replace("= 1", "= 0")),
                (
                    "        seq.num_computed_tokens = len(hits) * self.block_size\n",
                    "        for block_id in seq.block_table[len(hits) :]:\n            self.num_owners[block_id] = 1\n"
                    "        seq.num_computed_tokens = len(hits) * self.block_size\n",
                ),
            ),
        ),
    ),
    "bug_10": (COPY_ALWAYS, END_COMPUTED_AGAIN),
    "bug_11": (
        END_COMPUTED_AGAIN,
        Mistake(
            Text("Two owners for any number of answers", "不论几个回答都是两个所有者"),
            Text(
                "Each call of `fork` adds one owner. With three answers, a block of the prompt has three owners: add "
                "1, do not set the count to 2.",
                "每次调用 `fork` 都增加一个所有者。三个回答时，提示词的块有三个所有者：要加 1，不能设为 2。",
            ),
            (
                (
                    "        for block_id in parent.block_table:\n            self.num_owners[block_id] += 1\n",
                    "        for block_id in parent.block_table:\n            self.num_owners[block_id] = 2\n",
                ),
            ),
        ),
    ),
    "bug_12": (
        Mistake(
            Text("Rounded down", "向下取整"),
            Text(
                "5 tokens need two blocks of 4: the fifth token needs a slot too.",
                "5 个 token 需要两个大小为 4 的块：第 5 个 token 也要有槽位。",
            ),
            ((ROUND_UP, "return num_tokens // self.block_size"),),
        ),
        Mistake(
            Text("At least one block, and rounded down", "至少一块，但向下取整"),
            Text(
                "5 tokens need two blocks of 4, not one: each started block counts.",
                "5 个 token 需要两个大小为 4 的块，不是一个：开了头的块也算。",
            ),
            ((ROUND_UP, "return max(1, num_tokens // self.block_size)"),),
        ),
        Mistake(
            Text("Rounded to the nearest number", "四舍五入"),
            Text(
                "`round` rounds 5 / 4 down to one block. Each started block counts: round up.",
                "`round` 把 5 / 4 舍成一块。开了头的块也算：要向上取整。",
            ),
            ((ROUND_UP, "return round(num_tokens / self.block_size)"),),
        ),
    ),
}
