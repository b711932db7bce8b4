"""Twelve bugs that engines really had, each in the engine in one file. Find it by its symptom, and mend it."""

from labs.learn.find_bug import FindBug, make_bug
from labs.learn.texts import Text

RULES = Text(
    "The file is `labs/one_file.py` with one bug, which an engine really had. Find it and mend it; a few lines\n"
    "suffice. `nanovllm learn check` runs small schedules without a network and shows the first step that differs\n"
    "from the right engine's: in the tokens that are computed, in the block tables, in the owners of blocks, or in\n"
    "the order of the free blocks. This order is part of the task: it decides which cached blocks are kept.\n"
    "\n"
    "Careful: the rest of the file is right, so it has the solutions of grow_table, admit_whole, hash_chain,\n"
    "release_blocks, register_blocks, revive_blocks, fork, copy_on_write and preempt. Write those first.",
    "这个文件是带有一个 bug 的 `labs/one_file.py`，真实的引擎出过这个 bug。找到并修好它，几行就够。\n"
    "`nanovllm learn check` 不用网络运行小的调度，并显示与正确的引擎第一处不同的步：算了哪些 token、块表、\n"
    "块的所有者，或空闲块的顺序不同。空闲块的顺序也是题目的一部分：它决定哪些缓存的块会留下来。\n"
    "\n"
    "注意：文件的其余部分是对的，所以里面有 grow_table、admit_whole、hash_chain、release_blocks、\n"
    "register_blocks、revive_blocks、fork、copy_on_write 和 preempt 的答案。请先做这些练习。",
)


def task(symptom: Text, link: str) -> Text:
    """Return the task: the symptom as a user would report it, where it was reported, and the rules."""
    source = Text(f"Reported in {link}", f"报告见 {link}")
    return Text(f"{symptom.en}\n\n{source.en}\n\n{RULES.en}", f"{symptom.zh}\n\n{source.zh}\n\n{RULES.zh}")


