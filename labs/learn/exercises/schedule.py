"""Write a scheduler with a budget of tokens: running sequences first, then waiting ones, prompts in chunks."""

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.texts import Text
from labs.learn.timetable import RUNNING, Request, describe_requests, request_lists, run_scheduler

SOLUTION = '''
from collections import deque
from dataclasses import dataclass


@dataclass(eq=False)
class Sequence:
    name: str
    num_tokens: int  # prompt, then also output
    max_tokens: int  # output tokens, after which the sequence is finished
    num_computed_tokens: int = 0

    def __post_init__(self):
        self.num_prompt_tokens = self.num_tokens


class Scheduler:
    def __init__(self, budget):
        self.budget = budget  # the largest number of tokens of one step
        self.waiting = deque()  # in the order of arrival
        self.running = []  # in the order of arrival

    def schedule(self):
        """Return [(sequence, number of new tokens), …] for the next step. Admitted sequences move to `running`."""
        budget, chunks = self.budget, []
        for seq in self.running:
            if budget == 0:
                break
            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)
            chunks.append((seq, num_new_tokens))
            budget -= num_new_tokens
        while budget > 0 and self.waiting:
            seq = self.waiting.popleft()
            self.running.append(seq)
            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)
            chunks.append((seq, num_new_tokens))
            budget -= num_new_tokens
        return chunks

    def update(self, chunks):
        """Count the computed tokens, add new tokens, and remove finished sequences, after the step is computed."""
        for seq, num_new_tokens in chunks:
            seq.num_computed_tokens += num_new_tokens
            if seq.num_computed_tokens == seq.num_tokens:
                seq.num_tokens += 1
                if seq.num_tokens - seq.num_prompt_tokens == seq.max_tokens:
                    self.running.remove(seq)
'''


class Case(NamedTuple):
    budget: int
    requests: tuple[Request, ...]


def run(answer: ModuleType, case: Case) -> Iterator[Seen]:
    return run_scheduler(answer, answer.Scheduler(case.budget), case.budget, case.requests)


def describe(case: Case) -> Text:
    requests = describe_requests(case.requests)
    return Text(
        f"Budget of a step: {case.budget}.  \n{requests.en}",
        f"每步预算：{case.budget}。  \n{requests.zh}",
    )


TAKE = """            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)
            chunks.append((seq, num_new_tokens))
            budget -= num_new_tokens
"""
FIRST_LOOP = "        for seq in self.running:\n            if budget == 0:\n                break\n" + TAKE
SECOND_LOOP = (
    "        while budget > 0 and self.waiting:\n            seq = self.waiting.popleft()\n"
    "            self.running.append(seq)\n" + TAKE
)

