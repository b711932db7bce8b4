"""Chapter 7: admission with a prefix cache: found blocks that are free get an owner again."""

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

LAST = "(len(seq.token_ids) - 1) // self.block_size"
BREAK = "                break\n"
REVIVE = """        for block_id in hits:
            self.free.pop(block_id, None)
            self.num_owners[block_id] += 1
"""
TABLE = "        seq.block_table = hits + [self.take() for _ in range(num_new)]\n"
CHECK = "        if num_new > len(self.free) - num_free_hits:\n            return False\n"

EXERCISES = (
    Build(
        name="revive_blocks",
        chapter="07_sharing",
        title=Text("Admission with a prefix cache", "有前缀缓存的准入"),
        task=Text(
            "Write two methods.\n"
            "`find(seq)` returns a list of the cached blocks that `seq` begins with. `self.hash_block(seq, i)` is the\n"
            "hash of full block i, and the dict `self.block_of_hash` has the block with this hash. Stop at the first\n"
            "block that is not found. The last token is always computed, so never look for a block that contains it.\n"
            "`try_admit(seq)` builds the block table: the found blocks, then blocks from `self.take()` for the other\n"
            "tokens. A found block may be free: remove it from `self.free`. Each found block gets one more owner\n"
            "(`self.num_owners`). Set `seq.num_computed_tokens` to the number of found tokens, and return True. If "
            "too\n"
            "few blocks are free, change nothing, and return False: found blocks that are free cannot be taken as "
            "well.\n\n"
            "Example: blocks of 2, `self.free` has 0, 1 and 2 as keys; block 1 holds 5 6 and is cached. A sequence\n"
            "5 6 | 7 finds [1], gets the table [1, 0], and has 2 computed tokens. Block 2 is still free. A sequence\n"
            "5 6 finds nothing: its last token is in that block.",
            "写两个方法。\n"
            "`find(seq)` 返回 `seq` 开头能在缓存里找到的块的列表。`self.hash_block(seq, i)` 是第 i 个满块的哈希值，\n"
            "字典 `self.block_of_hash` 由哈希值给出块号。遇到第一个找不到的块就停下。\n"
            "最后一个 token 总要计算，所以不要查找包含它的块。\n"
            "`try_admit(seq)` 填块表：先放找到的块，其余的 token 用 `self.take()` 取块。找到的块可能是空闲的，\n"
            "要把它从 `self.free` 里取出。每个找到的块多一个所有者（`self.num_owners`）。把 `seq.num_computed_tokens`\n"
            "设为找到的 token 数，返回 True。空闲块不够时，什么都不要改，返回 False；找到的空闲块不能再当新块取走。\n\n"
            "例：每块 2 个 token，`self.free` 的键是 0、1、2；1 号块存着 5 6，在缓存里。序列 5 6 | 7 找到 [1]，\n"
            "块表是 [1, 0]，已计算 2 个 token，2 号块仍空闲。序列 5 6 什么都找不到：它的最后一个 token 就在这一块里。",
        ),
        names=(
            "self.free",
            "self.take()",
            "self.num_owners",
            "self.block_of_hash",
            "self.hash_block(seq, i)",
            "self.block_size",
            "self.num_blocks_for(n)",
            "seq.token_ids",
            "seq.num_computed_tokens",
            "seq.block_table",
        ),
        hints=(
            Text(
                "`find` looks at the blocks 0 … `(len(seq.token_ids) - 1) // self.block_size - 1`.",
                "`find` 查找第 0 块到第 `(len(seq.token_ids) - 1) // self.block_size - 1` 块。",
            ),
            Text(
                "Count how many of the found blocks are free. The sequence fits if the new blocks are at most "
                "`len(self.free)` minus this number. Take found blocks out of `self.free` before you call `take()`.",
                "数一下找到的块里有几个是空闲的。新块数不超过 `len(self.free)` 减去这个数，才放得下。"
                "先把找到的块从 `self.free` 里取出，再调用 `take()`。",
            ),
            Text(
                "For each found block: `self.free.pop(block_id, None)` and `self.num_owners[block_id] += 1`. Then "
                "`seq.block_table = hits + [self.take() for _ in range(num_new)]`.",
                "对每个找到的块：`self.free.pop(block_id, None)` 和 `self.num_owners[block_id] += 1`。然后 "
                "`seq.block_table = hits + [self.take() for _ in range(num_new)]`。",
            ),
        ),
        answer=subclass_of("one_file", "BlockManager", "Blocks", ("find", "try_admit"), ("Sequence",)),
        holes=("Blocks.find", "Blocks.try_admit"),
        engine_parts=(
            ("Blocks.find", "BlockManager.find"),
            ("Blocks.try_admit", "BlockManager.try_admit"),
        ),
        run=run_visits,
        examples=(
            one_by_one(4, 2, (5, 6, 7), (5, 6, 8), (5, 6)),
            one_by_one(3, 2, (0, 1, 2, 1, 0), (0, 1, 2, 1, 2), (0, 1, 2, 1)),
            one_by_one(4, 2, (0, 1, 2, 1, 0), (0, 2, 2), (0, 1, 2, 1, 1, 1, 1)),
            Visits(4, 2, 9, ((Visit((0, 1, 2, 1, 0)),), (Visit((2, 2), True),), (Visit((0, 1, 2, 1, 1, 1, 1)),))),
            Visits(6, 2, 9, ((Visit((0, 1, 2), True),), (Visit((0, 1, 1), True),), (Visit((0, 1, 0)),))),
            one_by_one(5, 2, (0, 1, 2, 1, 0, 0, 2), (1, 1, 1, 1, 2), (0, 1, 2, 1, 0, 0, 1)),
            Visits(
                4,
                2,
                9,
                ((Visit((0, 1, 2, 1, 0)),), (Visit((2,), True),), (Visit((0, 0, 0), True),), (Visit((0, 1, 2, 1, 0)),)),
            ),
            Visits(6, 2, 9, ((Visit((0, 1, 2, 1, 0)),), (Visit((0, 1, 2, 1, 2)),)), forgotten=(2,)),
            Visits(2, 2, 9, ((Visit((0,)),), (Visit((0,)),), (Visit((0, 0), True),), (Visit((0, 0, 0)),))),
        ),
        cases=visits,
        describe=describe_visits,
        draw=draw_wrong_blocks,
        mistakes=(
            Mistake(
                Text("A found block is still free", "找到的块还在空闲块里"),
                Text(
                    "The block has an owner again, so it must leave `self.free`. Otherwise `take()` returns it, "
                    "perhaps "
                    "for this same sequence, and its content is overwritten.",
                    "这个块又有了所有者，必须从 `self.free` 里取出。否则 `take()` 会再把它取走，"
                    "甚至就分给同一个序列，里面的内容就被覆盖了。",
                ),
                (("            self.free.pop(block_id, None)\n", ""),),
            ),
            Mistake(
                Text("Free found blocks are counted twice", "找到的空闲块算了两次"),
                Text(
                    "A found block that is free cannot be a new block at the same time. The new blocks must fit into "
                    "the other free blocks, otherwise `take()` fails when found blocks are already taken.",
                    "找到的空闲块不能同时又当新块。新块只能从其余的空闲块里取，否则取到一半，`take()` 就没有块可取了。",
                ),
                (("len(self.free) - num_free_hits", "len(self.free)"),),
            ),
            Mistake(
                Text("Found blocks that are not free are subtracted, too", "不空闲的块也减掉了"),
                Text(
                    "A block that another sequence owns takes no free block. Subtract only the found blocks that are "
                    "free, otherwise a sequence that fits has to wait.",
                    "别的序列拥有的块不占空闲块。只减去找到的块里空闲的那些，否则放得下的序列也要等待。",
                ),
                (("len(self.free) - num_free_hits", "len(self.free) - len(hits)"),),
            ),
            Mistake(
                Text("New blocks are taken before the found ones", "先取了新块"),
                Text(
                    "`take()` returns the block that has been free for the longest time, and that may be one of the "
                    "found blocks. First remove the found ones from `self.free`.",
                    "`take()` 返回空闲最久的块，它可能正是找到的块之一。要先把找到的块从 `self.free` 里取出。",
                ),
                (
                    (REVIVE, "        new = [self.take() for _ in range(num_new)]\n" + REVIVE),
                    (TABLE, "        seq.block_table = hits + new\n"),
                ),
            ),
            Mistake(
                Text("The found block does not get an owner", "找到的块没有加所有者"),
                Text(
                    "Without an owner more, the block becomes free when another owner ends, and is overwritten while "
                    "this sequence reads it.",
                    "不加所有者，别的所有者一结束，它就变成空闲块，这个序列还在读，它就被覆盖了。",
                ),
                (("            self.num_owners[block_id] += 1\n", ""),),
            ),
            Mistake(
                Text("The found block has one owner", "找到的块只记了一个所有者"),
                Text(
                    "The block may have owners that are running: `+= 1`, not `= 1`.",
                    "这个块可能还有正在运行的所有者：应写 `+= 1`，不是 `= 1`。",
                ),
                (("self.num_owners[block_id] += 1", "self.num_owners[block_id] = 1"),),
            ),
            Mistake(
                Text("The last token is found, too", "连最后一个 token 也找到了"),
                Text(
                    "The step needs the logits of the last token, so this token must be computed. If all blocks of a "
                    "prompt are found, no token is left to compute, and no next token can be sampled.",
                    "这一步需要最后一个 token 的 logits，所以它必须计算。如果提示词的块全都找到，就没有 token 可算，"
                    "也就没有下一个 token。",
                ),
                ((LAST, "len(seq.token_ids) // self.block_size"),),
            ),
            Mistake(
                Text("The computed tokens are not set", "没有设置已计算的 token 数"),
                Text(
                    "`num_computed_tokens` stays 0, so the step computes the found tokens again and writes to shared "
                    "blocks. The cache saves nothing.",
                    "`num_computed_tokens` 还是 0，这一步会把找到的 token 再算一遍，还会写共享的块。缓存就白费了。",
                ),
                (("        seq.num_computed_tokens = len(hits) * self.block_size\n", ""),),
            ),
            Mistake(
                Text("Blocks instead of tokens", "把块数当成了 token 数"),
                Text(
                    "`num_computed_tokens` counts tokens: the found blocks times `block_size`.",
                    "`num_computed_tokens` 数的是 token：找到的块数乘以 `block_size`。",
                ),
                (("len(hits) * self.block_size\n", "len(hits)\n"),),
            ),
            Mistake(
                Text("The search continues after a gap", "找不到之后还继续找"),
                Text(
                    "Entry i of the table must be block i of the text. After the first block that is not found, the "
                    "next found one would be at the wrong entry.",
                    "块表的第 i 项必须是文本的第 i 块。中间缺了一块之后，再找到的块就会放到错误的位置。",
                ),
                ((BREAK, "                continue\n"),),
            ),
            Mistake(
                Text("Nothing is found", "什么都没有找到"),
                Text(
                    "`find` returns the blocks of all hashes that are in `block_of_hash`, up to the first "
                    "that is missing.",
                    "`find` 返回所有在 `block_of_hash` 里的哈希对应的块，直到第一个缺失的为止。",
                ),
                (("            hits.append(block_id)\n", "            break\n"),),
            ),
            Mistake(
                Text("Only the first block is found", "只找到了第一块"),
                Text(
                    "After a hit, look for the next block. Only a missing block ends the search.",
                    "命中之后要继续找下一块，只有找不到时才停止。",
                ),
                (("            hits.append(block_id)\n", "            hits.append(block_id)\n            break\n"),),
            ),
            Mistake(
                Text("One block too few is found", "少找了一块"),
                Text(
                    "Only the last token must be computed. With 5 tokens in blocks of 2, both full blocks "
                    "can be found: `(len(seq.token_ids) - 1) // block_size`.",
                    "只有最后一个 token 必须计算。每块 2 个、共 5 个 token 时，两个满块都可以找："
                    "`(len(seq.token_ids) - 1) // block_size`。",
                ),
                (("(len(seq.token_ids) - 1) // self.block_size", "len(seq.token_ids) // self.block_size - 1"),),
            ),
            Mistake(
                Text("Found blocks get new ones, too", "找到的块又取了新块"),
                Text(
                    "A found block holds its tokens already. Take new blocks only for the rest: subtract `len(hits)`.",
                    "找到的块里已经有那些 token。只为其余的取新块：要减去 `len(hits)`。",
                ),
                ((" - len(hits)\n", "\n"),),
            ),
            Mistake(
                Text("New blocks come first in the table", "新块排在块表前面"),
                Text(
                    "The table is in the order of the tokens: the found blocks hold the beginning of the prompt.",
                    "块表按 token 的顺序排列：找到的块里是提示词的开头。",
                ),
                (("hits + [self.take() for _ in range(num_new)]", "[self.take() for _ in range(num_new)] + hits"),),
            ),
            Mistake(
                Text("Only free blocks are shared", "只共享空闲的块"),
                Text(
                    "A block that another sequence reads can be shared, too: full blocks are never written to.",
                    "别的序列正在读的块也可以共享：满的块不会再被写。",
                ),
                (
                    (
                        "            if block_id is None:\n",
                        "            if block_id is None or block_id not in self.free:\n",
                    ),
                ),
            ),
            Mistake(
                Text("Free blocks are not found", "没有找空闲的块"),
                Text(
                    "A free block still holds its content until it is taken. Take it out of `self.free` and share it.",
                    "空闲块在被取走之前还保留着内容。把它从 `self.free` 里取出来共享。",
                ),
                (
                    (
                        "            if block_id is None:\n",
                        "            if block_id is None or block_id in self.free:\n",
                    ),
                ),
            ),
            Mistake(
                Text("Blocks are shared before the check", "检查之前就共享了"),
                Text(
                    "If too few blocks are free, nothing may have changed. Check first, and only then count "
                    "owners and take blocks out of `self.free`.",
                    "空闲块太少时，什么都不能改变。先检查，再计所有者、从 `self.free` 里取块。",
                ),
                (
                    (
                        "        for block_id in hits:\n            self.free.pop(block_id, None)\n"
                        "            self.num_owners[block_id] += 1\n",
                        "",
                    ),
                    (
                        "        if num_new > len(self.free) - num_free_hits:\n",
                        "        for block_id in hits:\n            self.free.pop(block_id, None)\n"
                        "            self.num_owners[block_id] += 1\n"
                        "        if num_new > len(self.free):\n",
                    ),
                ),
            ),
            Mistake(
                Text("A request that fits exactly is refused", "恰好放得下的请求被拒绝了"),
                Text(
                    "The number of new blocks may be equal to the number of free ones: use `>`, not `>=`.",
                    "新块数可以等于空闲块数：用 `>`，不用 `>=`。",
                ),
                (("num_new > len(self.free)", "num_new >= len(self.free)"),),
            ),
        ),
    ),
)