EXERCISES: tuple[FindBug, ...] = (
    make_bug(
        "bug_1",
        "07_sharing",
        Text("Find the bug: someone else's answer", "找 bug：别人的回答"),
        task(
            Text(
                '"After some hours, a prompt that was asked before sometimes gets an answer about something else.\n'
                'Without the prefix cache, all answers are right."',
                "“运行几个小时后，以前问过的提示词有时会得到与它无关的回答。关掉前缀缓存，所有回答都正确。”",
            ),
            "https://github.com/GeeeekExplorer/nano-vllm/issues/163",
        ),
        (
            Text(
                "What does the prefix cache still know about a block that now holds other tokens?",
                "一个块已经装了别的 token，前缀缓存还记得它的什么？",
            ),
            Text(
                "Follow a block through `release`, `take` and then `find`.",
                "跟着一个块走过 `release`、`take`，再到 `find`。",
            ),
            Text(
                "`take` must remove the block's entry from `block_of_hash`.",
                "`take` 要把这个块从 `block_of_hash` 里删掉。",
            ),
        ),
        (
            (
                "            del self.block_of_hash[self.hash_of_block.pop(block_id)]\n",
                "            self.hash_of_block.pop(block_id)\n",
            ),
        ),
    ),
    make_bug(
        "bug_2",
        "07_sharing",
        Text("Find the bug: the engine stands still", "找 bug：引擎不动了"),
        task(
            Text(
                '"Under load, the engine suddenly schedules no tokens at all, although requests are waiting and '
                "most of\n"
                'the pool is free. It happens only with prompts that begin alike."',
                "“负载高时引擎突然一个 token 也不调度，明明有请求在等，块池也大多空闲。只有提示词开头相同时才发生。”",
            ),
            "https://github.com/vllm-project/vllm/issues/11562",
        ),
        (
            Text(
                "Count the owners of all blocks after an admission that failed.", "准入失败之后，数一数每个块的所有者。"
            ),
            Text(
                "A function that can fail must change nothing if it fails. Which one here can fail?",
                "可能失败的函数，失败时什么都不能改。这里哪个函数可能失败？",
            ),
            Text(
                "In `try_admit`, check before the hits are shared. At that moment, hits that are free are in "
                "`self.free` too, but cannot be taken as new blocks: compare with `len(self.free)` minus these hits.",
                "在 `try_admit` 里，先检查，再共享命中的块。检查时，空闲的命中块也在 `self.free` 里，但不能当新块取走："
                "要用 `len(self.free)` 减去这些块来比较。",
            ),
        ),
        (
            (
                "        num_free_hits = sum(block_id in self.free for block_id in hits)  # free, but not to be "
                "overwritten\n"
                "        if num_new > len(self.free) - num_free_hits:\n            return False\n"
                "        for block_id in hits:\n"
                "            self.free.pop(block_id, None)\n"
                "            self.num_owners[block_id] += 1\n",
                "        for block_id in hits:\n"
                "            self.free.pop(block_id, None)\n"
                "            self.num_owners[block_id] += 1\n"
                "        if num_new > len(self.free):\n            return False\n",
            ),
        ),
    ),
    make_bug(
        "bug_3",
        "07_sharing",
        Text("Find the bug: an exception from an empty pool", "找 bug：空池抛出的异常"),
        task(
            Text(
                '"The engine stops with StopIteration in `take` when it admits a request. The check before has '
                "said that\n"
                'there are enough free blocks."',
                "“引擎在准入一个请求时停下，`take` 抛出 StopIteration。可是之前的检查说空闲块是够的。”",
            ),
            "https://github.com/vllm-project/vllm/pull/11565",
        ),
        (
            Text(
                "Which free blocks may this request not use for its new tokens?",
                "哪些空闲块，这个请求不能用来放新 token？",
            ),
            Text("A hit may be free. Then it is counted twice.", "命中的块可能是空闲的，于是它被算了两次。"),
            Text("Subtract the free hits from the number of free blocks.", "从空闲块数里减去空闲的命中块。"),
        ),
        (("if num_new > len(self.free) - num_free_hits:", "if num_new > len(self.free):"),),
    ),
    make_bug(
        "bug_4",
        "07_sharing",
        Text("Find the bug: asking twice crashes", "找 bug：同样的问题问两次就崩溃"),
        task(
            Text(
                '"A prompt whose length is a multiple of the block size works once. The second time, the engine '
                "fails:\n"
                'the step has no token of this request."',
                "“长度是块大小整数倍的提示词，第一次没问题。第二次引擎就出错：这一步里没有该请求的 token。”",
            ),
            "https://github.com/GeeeekExplorer/nano-vllm/issues/144",
        ),
        (
            Text(
                "Which token's logits does the first answer token come from?",
                "第一个输出 token 来自哪个 token 的 logits？",
            ),
            Text(
                "The last token must be computed, even if its K and V are cached.",
                "最后一个 token 必须计算，即使它的 K、V 已缓存。",
            ),
            Text("`find` may look only at blocks before the last token.", "`find` 只能看最后一个 token 之前的块。"),
        ),
        (("range((len(seq.token_ids) - 1) // self.block_size)", "range(len(seq.token_ids) // self.block_size)"),),
    ),
    make_bug(
        "bug_5",
        "07_sharing",
        Text("Find the bug: the end of a prompt is wrong", "找 bug：提示词的结尾错了"),
        task(
            Text(
                '"Prompts with a common beginning influence each other, but only if they differ after the first few\n'
                'tokens of a block."',
                "“开头相同的提示词会互相影响，但只有当它们在某个块的前几个 token 之后才不同的时候。”",
            ),
            "https://github.com/vllm-project/vllm/pull/5188",
        ),
        (
            Text("Which blocks may be shared: all blocks of a sequence?", "哪些块可以共享？一个序列的所有块吗？"),
            Text("A block that is not full will still be written to.", "没满的块还会被写入。"),
            Text("`register` rounds down to full blocks.", "`register` 要向下取整，只登记满块。"),
        ),
        (
            (
                "range(num_before // self.block_size, seq.num_computed_tokens // self.block_size)",
                "range(num_before // self.block_size, self.num_blocks_for(seq.num_computed_tokens))",
            ),
        ),
    ),
    make_bug(
        "bug_6",
        "07_sharing",
        Text("Find the bug: two words that are one", "找 bug：两个词变成一个"),
        task(
            Text(
                '"Two prompts that differ in one word get the same answer. It happens with rare words only, and '
                "only if\n"
                'both are asked within a short time."',
                "“只差一个词的两个提示词得到同样的回答。只有生僻词才会这样，而且要在短时间内先后提问。”",
            ),
            "https://github.com/waybarrios/vllm-mlx/pull/444",
        ),
        (
            Text("When are two blocks taken for the same block?", "什么时候两个块会被当成同一个块？"),
            Text("What does the hash know of a token id above 255?", "对于大于 255 的 token id，哈希里有什么？"),
            Text("Hash whole token ids.", "要对完整的 token id 做哈希。"),
        ),
        (
            (
                "tokens = seq.token_ids[j * self.block_size : (j + 1) * self.block_size]",
                "tokens = bytes(i & 0xFF for i in seq.token_ids[j * self.block_size : (j + 1) * self.block_size])",
            ),
        ),
    ),
    make_bug(
        "bug_7",
        "07_sharing",
        Text("Find the bug: the hit rate is too low", "找 bug：命中率太低"),
        task(
            Text(
                '"All answers are right. But with many users the system prompt is hardly ever found in the '
                "prefix cache,\n"
                'although a large part of the pool holds cached blocks."',
                "“回答都正确。但用户一多，系统提示词几乎从不命中前缀缓存，尽管块池里有很多缓存的块。”",
            ),
            "https://github.com/llm-d/llm-d-inference-sim/issues/704",
        ),
        (
            Text(
                "In which order are the blocks of a finished sequence overwritten?",
                "序列结束后，它的块按什么顺序被覆盖？",
            ),
            Text(
                "A block can be found only if all blocks before it can be found.",
                "只有前面的块都能找到，一个块才能被找到。",
            ),
            Text("`release` frees the last block first.", "`release` 要先释放最后一个块。"),
        ),
        (("for block_id in reversed(seq.block_table):", "for block_id in seq.block_table:"),),
    ),
    make_bug(
        "bug_8",
        "09_when_memory_is_full",
        Text("Find the bug: after a preemption", "找 bug：抢占之后"),
        task(
            Text(
                '"When memory is tight, resumed requests take a step more than they should, and with the prefix '
                "cache a\n"
                'resumed request sometimes gets zero or even a negative number of tokens."',
                "“内存紧张时，恢复的请求会多用一步；打开前缀缓存后，恢复的请求有时分到 0 个甚至负数个 token。”",
            ),
            "https://github.com/vllm-project/vllm-ascend/pull/11334",
        ),
        (
            Text("What must be computed again after a preemption?", "抢占之后，哪些 token 要重新计算？"),
            Text("Prompt and output: all tokens that the sequence has.", "提示词和输出：序列的全部 token。"),
            Text(
                "An admitted sequence needs `len(seq.token_ids)`, not `num_prompt_tokens`.",
                "准入时要用 `len(seq.token_ids)`，而不是 `num_prompt_tokens`。",
            ),
        ),
        (
            (
                "            self.running.append(self.waiting.popleft())\n"
                "            num_new_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, budget)\n",
                "            self.running.append(self.waiting.popleft())\n"
                "            num_new_tokens = min(seq.num_prompt_tokens - seq.num_computed_tokens, budget)\n",
            ),
        ),
    ),
    make_bug(
        "bug_9",
        "05_blocks_and_tables",
        Text("Find the bug: the pool dries up", "找 bug：块池枯竭"),
        task(
            Text(
                '"The engine gets slower with every request. In the end it admits nothing, although nothing runs."',
                "“每来一个请求，引擎就慢一些。最后什么都准入不了，尽管没有请求在运行。”",
            ),
            "https://github.com/Wenyueh/MinivLLM/pull/87",
        ),
        (
            Text("Add the owned and the free blocks after each request.", "每个请求之后，把有主的块和空闲的块加起来。"),
            Text("How many owners does a block have right after `take`?", "`take` 之后，一个块有几个所有者？"),
            Text("`take` returns a block with one owner.", "`take` 返回的块有一个所有者。"),
        ),
        (("        self.num_owners[block_id] = 1\n", "        self.num_owners[block_id] = 0\n"),),
    ),
    make_bug(
        "bug_10",
        "07_sharing",
        Text("Find the bug: samples that mix", "找 bug：混在一起的多个回答"),
        task(
            Text(
                '"With several answers to one prompt, the answers are fine for a few tokens, and then contain '
                "pieces of\n"
                'each other. All of them break off at the same place."',
                "“对一个提示词生成多个回答时，前几个 token 正常，然后各个回答里混进了彼此的片段，而且都在同一处出错。”",
            ),
            "https://github.com/Avarok-Cybersecurity/atlas/issues/1193",
        ),
        (
            Text(
                "Two answers share the last, partly filled block of the prompt. Who writes to it?",
                "两个回答共享提示词最后那个没满的块。谁往里写？",
            ),
            Text("Only a block with one owner may be written to.", "只有一个所有者的块才能写。"),
            Text(
                "Let `try_grow` copy the block if `num_owners` is above 1.",
                "`num_owners` 大于 1 时，`try_grow` 要复制这个块。",
            ),
        ),
        (
            (
                "        is_shared = i < len(seq.block_table) and self.num_owners[seq.block_table[i]] > 1\n",
                "        is_shared = i < len(seq.block_table) and self.num_owners[seq.block_table[i]] > 2\n",
            ),
        ),
    ),
    make_bug(
        "bug_11",
        "07_sharing",
        Text("Find the bug: freed too early", "找 bug：释放得太早"),
        task(
            Text(
                '"When one of several answers ends, the others sometimes continue with nonsense. Single answers '
                'are fine."',
                "“多个回答里有一个结束后，其余的有时会接着输出乱码。只要一个回答时没有问题。”",
            ),
            "https://github.com/Avarok-Cybersecurity/atlas/issues/1193",
        ),
        (
            Text(
                "Count the owners of the prompt's last block after a fork.",
                "分叉之后，数一数提示词最后一个块的所有者。",
            ),
            Text("A block that is not full has owners too.", "没满的块也有所有者。"),
            Text(
                "`fork` adds an owner to each block of the parent's table.",
                "`fork` 要给父序列块表里的每个块加一个所有者。",
            ),
        ),
        (
            (
                "        for block_id in parent.block_table:\n            self.num_owners[block_id] += 1\n",
                "        for block_id in parent.block_table[: parent.num_computed_tokens // self.block_size]:\n"
                "            self.num_owners[block_id] += 1\n",
            ),
        ),
    ),
    make_bug(
        "bug_12",
        "05_blocks_and_tables",
        Text("Find the bug: one block too many", "找 bug：多出一个块"),
        task(
            Text(
                '"A request that fills the pool exactly is refused or preempted, but only if its length is a '
                "multiple of\n"
                'the block size."',
                "“恰好能装满块池的请求会被拒绝或抢占，但只有当长度是块大小的整数倍时才这样。”",
            ),
            "https://github.com/Wenyueh/MinivLLM/pull/87",
        ),
        (
            Text("How many blocks of 4 do 8 tokens need?", "8 个 token 需要几个大小为 4 的块？"),
            Text("Rounding up is not the same as adding one.", "向上取整不等于加一。"),
            Text("`-(-n // size)` rounds up.", "`-(-n // size)` 是向上取整。"),
        ),
        (("return -(-num_tokens // self.block_size)  # rounded up", "return num_tokens // self.block_size + 1"),),
    ),
)
