"""Chapter 9: preempt the newest sequence when no block is free, and admit none in the same step."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from labs import one_file
from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.simulation import (
    EXAMPLES,
    Parts,
    Request,
    Traffic,
    describe_traffic,
    traffics,
)
from labs.learn.texts import Text
from labs.learn.whole_runs import explain_difference, is_same_step, simulate

ANSWER = '''
from labs.one_file import Scheduler, Sequence


class Planner(Scheduler):
    def schedule(self) -> list[tuple[Sequence, int]]:
        """Return (sequence, number of new tokens) for each sequence of the next step."""
        budget, chunks, preemptions_before = self.max_num_batched_tokens, [], self.num_preemptions
        for seq in list(self.running):
            if not budget or seq not in self.running:  # only the end of `running` is preempted
                break
            if self.make_room(seq):
                budget -= self.add_chunk(chunks, seq, budget)
        while budget and self.waiting and self.try_admit(self.waiting[0], self.num_preemptions - preemptions_before):
            self.running.append(self.waiting.popleft())
            self.num_cached_tokens += self.running[-1].num_computed_tokens
            budget -= self.add_chunk(chunks, self.running[-1], budget)
        return chunks

    def add_chunk(self, chunks: list[tuple[Sequence, int]], seq: Sequence, budget: int) -> int:
        num_new_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, budget)
        chunks.append((seq, num_new_tokens))
        return num_new_tokens

    def make_room(self, seq: Sequence) -> bool:
        """Preempt the newest sequences until `seq` has its block. Return False if `seq` itself was preempted."""
        while not self.block_manager.try_grow(seq):
            last = self.running.pop()
            self.block_manager.release(last)
            last.num_computed_tokens = 0
            self.waiting.appendleft(last)
            self.num_preemptions += 1
            if last is seq:
                return False
        return True

    def try_admit(self, seq: Sequence, num_preempted: int) -> bool:
        """Give the waiting `seq` its blocks. Return False if this step may not admit it, or too few are free."""
        return num_preempted == 0 and self.block_manager.try_admit(seq)
'''
POP = "            last = self.running.pop()\n"
RETURN = "            if last is seq:\n                return False\n"


class BlockManager(one_file.BlockManager):
    """Leaves it to the scheduler to reset `num_computed_tokens`."""

    def try_admit(self, seq: Any) -> bool:
        num_computed_tokens = seq.num_computed_tokens
        is_admitted = super().try_admit(seq)
        seq.num_computed_tokens = max(num_computed_tokens, seq.num_computed_tokens if is_admitted else 0)
        return is_admitted


def run(answer: ModuleType, case: Traffic) -> Iterator[Seen]:
    return simulate(Parts(block_manager=BlockManager, scheduler=answer.Planner), case)


EXERCISES = (
    Build(
        name="preempt",
        chapter="09_when_memory_is_full",
        title=Text("Preempt a sequence", "抢占一个序列"),
        task=Text(
            "`schedule` is given, and calls two methods, which you write.\n"
            "`make_room(seq)`: call `self.block_manager.try_grow(seq)` until it returns True: `seq` has the block "
            "that\n"
            "its next token needs. Each time that it returns False, preempt one sequence: the last one in\n"
            "`self.running`. Release its blocks (`self.block_manager.release`), set its `num_computed_tokens` to 0 "
            "(its\n"
            "K and V are lost, its tokens are not), put it at the front of the deque `self.waiting`, and count it in\n"
            "`self.num_preemptions`. If `seq` itself was preempted, return False at once, otherwise True at the end.\n"
            "`try_admit(seq, num_preempted)`: a step that has preempted sequences admits none. Otherwise return\n"
            "`self.block_manager.try_admit(seq)`.\n\n"
            "Example: A, B and C run, D waits, no block is free. A needs a block: C is preempted, the queue is C, D, "
            "and\n"
            "A gets a block of C. If B needs one too and there is none, B is the last one, and preempts itself: B, C, "
            "D.",
            "`schedule` 已给出，它调用两个方法，由你来写。\n"
            "`make_room(seq)`：反复调用 `self.block_manager.try_grow(seq)`，直到它返回 True，这时 `seq` 的下一个 "
            "token 有块可放。\n"
            "每次返回 False，就抢占一个序列：`self.running` 的最后一个。归还它的块（`self.block_manager.release`），\n"
            "把它的 `num_computed_tokens` 设为 0（丢的是 K 和 V，不是 token），把它放到双端队列 `self.waiting` "
            "的最前面，\n"
            "并让 `self.num_preemptions` 加 1。如果被抢占的就是 `seq` 自己，立即返回 False；否则最后返回 True。\n"
            "`try_admit(seq, num_preempted)`：抢占过序列的一步不再接纳序列；否则返回 "
            "`self.block_manager.try_admit(seq)`。\n\n"
            "例：A、B、C 在运行，D 在等，没有空闲块。A 要一个块：C 被抢占，队列变成 C、D，A 拿到 C 的一个块。\n"
            "如果 B 也要而没有块了，B 就是最后一个，只能抢占自己：队列变成 B、C、D。",
        ),
        names=("self.block_manager", "self.running", "self.waiting", "self.num_preemptions", "seq.num_computed_tokens"),
        hints=(
            Text(
                "`make_room` is a `while not self.block_manager.try_grow(seq):` loop that preempts one sequence each "
                "time.",
                "`make_room` 是一个 `while not self.block_manager.try_grow(seq):` 循环，每次抢占一个序列。",
            ),
            Text(
                "`last = self.running.pop()` takes the newest sequence, and `self.waiting.appendleft(last)` puts it in "
                "front of all later arrivals.",
                "`last = self.running.pop()` 取出最晚来的序列，`self.waiting.appendleft(last)` "
                "把它放到所有后来者的前面。",
            ),
            Text(
                "After `self.block_manager.release(last)`: `last.num_computed_tokens = 0`, `self.num_preemptions += "
                "1`, "
                "and `if last is seq: return False`. The other method is `return num_preempted == 0 and "
                "self.block_manager.try_admit(seq)`.",
                "在 `self.block_manager.release(last)` 之后：`last.num_computed_tokens = 0`，`self.num_preemptions += "
                "1`，"
                "以及 `if last is seq: return False`。另一个方法是 `return num_preempted == 0 and "
                "self.block_manager.try_admit(seq)`。",
            ),
        ),
        answer=ANSWER,
        holes=("Planner.make_room", "Planner.try_admit"),
        engine_parts=(("Planner.make_room", "Scheduler.make_room"),),
        run=run,
        examples=(
            Traffic(3, 2, 8, (Request((1, 2), 3), Request((0, 1), 3))),
            Traffic(4, 2, 8, (Request((1, 2), 4), Request((0, 1), 3), Request((2, 2), 3, arrival=1))),
            Traffic(6, 2, 9, (Request((1, 2), 5), Request((0, 1), 5), Request((2, 2), 5), Request((1, 1, 1, 1), 2))),
            Traffic(5, 2, 6, (Request((1, 2, 0, 1), 4), Request((0, 1), 5), Request((2, 2, 0), 2))),
            Traffic(
                7, 2, 8, (Request((0, 1, 1, 0, 1), 5), Request((0, 1, 1, 0, 1, 1), 6))
            ),  # one begins like the other
            Traffic(1, 8, 1, (Request((1, 2, 0), 3, n=3),)),  # preempting one of three answers frees no block
            EXAMPLES[0],
        ),
        cases=traffics,
        describe=describe_traffic,
        is_same=is_same_step,
        draw=explain_difference,
        mistakes=(
            Mistake(
                Text("The victim goes to the end of the queue", "被抢占的序列排到了队尾"),
                Text(
                    "Then all waiting sequences overtake it, although it arrived before them and may be nearly "
                    "finished. No token changes, but its user waits much longer. Put it at the front.",
                    "这样，所有等待中的序列都会超过它，尽管它先到，而且可能就快完成了。token 不变，"
                    "但它的用户要等久得多。"
                    "应放到最前面。",
                ),
                (("self.waiting.appendleft(last)", "self.waiting.append(last)"),),
            ),
            Mistake(
                Text("Admission after a preemption", "抢占之后又接纳"),
                Text(
                    "The sequence that was just preempted is first in the queue. If the step admits it again, it takes "
                    "the blocks that it has just given up, and the running sequences will need blocks soon: then it is "
                    "preempted again, and more tokens are computed twice.",
                    "刚被抢占的序列排在队列最前面。如果这一步又接纳它，它会拿回刚让出的块，而运行中的序列很快又要块："
                    "它会再次被抢占，更多 token 要重算。",
                ),
                (("return num_preempted == 0 and ", "return "),),
            ),
            Mistake(
                Text("The counter is not reset", "计数没有归零"),
                Text(
                    "The K and V of the victim are gone with its blocks. If `num_computed_tokens` is not 0, they are "
                    "not "
                    "computed again, and the sequence reads what other sequences have left in its new blocks.",
                    "块归还之后，K 和 V 就没有了。如果 `num_computed_tokens` 不是 0，它们就不会重算，"
                    "序列读到的是别的序列留在新块里的内容。",
                ),
                (("            last.num_computed_tokens = 0\n", ""),),
            ),
            Mistake(
                Text("The oldest sequence is the victim", "抢占了最早来的序列"),
                Text(
                    "The first sequence must always advance, so that every request finishes. Also, its chunk of this "
                    "step may be planned already. Preempt the last one: `pop()`, not `pop(0)`.",
                    "第一个序列必须总能前进，每个请求才能完成。而且，它这一步的 chunk 可能已经安排好了。"
                    "应抢占最后一个：用 `pop()`，不是 `pop(0)`。",
                ),
                ((POP, "            last = self.running.pop(0)\n"),),
            ),
            Mistake(
                Text("The blocks are not released", "没有归还块"),
                Text(
                    "The victim waits and still owns its blocks, so there is still no free block. The loop preempts "
                    "one "
                    "sequence after the other.",
                    "被抢占的序列在等待，却还占着块，所以还是没有空闲块。循环会把序列一个接一个地抢占掉。",
                ),
                (("            self.block_manager.release(last)\n", ""),),
            ),
            Mistake(
                Text("`if` instead of `while`", "用了 `if` 而不是 `while`"),
                Text(
                    "After a preemption blocks are free, but `seq` has none of them yet: call `try_grow` again. It "
                    "may even fail again, if the victim shared its blocks, and the next sequence must be preempted. "
                    "With `while`, `make_room` returns True only after `try_grow` has returned True.",
                    "抢占之后有了空闲块，但 `seq` 还没有拿到：要再调用一次 `try_grow`。"
                    "如果被抢占的序列与别人共享块，它还可能失败，要继续抢占下一个。"
                    "用 `while`，`make_room` 只会在 `try_grow` 返回 True 之后返回 True。",
                ),
                (("        while not self.block_manager", "        if not self.block_manager"),),
            ),
            Mistake(
                Text("Only one sequence is preempted", "只抢占了一个序列"),
                Text(
                    "`try_grow` is called twice at most. If the victim shared its blocks with another sequence, none "
                    "of them became free: preempt the next one, until `try_grow` returns True (`while`).",
                    "`try_grow` 最多只调用了两次。如果被抢占的序列与别人共享块，就没有块变空闲："
                    "要继续抢占下一个，直到 `try_grow` 返回 True（用 `while`）。",
                ),
                (
                    ("        while not self.block_manager", "        if not self.block_manager"),
                    (RETURN, f"{RETURN}            self.block_manager.try_grow(seq)\n"),
                ),
            ),
            Mistake(
                Text("The sequence that needs a block is the victim", "抢占了要块的序列自己"),
                Text(
                    "The oldest sequences need blocks first, so they would be preempted for younger ones. Preempt the "
                    "last one in `self.running`; `seq` is the victim only if it is itself the last.",
                    "较早的序列先要块，这样反而是它们为较晚的让路。应抢占 `self.running` 的最后一个；"
                    "只有 `seq` 自己是最后一个时，才抢占它。",
                ),
                ((POP, "            last = seq\n            self.running.remove(seq)\n"),),
            ),
            Mistake(
                Text("A preempted sequence computes", "被抢占的序列还在计算"),
                Text(
                    "If `seq` itself was preempted, it has no blocks and waits. Return False, so that `schedule` plans "
                    "no chunk for it.",
                    "如果被抢占的就是 `seq`，它已没有块，正在等待。要返回 False，`schedule` 才不会给它安排 chunk。",
                ),
                ((RETURN, ""),),
            ),
            Mistake(
                Text("The output is thrown away", "丢掉了已有的输出"),
                Text(
                    "Only K and V are lost. The user has seen the output tokens; without them they would be sampled "
                    "again, one step each, and sent twice.",
                    "丢的只是 K 和 V。输出的 token 用户已经看到；丢掉的话，要一步一个重新采样，还会发送两遍。",
                ),
                (
                    (
                        "            last.num_computed_tokens = 0\n",
                        "            last.num_computed_tokens = 0\n            del "
                        "last.token_ids[last.num_prompt_tokens :]\n",
                    ),
                ),
            ),
            Mistake(
                Text("Preemptions are not counted", "没有计抢占次数"),
                Text(
                    "`schedule` sees from `self.num_preemptions` whether this step has preempted a sequence. Without "
                    "the "
                    "count, it admits the victim again in the same step.",
                    "`schedule` 靠 `self.num_preemptions` 判断这一步有没有抢占过序列。不计数，"
                    "同一步里又会把它接纳回来。",
                ),
                (("            self.num_preemptions += 1\n", ""),),
            ),
            Mistake(
                Text("Nothing is admitted after the first preemption", "抢占过一次就不再接纳"),
                Text(
                    "Only the step that preempts admits no sequence. The next one may: use `num_preempted`, which "
                    "counts "
                    "this step, not `self.num_preemptions`.",
                    "只是发生抢占的那一步不接纳，下一步就可以。要用这一步的 `num_preempted`，不是 "
                    "`self.num_preemptions`。",
                ),
                (("return num_preempted == 0", "return self.num_preemptions == 0"),),
            ),
            Mistake(
                Text("The victim is lost", "被抢占的序列丢了"),
                Text(
                    "A preempted sequence must be served later: put it at the front of `self.waiting`.",
                    "被抢占的序列以后还要继续：把它放到 `self.waiting` 的最前面。",
                ),
                (("            self.waiting.appendleft(last)\n", ""),),
            ),
            Mistake(
                Text("The victim stays in `running`", "被抢占的序列还在 `running` 里"),
                Text(
                    "It has no blocks any more, so it may not stay in `running`: `pop()` removes it, `[-1]` "
                    "only reads it.",
                    "它已经没有块了，不能留在 `running` 里：`pop()` 会取走它，`[-1]` 只是读。",
                ),
                (
                    ("            last = self.running.pop()\n", "            last = self.running[-1]\n"),
                    ("            if last is seq:\n", "            if last is seq or len(self.waiting) > 8:\n"),
                ),
            ),
            Mistake(
                Text("The wrong blocks are released", "释放错了块"),
                Text(
                    "The victim gives up its blocks, not the sequence that needs one.",
                    "让出块的是被抢占的序列，而不是需要块的序列。",
                ),
                (("self.block_manager.release(last)", "self.block_manager.release(seq)"),),
            ),
            Mistake(
                Text("The wrong counter is reset", "重置错了计数"),
                Text(
                    "The victim has lost its K and V, so its `num_computed_tokens` becomes 0. Those of `seq` "
                    "are still there.",
                    "丢了 K 和 V 的是被抢占的序列，所以是它的 `num_computed_tokens` 变成 0。`seq` 的还在。",
                ),
                (("last.num_computed_tokens = 0", "seq.num_computed_tokens = 0"),),
            ),
            Mistake(
                Text("The condition is inverted", "条件反了"),
                Text(
                    "A step admits only if it has preempted none: `num_preempted == 0`.",
                    "没有抢占过任何序列的一步才能准入：`num_preempted == 0`。",
                ),
                (("return num_preempted == 0 and", "return num_preempted > 0 and"),),
            ),
            Mistake(
                Text("The prompt counts as computed", "提示词算作已计算"),
                Text(
                    "With the blocks, all K and V are gone, those of the prompt, too. Blocks that are still "
                    "in the prefix cache are found at admission.",
                    "块没有了，所有的 K 和 V 也就没有了，提示词的也一样。仍在前缀缓存里的块，准入时会再找到。",
                ),
                (
                    (
                        "last.num_computed_tokens = 0",
                        "last.num_computed_tokens = min(last.num_computed_tokens, last.num_prompt_tokens)",
                    ),
                ),
            ),
            Mistake(
                Text("Preemptions are counted once for each call", "每次调用只记一次抢占"),
                Text(
                    "Several sequences can be preempted for one block. Each of them counts.",
                    "为了一个块可能要抢占好几个序列，每一个都要计数。",
                ),
                (
                    ("            self.num_preemptions += 1\n", ""),
                    (
                        "        while not self.block_manager.try_grow(seq):\n",
                        "        is_first = True\n        while not self.block_manager.try_grow(seq):\n"
                        "            self.num_preemptions += is_first\n            is_first = False\n",
                    ),
                ),
            ),
        ),
    ),
)