MISTAKES = (
    Mistake(
        Text("A token after every chunk", "每个 chunk 之后都得到一个 token"),
        Text(
            "A chunk that ends before the last token of the sequence gives no new token: the next step continues the "
            "prompt. Only if all tokens are computed does the last hidden state say which token comes next.",
            "chunk 没有到达序列的最后一个 token 时，不产生新 token：下一步接着算提示词。所有 token 都算完了，"
            "最后的隐藏状态才能说明下一个 token 是什么。",
        ),
        (("if seq.num_computed_tokens == seq.num_tokens:", "if True:"),),
    ),
    Mistake(
        Text("Waiting before running", "等待的排在运行的前面"),
        Text(
            "Running sequences come first. Otherwise a new prompt takes the budget, and sequences that decode get no "
            "token in this step.",
            "先安排运行中的序列。否则新提示词会占用预算，正在解码的序列这一步就得不到 token。",
        ),
        (
            (
                FIRST_LOOP + SECOND_LOOP,
                SECOND_LOOP.replace("self.running.append(seq)\n", "admitted.append(seq)\n")
                + FIRST_LOOP
                + "        self.running += admitted\n",
            ),
            ("budget, chunks = self.budget, []", "budget, chunks, admitted = self.budget, [], []"),
        ),
    ),
    Mistake(
        Text("The budget is not reduced", "没有扣减预算"),
        Text(
            "The budget is for all sequences of a step together. Subtract what each sequence gets.",
            "预算由一步里的所有序列共用。每给一个序列，就要减去它得到的 token 数。",
        ),
        ((FIRST_LOOP + SECOND_LOOP, (FIRST_LOOP + SECOND_LOOP).replace("            budget -= num_new_tokens\n", "")),),
    ),
    Mistake(
        Text("Chunks larger than the budget", "chunk 超过预算"),
        Text(
            "A sequence gets at most the budget that is left: `min(work, budget)`. The rest of the prompt is computed "
            "in later steps.",
            "一个序列最多得到剩下的预算：`min(工作量, 剩余预算)`。提示词的其余部分在后面的步里算。",
        ),
        (
            (
                FIRST_LOOP + SECOND_LOOP,
                (FIRST_LOOP + SECOND_LOOP)
                .replace(
                    "min(seq.num_tokens - seq.num_computed_tokens, budget)", "seq.num_tokens - seq.num_computed_tokens"
                )
                .replace("if budget == 0", "if budget <= 0"),
            ),
        ),
    ),
    Mistake(
        Text("All tokens are computed again", "所有 token 又算了一遍"),
        Text(
            "The work of a sequence is `num_tokens - num_computed_tokens`. The other tokens have K and V in the cache.",
            "序列的工作量是 `num_tokens - num_computed_tokens`。其余 token 的 K 和 V 已经在缓存里。",
        ),
        ((FIRST_LOOP, FIRST_LOOP.replace("seq.num_tokens - seq.num_computed_tokens", "seq.num_tokens")),),
    ),
    Mistake(
        Text("Prompts are not cut", "提示词没有分块"),
        Text(
            "A waiting prompt that does not fit into the rest of the budget gets a chunk of it. This scheduler leaves "
            "the rest unused, and a prompt longer than the budget would wait for ever.",
            "等待的提示词放不进剩余预算时，就先算它的一个 chunk。这个调度器却让剩余预算空着，"
            "比预算长的提示词会一直等下去。",
        ),
        (
            (
                "            seq = self.waiting.popleft()\n",
                "            if self.waiting[0].num_tokens > budget:\n                break\n"
                "            seq = self.waiting.popleft()\n",
            ),
        ),
    ),
    Mistake(
        Text("One new sequence in a step", "一步只接纳一个序列"),
        Text(
            "Admit waiting sequences as long as there is budget. Use `while`, not `if`.",
            "只要还有预算，就继续接纳等待的序列。用 `while`，不是 `if`。",
        ),
        (("while budget > 0 and self.waiting:", "if budget > 0 and self.waiting:"),),
    ),
    Mistake(
        Text("Sequences are admitted only when none is running", "没有序列运行时才接纳"),
        Text(
            "This is static batching: the batch is fixed until its last sequence ends. Here a waiting sequence joins "
            "as "
            "soon as the budget has room.",
            "这是静态批处理：batch 固定到最后一个序列结束。这里只要预算有余，等待的序列就可以加入。",
        ),
        (
            (
                "        while budget > 0 and self.waiting:\n",
                "        while was_empty and budget > 0 and self.waiting:\n",
            ),
            ("        budget, chunks =", "        was_empty = not self.running\n        budget, chunks ="),
        ),
    ),
    Mistake(
        Text("Chunks of 0 tokens", "chunk 里有 0 个 token"),
        Text(
            "When the budget is spent, the other running sequences get no chunk at all. Stop there.",
            "预算用完后，其余运行中的序列不应该再有 chunk。到此为止。",
        ),
        (("            if budget == 0:\n                break\n", ""),),
    ),
    Mistake(
        Text("The newest waiting sequence is admitted first", "先接纳了最后到达的序列"),
        Text(
            "The sequence that arrived first is at the left end of `waiting`: `popleft()`. With `pop()`, an early "
            "request may wait for ever.",
            "最先到达的序列在 `waiting` 的左端：用 `popleft()`。用 `pop()` 的话，早来的请求可能永远等下去。",
        ),
        (("self.waiting.popleft()", "self.waiting.pop()"),),
    ),
    Mistake(
        Text("Admitted sequences go to the front", "接纳的序列排到了最前面"),
        Text(
            "`running` is in the order of arrival, so that older sequences get their tokens first. Append at the end.",
            "`running` 按到达顺序排列，先到的序列先得到 token。要追加到末尾。",
        ),
        (("self.running.append(seq)", "self.running.insert(0, seq)"),),
    ),
    Mistake(
        Text("A finished sequence keeps running", "结束的序列还在运行"),
        Text(
            "A sequence leaves `running` as soon as it has `max_tokens` output tokens. The last of them is sampled, "
            "but "
            "never computed: a further step would only use up budget.",
            "输出一达到 `max_tokens` 个 token，序列就要离开 `running`。最后一个 token 只采样，不计算："
            "再多一步只是浪费预算。",
        ),
        (("== seq.max_tokens:", "> seq.max_tokens:"),),
    ),
    Mistake(
        Text("A list is changed while it is read", "边遍历边修改列表"),
        Text(
            "`for seq in self.running` skips the sequence after a removed one: the positions of the others have moved. "
            "Loop over a copy, or over the chunks.",
            "`for seq in self.running` 会跳过被移除序列的后一个，因为其余序列的位置前移了。要遍历副本，或者遍历 "
            "chunk。",
        ),
        (
            (
                "                if seq.num_tokens - seq.num_prompt_tokens == seq.max_tokens:\n"
                "                    self.running.remove(seq)\n",
                "        for seq in self.running:\n"
                "            if seq.num_tokens - seq.num_prompt_tokens == seq.max_tokens:\n"
                "                self.running.remove(seq)\n",
            ),
        ),
    ),
    Mistake(
        Text("An admitted sequence stays in the queue", "已准入的序列还在队列里"),
        Text(
            "The sequence is in `running` and in `waiting`, so the next step admits it again. "
            "`popleft` also removes it from the queue.",
            "这个序列既在 `running` 又在 `waiting` 里，下一步会再次准入它。`popleft` 会把它从队列里取走。",
        ),
        (
            (
                "        while budget > 0 and self.waiting:\n            seq = self.waiting.popleft()\n",
                "        for seq in list(self.waiting):\n            if budget == 0:\n                break\n",
            ),
        ),
    ),
    Mistake(
        Text("An admitted sequence is lost", "已准入的序列丢了"),
        Text(
            "It has left `waiting` and is not in `running`: after its first chunk it never gets another token.",
            "它离开了 `waiting`，又不在 `running` 里：第一个 chunk 之后再也得不到 token。",
        ),
        (("            self.running.append(seq)\n", ""),),
    ),
    Mistake(
        Text("Computed tokens are not counted", "没有记已计算的 token"),
        Text(
            "`update` must add the chunk to `num_computed_tokens`. Otherwise each step computes the same tokens again.",
            "`update` 必须把 chunk 加到 `num_computed_tokens` 上，否则每一步都重算同样的 token。",
        ),
        (("            seq.num_computed_tokens += num_new_tokens\n", ""),),
    ),
    Mistake(
        Text("The prompt counts as output", "提示词算成了输出"),
        Text(
            "`max_tokens` counts output tokens: `num_tokens - num_prompt_tokens`. `num_tokens` also has the prompt.",
            "`max_tokens` 只数输出的 token：`num_tokens - num_prompt_tokens`。`num_tokens` 里还有提示词。",
        ),
        (("if seq.num_tokens - seq.num_prompt_tokens == seq.max_tokens:", "if seq.num_tokens >= seq.max_tokens:"),),
    ),
    Mistake(
        Text("One token of each running sequence", "每个运行中的序列只有一个 token"),
        Text(
            "A running sequence may still be in its prompt. It gets min(work, budget left) tokens; "
            "only for a decode is that 1.",
            "运行中的序列可能还在计算提示词。它应得 min(剩余工作量, 剩余预算) 个 token，只有解码时才是 1。",
        ),
        (
            (
                "        for seq in self.running:\n            if budget == 0:\n"
                "                break\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget)\n",
                "        for seq in self.running:\n            if budget == 0:\n"
                "                break\n            num_new_tokens = 1\n",
            ),
        ),
    ),
    Mistake(
        Text("Waiting sequences get a budget of their own", "等待的序列另有一份预算"),
        Text(
            "The budget limits the whole step. What running sequences have used is not there for the waiting ones.",
            "预算限制的是整个一步。运行中的序列用掉的部分，等待的序列就不能再用。",
        ),
        (
            (
                "        while budget > 0 and self.waiting:\n",
                "        budget = self.budget\n        while budget > 0 and self.waiting:\n",
            ),
        ),
    ),
    Mistake(
        Text("The budget is never refilled", "预算没有恢复"),
        Text(
            "`self.budget` is the limit of each step. Count down a local variable, so that the next "
            "step has all of it.",
            "`self.budget` 是每一步的上限。应该递减一个局部变量，这样下一步又有完整的预算。",
        ),
        (("        return chunks\n", "        self.budget = budget\n        return chunks\n"),),
    ),
    Mistake(
        Text("`num_tokens` is compared with `max_tokens`", "拿 `num_tokens` 和 `max_tokens` 比较"),
        Text(
            "`num_tokens` also has the prompt: `num_tokens - num_prompt_tokens` are the output tokens. If the prompt "
            "is longer than `max_tokens`, the two are never equal, and the sequence never ends.",
            "`num_tokens` 里还有提示词，输出的 token 数是 `num_tokens - num_prompt_tokens`。"
            "提示词比 `max_tokens` 长时，两个数永远不相等，序列永远不结束。",
        ),
        (("if seq.num_tokens - seq.num_prompt_tokens == seq.max_tokens:", "if seq.num_tokens == seq.max_tokens:"),),
    ),
    Mistake(
        Text("Computed tokens are counted twice", "已计算的 token 记了两次"),
        Text(
            "`schedule` and `update` both add the chunk to `num_computed_tokens`. The engine of chapter 4 counts in "
            "`schedule`, and this exercise in `update`: once is enough.",
            "`schedule` 和 `update` 都把 chunk 加到了 `num_computed_tokens` 上。第 4 章的引擎在 `schedule` 里记，"
            "这个练习在 `update` 里记：只记一次。",
        ),
        (
            (
                FIRST_LOOP + SECOND_LOOP,
                (FIRST_LOOP + SECOND_LOOP).replace(
                    "            budget -= num_new_tokens\n",
                    "            budget -= num_new_tokens\n            seq.num_computed_tokens += num_new_tokens\n",
                ),
            ),
        ),
    ),
    Mistake(
        Text("A sequence ends one token early", "序列早一个 token 结束"),
        Text(
            "A sequence leaves `running` when it has `max_tokens` output tokens, the new one included.",
            "序列有了 `max_tokens` 个输出 token（包括新的这个）才离开 `running`。",
        ),
        (("== seq.max_tokens:", "== seq.max_tokens - 1:"),),
    ),
    Mistake(
        Text("Only the prompt gives a token", "只有提示词得到一个 token"),
        Text(
            "A sequence gets a new token whenever all of its tokens are computed: after the prompt, "
            "and after each decode.",
            "只要一个序列的 token 全部算完，就得到一个新 token：提示词之后有，每次解码之后也有。",
        ),
        (("if seq.num_computed_tokens == seq.num_tokens:", "if seq.num_computed_tokens == seq.num_prompt_tokens:"),),
    ),
)

