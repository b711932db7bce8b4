"""Limit the chunk of each sequence in a step, so that short prompts need not wait for a long one."""

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from hypothesis import strategies as st

from labs.learn.chinese_contracts import translate
from labs.learn.exercise import Build, Mistake, Seen, make_header
from labs.learn.exercises import schedule
from labs.learn.tensors import draw_table
from labs.learn.texts import Language, Text
from labs.learn.timetable import RUNNING, Request, Step, describe_requests, run_scheduler

FIXED_MS, TOKEN_MS = 5, 1  # a step of n tokens takes 5 + n milliseconds

WITHOUT_LIMIT = schedule.SOLUTION.replace(
    """    def __init__(self, budget):
        self.budget = budget  # the largest number of tokens of one step
""",
    """    def __init__(self, budget, chunk_limit):
        self.budget = budget  # the largest number of tokens of one step
        self.chunk_limit = chunk_limit  # the largest number of tokens of one sequence in one step
""",
)
WORK = "min(seq.num_tokens - seq.num_computed_tokens, budget)"
LIMITED = "min(seq.num_tokens - seq.num_computed_tokens, budget, self.chunk_limit)"
SOLUTION = WITHOUT_LIMIT.replace(WORK, LIMITED)


class AddLimit(Build):
    """The starter is a scheduler without the limit, and a line to remove."""

    def make_starter(self, language: Language) -> str:
        line = "        budget, chunks = self.budget, []\n"
        raising = "        raise NotImplementedError  # apply self.chunk_limit below, and remove this line\n"
        code = WITHOUT_LIMIT.lstrip("\n").replace(line, raising + line)
        return make_header(self, language) + translate(code, language)


class Case(NamedTuple):
    budget: int
    chunk_limit: int
    requests: tuple[Request, ...]


def run(answer: ModuleType, case: Case) -> Iterator[Seen]:
    """Yield each step. Below its timetable are the times of the whole run."""
    seen, error = [], None
    try:
        scheduler = answer.Scheduler(case.budget, case.chunk_limit)
        for one in run_scheduler(answer, scheduler, case.budget, case.requests):
            seen.append(one)
    except Exception as raised:
        error = raised
    times = draw_times([one.value for one in seen], case.requests)
    for one in seen:
        yield one._replace(drawing=f"{one.drawing}\n\n{times}")
    if error is not None:
        raise error


def draw_times(steps: list[Step], requests: tuple[Request, ...]) -> str:
    """Return a table of TTFT and the longest gap of each request, in the whole run."""
    clock, arrived, token_times, lens = 0, {}, {}, {}
    for step in steps:
        before, clock = clock, clock + FIXED_MS + TOKEN_MS * sum(num for _, num in step.chunks)
        for name, num_tokens, _ in step.tokens:
            request = requests[ord(name) - ord("A")]
            if name not in arrived:
                arrived[name], lens[name] = before, request.prompt_len
                token_times[name] = [before] if request.arrival == RUNNING else []
            if num_tokens > lens[name]:
                token_times[name].append(clock)
            lens[name] = num_tokens
    rows = []
    for name, times in sorted(token_times.items()):
        is_new = requests[ord(name) - ord("A")].arrival != RUNNING
        gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        ttft = f"{times[0] - arrived[name]} ms" if is_new and times else "–"
        rows.append([name, ttft, f"{max(gaps)} ms" if gaps else "–"])
    return draw_table(["", "TTFT", "longest gap"], rows)


def describe(case: Case) -> Text:
    requests = describe_requests(case.requests)
    return Text(
        f"Budget of a step: {case.budget}; limit of a chunk: {case.chunk_limit}. A step of n tokens takes {FIXED_MS} "
        "+ n "
        f"ms.  \n{requests.en}",
        f"每步预算：{case.budget}；chunk 上限：{case.chunk_limit}。n 个 token 的一步用时 {FIXED_MS} + n ms。  "
        f"\n{requests.zh}",
    )


def cases() -> st.SearchStrategy[Case]:
    """Return cases with two decodes and at least two prompts, so that the times show who waits for whom."""
    decode = st.builds(Request, st.integers(1, 4), st.integers(2, 4), st.just(RUNNING))
    prompt = st.builds(Request, st.integers(1, 12), st.integers(1, 3), st.integers(0, 2))
    prompts = st.lists(prompt, min_size=2, max_size=3).map(lambda many: sorted(many, key=lambda one: one.arrival))
    requests = st.tuples(decode, decode, prompts).map(lambda parts: (parts[0], parts[1], *parts[2]))
    return st.builds(Case, st.integers(1, 9), st.integers(1, 5), requests)


