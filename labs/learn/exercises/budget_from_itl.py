"""Choose a budget from the longest gap between tokens that users accept, and compute what it costs a prompt."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.tensors import draw_table
from labs.learn.texts import Text

SOLUTION = '''
def choose_budget(target_us, fixed_us, token_us, num_decodes):
    """Return the largest budget with which no step takes longer than `target_us`, or None.

    None: the budget would leave no token for a prompt. A step of n tokens takes fixed_us + n * token_us
    microseconds. `num_decodes` sequences decode in each step.
    """
    budget = (target_us - fixed_us) // token_us
    return budget if budget > num_decodes else None


def count_steps(prompt_len, budget, num_decodes):
    """Return how many steps compute the prompt, if decodes get their tokens of the budget first."""
    room = budget - num_decodes
    return -(-prompt_len // room)  # rounded up


def compute_ttft(prompt_len, budget, num_decodes, fixed_us, token_us):
    """Return the microseconds from the first chunk of the prompt to its first token: the sum of its steps."""
    num_steps = count_steps(prompt_len, budget, num_decodes)
    return num_steps * fixed_us + (prompt_len + num_steps * num_decodes) * token_us
'''


class Case(NamedTuple):
    target_us: int
    fixed_us: int
    token_us: int
    num_decodes: int
    prompt_len: int


def run(answer: ModuleType, case: Case) -> Iterator[Seen]:
    """Observe the budget, then steps and TTFT with the right budget, so that one mistake is seen at a time."""
    budget = answer.choose_budget(case.target_us, case.fixed_us, case.token_us, case.num_decodes)
    yield Seen(Text("budget", "预算"), budget, draw_steps(case, budget))
    right = right_budget(case)
    if right is None:
        return
    label = Text(f"steps with a budget of {right}", f"预算 {right} 时的步数")
    yield Seen(label, answer.count_steps(case.prompt_len, right, case.num_decodes))
    ttft = answer.compute_ttft(case.prompt_len, right, case.num_decodes, case.fixed_us, case.token_us)
    yield Seen(Text(f"TTFT in µs with a budget of {right}", f"预算 {right} 时的 TTFT（µs）"), ttft)


def right_budget(case: Case) -> int | None:
    budget = (case.target_us - case.fixed_us) // case.token_us
    return budget if budget > case.num_decodes else None


def draw_steps(case: Case, budget: Any) -> str:
    """Return a table of the steps that compute the prompt with this budget: their tokens and times."""
    if not isinstance(budget, int) or isinstance(budget, bool):
        return "–"
    rows: list[list[str]] = []
    rest = case.prompt_len
    while rest > 0 and len(rows) < 8:
        chunk = min(rest, budget - case.num_decodes)
        if chunk < 1:
            rows.append([str(len(rows) + 1), str(case.num_decodes), "0", "–", "–"])
            break
        rest -= chunk
        time = case.fixed_us + (case.num_decodes + chunk) * case.token_us
        note = f"> {case.target_us}" if time > case.target_us else ""
        rows.append([str(len(rows) + 1), str(case.num_decodes), str(chunk), str(time), note])
    lines = draw_table(["step", "decodes", "chunk", "µs", ""], rows)
    return lines + (f"\n…  prompt tokens left: {rest}" if rest > 0 else "")


def draw(case: Case, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Draw the steps with the right budget, if the budget itself is right."""
    budget = right_budget(case)
    if right is None or right.drawing or budget is None:
        return []
    return [(Text("the steps of the prompt", "计算提示词的各步"), draw_steps(case, budget))]


def describe(case: Case) -> Text:
    return Text(
        f"A step of n tokens takes {case.fixed_us} + n · {case.token_us} µs, and may take {case.target_us} µs. "
        "Decodes: "
        f"{case.num_decodes}. Tokens of the prompt: {case.prompt_len}.",
        f"n 个 token 的一步用时 {case.fixed_us} + n · {case.token_us} µs，最多允许 {case.target_us} µs。"
        f"正在解码的序列：{case.num_decodes}。提示词的 token 数：{case.prompt_len}。",
    )


@st.composite
def cases(draw: Any) -> Case:
    fixed, token = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    target = fixed + draw(st.integers(0, 40))
    return Case(target, fixed, token, draw(st.integers(1, 6)), draw(st.integers(1, 20)))