EXERCISES = (
    Build(
        name="schedule",
        chapter="04_one_step",
        title=Text("A scheduler with a token budget", "带 token 预算的调度器"),
        task=Text(
            "`schedule` decides what the next step computes: at most `budget` tokens. It goes through `running`, then\n"
            "through `waiting`, and gives each sequence min(work, budget left) tokens, with work = num_tokens -\n"
            "num_computed_tokens. When the budget is spent, the other sequences get nothing. A waiting sequence that\n"
            "gets a share of it moves to the end of `running`. (Memory plays no part in this exercise.)\n"
            "`update` follows each step: it counts the computed tokens. A sequence whose tokens are all computed "
            "gets a\n"
            "new token (`num_tokens` grows by 1), and leaves `running` when it has `max_tokens` output tokens.\n"
            "\n"
            "    budget 8; A: 12 tokens, B: 5 tokens, both wait     step 1  [(A, 8)]\n"
            "    A's prompt ends here, so A gets a token            step 2  [(A, 4), (B, 4)]\n"
            "    A decodes, and B's prompt ends                     step 3  [(A, 1), (B, 1)]",
            "`schedule` 决定下一步算什么，最多 `budget` 个 token。它先遍历 `running`，再遍历 `waiting`，\n"
            "给每个序列 min(工作量, 剩余预算) 个 token，工作量 = num_tokens - num_computed_tokens。\n"
            "预算用完后，其余序列什么也得不到。分到预算的等待序列移到 `running` 末尾。（本题不考虑内存。）\n"
            "每步之后调用 `update`：累加已计算的 token。全部 token 都算完的序列采样出一个新 token\n"
            "（`num_tokens` 加 1）；输出达到 `max_tokens` 个 token 的序列离开 `running`。\n"
            "\n"
            "    预算 8；A 有 12 个 token，B 有 5 个，都在等待      第 1 步  [(A, 8)]\n"
            "    A 的提示词到此算完，所以 A 得到一个 token          第 2 步  [(A, 4), (B, 4)]\n"
            "    A 解码，B 的提示词算完                             第 3 步  [(A, 1), (B, 1)]",
        ),
        hints=(
            Text(
                "Decodes and prompts need no different cases: a decode is a sequence with 1 token of work.",
                "解码和提示词不用分开处理：解码就是工作量为 1 的序列。",
            ),
            Text(
                "Two loops: `for seq in self.running`, then `while budget > 0 and self.waiting`. Both append "
                "`(seq, num_new_tokens)` and subtract `num_new_tokens` from the budget.",
                "两个循环：先 `for seq in self.running`，再 `while budget > 0 and self.waiting`。两个循环都追加 "
                "`(seq, num_new_tokens)`，并从预算里减去 `num_new_tokens`。",
            ),
            Text(
                "In `update`, for each chunk: add to `num_computed_tokens`; if it equals `num_tokens`, add 1 to "
                "`num_tokens`; if `num_tokens - num_prompt_tokens == max_tokens`, remove the sequence.",
                "`update` 里，对每个 chunk：累加 `num_computed_tokens`；如果等于 `num_tokens`，`num_tokens` 加 1；"
                "如果 `num_tokens - num_prompt_tokens == max_tokens`，移除这个序列。",
            ),
        ),
        answer=SOLUTION,
        holes=("Scheduler.schedule", "Scheduler.update"),
        run=run,
        examples=(
            Case(8, (Request(12, 6), Request(16, 4), Request(14, 3, 3))),
            Case(3, (Request(1, 4), Request(7, 2), Request(2, 2, 1), Request(1, 1, 1))),
            Case(2, (Request(4, 2, RUNNING), Request(3, 2, RUNNING), Request(1, 1, RUNNING), Request(1, 3))),
            Case(9, (Request(2, 2), Request(3, 1), Request(9, 2, 1))),
        ),
        cases=lambda: st.builds(Case, st.integers(1, 9), request_lists()),
        describe=describe,
        mistakes=MISTAKES,
    ),
)