LOOPS = SOLUTION[SOLUTION.index("        for seq in self.running:") : SOLUTION.index("        return chunks")]
FIRST_LOOP, SECOND_LOOP = LOOPS[: LOOPS.index("        while ")], LOOPS[LOOPS.index("        while ") :]
SHARED = "        limit = self.chunk_limit  # of all sequences together\n" + LOOPS.replace(
    "self.chunk_limit)", "limit)"
)
TAKE = "            budget -= num_new_tokens\n"
IS_PROMPT = (
    "            is_prompt = seq.num_computed_tokens < seq.num_prompt_tokens - 1 or not seq.num_computed_tokens\n"
)

MISTAKES = (
    Mistake(
        Text("The limit is not applied", "没有用上限"),
        Text(
            "A long prompt takes the whole rest of the budget in each step, and short prompts behind it wait until "
            "it is "
            "done. `min` needs a third term.",
            "长提示词每一步都拿走全部剩余预算，排在后面的短提示词要等它算完。`min` 还需要第三项。",
        ),
        ((LOOPS, LOOPS.replace(LIMITED, WORK)),),
    ),
    Mistake(
        Text("The first chunk is not limited", "第一个 chunk 没有限制"),
        Text(
            "A waiting sequence that is admitted gets its first chunk in the second loop. The limit applies there, "
            "too.",
            "等待的序列在第二个循环里得到第一个 chunk。那里也要用上限。",
        ),
        ((SECOND_LOOP, SECOND_LOOP.replace(LIMITED, WORK)),),
    ),
    Mistake(
        Text("Only the first chunk is limited", "只限制了第一个 chunk"),
        Text(
            "A long prompt that is running already gets its further chunks in the first loop. The limit applies there, "
            "too.",
            "已经在运行的长提示词，在第一个循环里得到后面的 chunk。那里也要用上限。",
        ),
        ((FIRST_LOOP, FIRST_LOOP.replace(LIMITED, WORK)),),
    ),
    Mistake(
        Text("Decodes are limited too", "把解码也限制了"),
        Text(
            "This is one limit for all sequences of the step together, and decodes use it up: the last decodes get no "
            "token, and their gap grows by a whole step. The limit is for each sequence: a decode needs 1 token and is "
            "never cut.",
            "这成了一步里所有序列共用的上限，解码也会把它用光：排在后面的解码得不到 token，间隔多出整整一步。"
            "上限是对每个序列的：解码只要 1 个 token，从不受限。",
        ),
        (
            (
                LOOPS,
                SHARED.replace(TAKE, TAKE + "            limit -= num_new_tokens\n")
                .replace("if budget == 0:", "if budget == 0 or limit == 0:")
                .replace("while budget > 0", "while limit > 0 and budget > 0"),
            ),
        ),
    ),
    Mistake(
        Text("All prompts share the limit", "所有提示词共用一个上限"),
        Text(
            "The limit is for one sequence. If all prompts of a step share it, a short prompt still waits for the long "
            "one, and budget is left unused.",
            "上限是对一个序列的。如果一步里的提示词共用它，短提示词还是要等长的，预算也白白剩下。",
        ),
        (
            (
                LOOPS,
                SHARED.replace("            num_new_tokens = ", IS_PROMPT + "            num_new_tokens = ")
                .replace("budget, limit)", "budget, limit if is_prompt else budget)")
                .replace(
                    "            chunks.append",
                    "            if num_new_tokens == 0:\n                continue\n            chunks.append",
                )
                .replace(TAKE, TAKE + "            limit -= num_new_tokens * is_prompt\n")
                .replace("while budget > 0", "while limit > 0 and budget > 0"),
            ),
        ),
    ),
    Mistake(
        Text("A limited chunk ends the step", "遇到受限的 chunk 就结束了"),
        Text(
            "The budget that the limit leaves is for the sequences behind: go on with the next one. Otherwise the "
            "short "
            "prompts still wait for the long one.",
            "上限省下的预算要留给后面的序列：接着处理下一个。否则短提示词还是要等长的。",
        ),
        (
            (
                LOOPS,
                LOOPS.replace(
                    TAKE,
                    TAKE + "            if seq.num_tokens - seq.num_computed_tokens > self.chunk_limit:\n"
                    "                return chunks\n",
                ),
            ),
        ),
    ),
    Mistake(
        Text("The budget is forgotten", "忘了预算"),
        Text(
            "The limit does not replace the budget: a chunk is at most the work, the budget left, and the limit.",
            "上限不能代替预算：chunk 不超过工作量、剩余预算和上限三者。",
        ),
        ((LOOPS, LOOPS.replace(LIMITED, LIMITED.replace("budget, ", "")).replace("budget == 0", "budget <= 0")),),
    ),
    Mistake(
        Text("Long prompts are skipped", "跳过了长提示词"),
        Text(
            "A prompt that is longer than the limit is computed in several chunks. If it is passed over, it never "
            "ends.",
            "比上限长的提示词要分成几个 chunk 来算。跳过它，它就永远算不完。",
        ),
        (
            (
                "            seq = self.waiting.popleft()\n",
                "            if self.waiting[0].num_tokens > self.chunk_limit:\n                break\n"
                "            seq = self.waiting.popleft()\n",
            ),
        ),
    ),
    Mistake(
        Text("The larger of budget and limit", "取了预算和上限中较大的"),
        Text(
            "A chunk may exceed neither the budget that is left nor `chunk_limit`: take the smallest "
            "of all three numbers.",
            "一个 chunk 既不能超过剩余预算，也不能超过 `chunk_limit`：取三个数中最小的。",
        ),
        (
            (
                "        for seq in self.running:\n            if budget == 0:\n"
                "                break\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "self.chunk_limit)\n",
                "        for seq in self.running:\n            if budget == 0:\n"
                "                break\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, max(budget, "
                "self.chunk_limit))\n",
            ),
            (
                "        while budget > 0 and self.waiting:\n"
                "            seq = self.waiting.popleft()\n"
                "            self.running.append(seq)\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "self.chunk_limit)\n",
                "        while budget > 0 and self.waiting:\n"
                "            seq = self.waiting.popleft()\n"
                "            self.running.append(seq)\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, max(budget, "
                "self.chunk_limit))\n",
            ),
        ),
    ),
    Mistake(
        Text("The limit counts the whole prompt", "上限算的是整个提示词"),
        Text(
            "`chunk_limit` is for one step. Each step may compute that many tokens of a sequence again.",
            "`chunk_limit` 是一步的上限。每一步都可以再算一个序列的这么多 token。",
        ),
        (
            (
                "        for seq in self.running:\n            if budget == 0:\n"
                "                break\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "self.chunk_limit)\n",
                "        for seq in self.running:\n            if budget == 0:\n"
                "                break\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "max(1, self.chunk_limit - seq.num_computed_tokens))\n",
            ),
        ),
    ),
    Mistake(
        Text("The budget pays for the whole prompt", "预算付了整个提示词"),
        Text(
            "A limited chunk costs only its own tokens. The rest of the budget goes to the sequences behind it.",
            "受限的 chunk 只花自己的 token 数，剩下的预算留给后面的序列。",
        ),
        (
            (
                "        for seq in self.running:\n            if budget == 0:\n"
                "                break\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "self.chunk_limit)\n            chunks.append((seq, num_new_tokens))\n"
                "            budget -= num_new_tokens\n",
                "        for seq in self.running:\n            if budget == 0:\n"
                "                break\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "self.chunk_limit)\n            chunks.append((seq, num_new_tokens))\n"
                "            budget = max(0, budget - (seq.num_tokens - seq.num_computed_tokens))\n",
            ),
        ),
    ),
    Mistake(
        Text("The limit is one too small", "上限小了一个"),
        Text("A chunk may have exactly `chunk_limit` tokens.", "一个 chunk 可以恰好有 `chunk_limit` 个 token。"),
        (
            (
                "        for seq in self.running:\n            if budget == 0:\n"
                "                break\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "self.chunk_limit)\n",
                "        for seq in self.running:\n            if budget == 0:\n"
                "                break\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "max(1, self.chunk_limit - 1))\n",
            ),
            (
                "        while budget > 0 and self.waiting:\n"
                "            seq = self.waiting.popleft()\n"
                "            self.running.append(seq)\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "self.chunk_limit)\n",
                "        while budget > 0 and self.waiting:\n"
                "            seq = self.waiting.popleft()\n"
                "            self.running.append(seq)\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "max(1, self.chunk_limit - 1))\n",
            ),
        ),
    ),
    Mistake(
        Text("One prompt in a step", "一步只准入一个提示词"),
        Text(
            "Admit waiting sequences as long as there is budget: that is what the limit leaves it for.",
            "只要还有预算就继续准入：上限省下的预算正是为此。",
        ),
        (
            (
                "        while budget > 0 and self.waiting:\n"
                "            seq = self.waiting.popleft()\n"
                "            self.running.append(seq)\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "self.chunk_limit)\n",
                "        if budget > 0 and self.waiting:\n"
                "            seq = self.waiting.popleft()\n"
                "            self.running.append(seq)\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "self.chunk_limit)\n",
            ),
        ),
    ),
    Mistake(
        Text("Nothing is admitted after a limited chunk", "受限的 chunk 之后不再准入"),
        Text(
            "A sequence that reaches the limit does not end the step. The budget that it leaves is for the next ones.",
            "一个序列达到上限，这一步并没有结束。它剩下的预算留给后面的序列。",
        ),
        (
            (
                "        while budget > 0 and self.waiting:\n"
                "            seq = self.waiting.popleft()\n"
                "            self.running.append(seq)\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "self.chunk_limit)\n            chunks.append((seq, num_new_tokens))\n"
                "            budget -= num_new_tokens\n",
                "        while budget > 0 and self.waiting:\n"
                "            seq = self.waiting.popleft()\n"
                "            self.running.append(seq)\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "self.chunk_limit)\n            chunks.append((seq, num_new_tokens))\n"
                "            budget -= num_new_tokens\n"
                "            if num_new_tokens == self.chunk_limit:\n                break\n",
            ),
        ),
    ),
    Mistake(
        Text("One token of each running sequence", "每个运行中的序列只有一个 token"),
        Text(
            "A running sequence may still be in its prompt, and then gets up to `chunk_limit` tokens.",
            "运行中的序列可能还在计算提示词，这时最多可得 `chunk_limit` 个 token。",
        ),
        (
            (
                "        for seq in self.running:\n            if budget == 0:\n"
                "                break\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, "
                "self.chunk_limit)\n",
                "        for seq in self.running:\n            if budget == 0:\n"
                "                break\n"
                "            num_new_tokens = min(seq.num_tokens - seq.num_computed_tokens, budget, 1)\n",
            ),
        ),
    ),
)