MISTAKES = (
    Mistake(
        Text("The fixed time is forgotten", "忘了固定时间"),
        Text(
            "Each step takes `fixed_us`, for the weights and the launches, before the first token counts. Only the "
            "rest "
            "of the target is for tokens.",
            "每一步都要先花 `fixed_us` 读权重、启动 kernel。目标时间减去它，剩下的才能用来算 token。",
        ),
        (("(target_us - fixed_us) // token_us", "target_us // token_us"),),
    ),
    Mistake(
        Text("Rounded up", "向上取整了"),
        Text(
            "The budget must not exceed the target by a part of a token: round down.",
            "预算哪怕多出一个 token 的零头，也会超过目标：要向下取整。",
        ),
        (("(target_us - fixed_us) // token_us", "-(-(target_us - fixed_us) // token_us)"),),
    ),
    Mistake(
        Text("The chunk instead of the budget", "返回的是 chunk 而不是预算"),
        Text(
            "The budget is for the whole step: decodes and the chunk. The chunk is the budget minus the decodes.",
            "预算是整个一步的：解码加上 chunk。chunk 才是预算减去解码的部分。",
        ),
        (
            (
                "return budget if budget > num_decodes else None",
                "return budget - num_decodes if budget > num_decodes else None",
            ),
        ),
    ),
    Mistake(
        Text("A budget without room for a prompt", "预算里没有提示词的位置"),
        Text(
            "If the decodes take the whole budget, or more, a prompt gets no token and waits for ever. Return None.",
            "如果解码就占满甚至超过了预算，提示词得不到 token，会永远等下去。这时返回 None。",
        ),
        (("return budget if budget > num_decodes else None", "return budget"),),
    ),
    Mistake(
        Text("Room for 0 tokens", "只剩 0 个 token 的位置"),
        Text(
            "A budget equal to the number of decodes leaves 0 tokens for the prompt: `>`, not `>=`.",
            "预算等于解码的个数时，提示词能得到 0 个 token：用 `>`，不是 `>=`。",
        ),
        (("budget > num_decodes", "budget >= num_decodes"),),
    ),
    Mistake(
        Text("Decodes take no budget", "没有扣除解码占用的预算"),
        Text(
            "Decodes come first, with one token each. A chunk has at most budget - num_decodes tokens.",
            "先安排解码，每个一个 token。一个 chunk 最多有 budget - num_decodes 个 token。",
        ),
        (("room = budget - num_decodes", "room = budget"),),
    ),
    Mistake(
        Text("The last step is not counted", "最后一步没有算"),
        Text(
            "The rest of the prompt needs a step too, even if it is short: round up.",
            "提示词剩下的部分再短也要占一步：要向上取整。",
        ),
        (("return -(-prompt_len // room)  # rounded up", "return max(1, prompt_len // room)"),),
    ),
    Mistake(
        Text("One step too many", "多算了一步"),
        Text(
            "If the prompt fills its chunks exactly, the last full chunk ends it. `n // room + 1` counts a further "
            "step.",
            "提示词正好填满各个 chunk 时，没有多余的一步。`n // room + 1` 会多算一步。",
        ),
        (("return -(-prompt_len // room)  # rounded up", "return prompt_len // room + 1"),),
    ),
    Mistake(
        Text("The fixed time is paid once", "固定时间只算了一次"),
        Text(
            "Each of the steps takes `fixed_us`. This is the price of small chunks.",
            "每一步都要付 `fixed_us`。这就是 chunk 小的代价。",
        ),
        (("num_steps * fixed_us +", "fixed_us +"),),
    ),
    Mistake(
        Text("The decodes of these steps take no time", "没有算这些步里解码的时间"),
        Text(
            "In each step of the prompt, `num_decodes` tokens of other sequences are computed as well.",
            "计算提示词的每一步里，还要算其他序列的 `num_decodes` 个 token。",
        ),
        (("(prompt_len + num_steps * num_decodes) * token_us", "prompt_len * token_us"),),
    ),
    Mistake(
        Text("The last step is counted in full", "最后一步按满的算了"),
        Text(
            "The last chunk has only the rest of the prompt, so that its step is shorter than the others.",
            "最后一个 chunk 只有提示词剩下的部分，所以这一步比其他的短。",
        ),
        (("(prompt_len + num_steps * num_decodes) * token_us", "num_steps * budget * token_us"),),
    ),
    Mistake(
        Text("The fixed time is added", "加上了固定时间"),
        Text(
            ("The fixed time is a part of each step. What is left for tokens is `target_us - fixed_us`."),
            "固定时间是每一步的一部分，留给 token 的是 `target_us - fixed_us`。",
        ),
        (("budget = (target_us - fixed_us) // token_us", "budget = (target_us + fixed_us) // token_us"),),
    ),
    Mistake(
        Text("The fixed time for each token", "每个 token 都算了固定时间"),
        Text(
            ("A step pays `fixed_us` once, however many tokens it has. Subtract it from the target, then divide."),
            "不论有多少 token，一步只付一次 `fixed_us`。先从目标里减去它，再做除法。",
        ),
        (("budget = (target_us - fixed_us) // token_us", "budget = target_us // (fixed_us + token_us)"),),
    ),
    Mistake(
        Text("0 instead of None", "返回 0 而不是 None"),
        Text(
            "If no budget leaves a token for a prompt, the answer is None: 0 would be a budget.",
            "如果没有预算能给提示词留出 token，应返回 None：0 也会被当成预算。",
        ),
        (("else None", "else 0"),),
    ),
    Mistake(
        Text("The steps are not a whole number", "步数不是整数"),
        Text(
            "The last step may have a smaller chunk, but it is a step. Round up: `-(-a // b)`.",
            "最后一步的 chunk 可能更小，但也是一步。要向上取整：`-(-a // b)`。",
        ),
        (("return -(-prompt_len // room)", "return prompt_len / room"),),
    ),
    Mistake(
        Text("The decodes are counted once", "解码只算了一次"),
        Text(
            "Each of these steps computes `num_decodes` tokens for the decodes, too.",
            "这些步骤中的每一步都还要为解码计算 `num_decodes` 个 token。",
        ),
        (("num_steps * num_decodes", "num_decodes"),),
    ),
    Mistake(
        Text("TTFT without the fixed time", "TTFT 里没有固定时间"),
        Text(
            "Each step of the prompt has the fixed time, too: `num_steps * fixed_us`.",
            "计算提示词的每一步都有固定时间：`num_steps * fixed_us`。",
        ),
        (("num_steps * fixed_us + (", "("),),
    ),
)