EXERCISES = (
    AddLimit(
        name="chunk_limit",
        chapter="08_chunked_prefill",
        title=Text("A limit for chunks", "限制 chunk"),
        task=Text(
            "This scheduler is the one of the exercise `schedule`, which is complete. Its weakness: a long prompt "
            "takes\n"
            "the rest of the budget in each step until it is done, and short prompts behind it wait. Change "
            "`schedule` so\n"
            "that no sequence gets more than `chunk_limit` tokens in one step. The rest of the budget goes to the\n"
            "sequences behind it. Decodes need 1 token, and go on as before.\n"
            "\n"
            "    budget 8, chunk_limit 4; A decodes, L has a prompt of 20 tokens, S one of 3\n"
            "    without the limit   A 1, L 7          S has its first token after step 4\n"
            "    with the limit      A 1, L 4, S 3     S has its first token after step 1",
            "这就是练习 `schedule` 的调度器，已经写好。它的弱点是：长提示词每一步都拿走剩余的预算，直到算完，\n"
            "排在后面的短提示词只能等。请修改 `schedule`，使任何序列在一步里得到的 token 都不超过 `chunk_limit` 个，\n"
            "剩下的预算给排在后面的序列。解码只要 1 个 token，照常进行。最后删掉 NotImplementedError 那一行。\n"
            "\n"
            "    预算 8，chunk_limit 4；A 在解码，L 的提示词有 20 个 token，S 有 3 个\n"
            "    没有上限   A 1，L 7          S 在第 4 步之后才有第一个 token\n"
            "    有上限     A 1，L 4，S 3     S 在第 1 步之后就有第一个 token",
        ),
        hints=(
            Text(
                "Where is it decided how many tokens a sequence gets? There are two places.",
                "一个序列得到多少 token，是在哪里决定的？有两处。",
            ),
            Text(
                "The limit is a further upper bound of the number of new tokens, for each sequence by itself. Do not "
                "count it down.",
                "上限只是新 token 数的又一个上界，对每个序列单独起作用。不要把它像预算那样扣减。",
            ),
            Text(
                "`min(seq.num_tokens - seq.num_computed_tokens, budget, self.chunk_limit)`, in both loops.",
                "两个循环里都写 `min(seq.num_tokens - seq.num_computed_tokens, budget, self.chunk_limit)`。",
            ),
        ),
        answer=SOLUTION,
        holes=("Scheduler.schedule",),
        run=run,
        examples=(
            Case(8, 4, (Request(3, 4, RUNNING), Request(20, 2), Request(3, 2))),
            Case(6, 2, (Request(4, 3, RUNNING), Request(2, 3, RUNNING), Request(5, 3, RUNNING), Request(7, 1))),
            Case(5, 3, (Request(9, 2), Request(2, 3, 1), Request(4, 1, 1))),
            Case(3, 5, (Request(7, 2), Request(2, 1))),
            Case(5, 3, (Request(3, 1), Request(12, 1))),
            Case(8, 3, (Request(2, 2), Request(2, 2), Request(4, 1))),
        ),
        cases=cases,
        describe=describe,
        mistakes=MISTAKES,
    ),
)