EXERCISES = (
    Build(
        name="budget_from_itl",
        chapter="08_chunked_prefill",
        title=Text("A budget from a target ITL", "由目标 ITL 求预算"),
        task=Text(
            "Users accept a gap of at most `target_us` microseconds between two tokens (ITL). A step of n tokens "
            "takes\n"
            "fixed_us + n · token_us. In each step, `num_decodes` sequences decode one token each; the rest of the "
            "budget\n"
            "is for a prompt. All numbers are integers.\n"
            "`choose_budget`: the largest budget whose steps keep the target; None if it leaves no token for a "
            "prompt.\n"
            "`count_steps`: the steps that compute a prompt. `compute_ttft`: the sum of their times, in microseconds.\n"
            "\n"
            "    target_us 30, fixed_us 9, token_us 2, 4 decodes     budget (30 - 9) // 2 = 10, so chunks of 6 tokens\n"
            "    a prompt of 15 tokens     3 steps: 10 + 10 + 7 tokens     TTFT 29 + 29 + 23 = 81",
            "用户能接受的相邻两个 token 的间隔（ITL）最多 `target_us` 微秒。n 个 token 的一步用时\n"
            "fixed_us + n · token_us。每一步里有 `num_decodes` 个序列各解码一个 token，剩下的预算给一个提示词。\n"
            "所有数都是整数。\n"
            "`choose_budget`：各步都不超过目标的最大预算；如果没有给提示词留下 token，返回 None。\n"
            "`count_steps`：计算一个提示词的步数。`compute_ttft`：这些步的时间之和，单位微秒。\n"
            "\n"
            "    target_us 30，fixed_us 9，token_us 2，4 个解码     预算 (30 - 9) // 2 = 10，所以 chunk 有 6 个 token\n"
            "    15 个 token 的提示词     3 步：10 + 10 + 7 个 token     TTFT 29 + 29 + 23 = 81",
        ),
        hints=(
            Text(
                "Solve fixed_us + budget · token_us <= target_us for the budget.",
                "由 fixed_us + budget · token_us <= target_us 解出 budget。",
            ),
            Text(
                "A chunk has budget - num_decodes tokens, and the number of steps is rounded up: `-(-a // b)`.",
                "一个 chunk 有 budget - num_decodes 个 token，步数要向上取整：`-(-a // b)`。",
            ),
            Text(
                "All steps together have prompt_len + num_steps · num_decodes tokens, and pay fixed_us num_steps "
                "times.",
                "这些步一共有 prompt_len + num_steps · num_decodes 个 token，fixed_us 要付 num_steps 次。",
            ),
        ),
        answer=SOLUTION,
        holes=("choose_budget", "count_steps", "compute_ttft"),
        run=run,
        examples=(
            Case(30, 9, 2, 4, 15),
            Case(5000, 3000, 100, 4, 32),
            Case(20, 9, 2, 6, 10),
            Case(17, 9, 2, 4, 10),
            Case(19, 9, 2, 1, 8),
            Case(5, 1, 2, 1, 2),
        ),
        cases=cases,
        describe=describe,
        draw=draw,
        mistakes=MISTAKES,
    ),
)
