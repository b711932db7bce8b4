"""Chapter 13: rejection sampling of drafts, after which tokens have the model's distribution."""

from collections.abc import Iterator
from fractions import Fraction
from types import ModuleType
from typing import Any

from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.texts import Text

SOLUTION = '''
def draw(probs, u):
    """Return the first token for which the sum of the probabilities up to and including it is greater than u."""
    sum_so_far = 0
    for token, prob in enumerate(probs):
        sum_so_far += prob
        if sum_so_far > u:
            return token
    raise ValueError(f"the probabilities add up to {sum_so_far}, which is not greater than {u}")


def accept(drafts, draft_probs, model_probs, uniforms):
    """Return the tokens of a step with drafts.

    draft_probs: of each draft, the probabilities q from which it was drawn
    model_probs: the model's probabilities p at the place of each draft, and behind the last one
    uniforms: random numbers in [0, 1), each to be used once, from the first on
    """
    numbers = iter(uniforms)
    tokens = []
    for draft, q, p in zip(drafts, draft_probs, model_probs):
        if next(numbers) * q[draft] < p[draft]:
            tokens.append(draft)
            continue
        residual = [max(a - b, 0) for a, b in zip(p, q)]
        total = sum(residual)
        probs = [one / total for one in residual]
        tokens.append(draw(probs, next(numbers)))
        return tokens
    tokens.append(draw(model_probs[len(drafts)], next(numbers)))
    return tokens
'''

EIGHTHS = 8  # the random numbers are 0/8 … 7/8


def run(answer: ModuleType, case: Any) -> Iterator[Seen]:
    """Accept the drafts of a case: (drafts, weights of q, weights of p, random numbers in eighths)."""
    drafts, _, _, numbers = case
    q, p = rows_of(case)
    uniforms = [Fraction(number, EIGHTHS) for number in numbers]
    tokens = answer.accept(list(drafts), q, p, uniforms)
    label = Text(f"drafts {list(drafts)}, u = {show(uniforms)}", f"草稿 {list(drafts)}，u = {show(uniforms)}")
    yield Seen(label, [int(token) for token in tokens])


def rows_of(case: Any) -> list[list[list[Fraction]]]:
    """Return the probabilities q and p, one row for each place."""
    _, draft_weights, model_weights, _ = case
    return [[[Fraction(one, sum(row)) for one in row] for row in rows] for rows in (draft_weights, model_weights)]


def show(values: list[Fraction]) -> str:
    return " ".join(map(str, values))


def draw_rows(case: Any, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Return a line for each place: the draft, q and p, and the limit of u below which it is accepted."""
    drafts, lines = case[0], []
    q, p = rows_of(case)
    for i, row in enumerate(p):
        line = f"p = {show(row)}"
        if i < len(drafts):
            limit = row[drafts[i]] / q[i][drafts[i]]
            line = f"draft {drafts[i]}   q = {show(q[i])}   {line}   p/q = {limit}"
        lines.append(line)
    return [(Text("The drafts and their probabilities", "草稿和它们的概率"), "\n".join(lines))]


def describe(case: Any) -> Text:
    vocab_size = len(case[2][0])
    return Text(
        f"A vocabulary of {vocab_size} tokens. q: probabilities of the draft model, p: of the model.",
        f"词表有 {vocab_size} 个 token。q 是草稿模型的概率，p 是模型的概率。",
    )


ROWS = {2: ((1, 1), (3, 1), (1, 3), (1, 0)), 3: ((1, 1, 2), (2, 1, 1), (1, 2, 1), (0, 1, 1), (1, 1, 0))}
"""Weights from which cases are made, by size of the vocabulary."""


@st.composite
def cases(draw: Any) -> Any:
    vocab_size, num_drafts = draw(st.sampled_from((2, 3))), draw(st.integers(0, 2))
    row = st.sampled_from(ROWS[vocab_size])
    q, p = (tuple(draw(row) for _ in range(num)) for num in (num_drafts, num_drafts + 1))
    drafts = tuple(draw(st.sampled_from([i for i, one in enumerate(weights) if one])) for weights in q)
    return drafts, q, p, tuple(draw(st.integers(0, EIGHTHS - 1)) for _ in range(num_drafts + 2))


EVEN, LEFT, RIGHT = (1, 1), (3, 1), (1, 3)
EXERCISES = (
    Build(
        name="rejection_sampling",
        chapter="13_speculation",
        title=Text("Rejection sampling of drafts", "草稿的拒绝采样"),
        task=Text(
            "A draft model drew each draft x from its probabilities q. The model's own probabilities are p. Write\n"
            "`accept`, which keeps drafts in such a way that the tokens have exactly the distribution p:\n"
            "- Take the next random number u. Accept x if u < p(x) / q(x), and go on with the next draft.\n"
            "- Otherwise reject x: draw a token with the next u from the *residual*, max(p - q, 0) for each token,\n"
            "  divided by the sum of the residual. Drafts behind it are dropped: return the tokens.\n"
            "- If all drafts are accepted, draw one token more from the model's last row.\n\n"
            "`draw(probs, u)` is given. All numbers are fractions, so nothing is rounded.\n\n"
            "    q = [1/2, 1/2], p = [3/4, 1/4]     draft 0: p/q = 3/2, always accepted. Draft 1: p/q = 1/2\n"
            "    u = 5/8 rejects draft 1; the residual is [1/4, 0], divided by its sum [1, 0]: token 0",
            "草稿模型从自己的概率 q 里采出每个草稿 x，模型自己的概率是 p。请写 `accept`，它按以下规则取舍草稿，使\n"
            "得到的 token 恰好服从分布 p：\n"
            "- 取下一个随机数 u。如果 u < p(x) / q(x)，接受 x，继续看下一个草稿。\n"
            "- 否则拒绝 x：用下一个 u 从**剩余分布**（residual）里采一个 token：每个 token 的 max(p - q, 0)，再除\n"
            "  以它们的和。后面的草稿都丢弃：返回得到的 token。\n"
            "- 如果草稿全部接受，从模型的最后一行再采一个 token。\n\n"
            "`draw(probs, u)` 已给出。所有数都是分数，没有舍入。\n\n"
            "    q = [1/2, 1/2]，p = [3/4, 1/4]     草稿 0：p/q = 3/2，总是接受。草稿 1：p/q = 1/2\n"
            "    u = 5/8 时拒绝草稿 1；剩余是 [1/4, 0]，除以它的和得到 [1, 0]：token 0",
        ),
        hints=(
            Text(
                "Write the loop first: accept one draft after the other, and leave the function at the first "
                "rejection.",
                "先写循环：一个接一个地接受草稿，第一次拒绝时就离开函数。",
            ),
            Text(
                "`numbers = iter(uniforms)`; each use of `next(numbers)` takes one. A rejection takes two: one for the "
                "decision, one for the draw.",
                "`numbers = iter(uniforms)`，每次 `next(numbers)` 取一个。拒绝要用两个：一个用来决定，一个用来采样。",
            ),
            Text(
                "`residual = [max(a - b, 0) for a, b in zip(p, q)]`, then `draw([one / sum(residual) for one in "
                "residual], "
                "next(numbers))`.",
                "`residual = [max(a - b, 0) for a, b in zip(p, q)]`，然后 `draw([one / sum(residual) for one in "
                "residual], "
                "next(numbers))`。",
            ),
        ),
        answer=SOLUTION,
        holes=("accept",),
        run=run,
        examples=(
            ((1,), (EVEN,), (LEFT, EVEN), (5, 2, 0)),
            ((0,), (EVEN,), (LEFT, EVEN), (7, 2, 0)),
            ((1,), (EVEN,), (LEFT, EVEN), (3, 6, 0)),
            ((1, 0), (LEFT, LEFT), (LEFT, RIGHT, EVEN), (3, 6, 1, 0)),
            ((), (), (RIGHT,), (3, 0)),
            ((2, 0), ((1, 1, 2), (2, 1, 1)), ((3, 3, 2), (1, 2, 1), (1, 1, 2)), (5, 6, 1, 7)),
            ((0, 1), ((2, 1, 1), (1, 2, 1)), ((1, 2, 1), (1, 1, 2), (1, 1, 2)), (4, 7, 6, 5)),
            ((0, 0), ((4, 2, 2), (4, 2, 2)), ((1, 3, 4), (1, 3, 4), (0, 0, 1)), (3, 3, 7, 5)),
            ((2,), ((1, 1, 2),), ((1, 1, 0), (1, 1, 2)), (0, 4, 0)),
        ),
        cases=cases,
        describe=describe,
        draw=draw_rows,
        mistakes=(
            Mistake(
                Text("Drawn from p after a rejection", "拒绝之后从 p 里采样"),
                Text(
                    "The draft was accepted with probability min(p, q) already. So after a rejection only what is "
                    "missing, max(p - q, 0), may be drawn; from p, tokens that drafts propose often come out too "
                    "often.",
                    "以 min(p, q) 的概率，草稿已经被接受了。所以拒绝之后只能从缺少的部分 max(p - q, 0) 里采样；"
                    "从 p 里采，草稿常提出的 token 就会出现得太多。",
                ),
                (("residual = [max(a - b, 0) for a, b in zip(p, q)]", "residual = p"),),
            ),
            Mistake(
                Text("The residual is q - p", "剩余分布写成了 q - p"),
                Text(
                    "The residual has the tokens that q proposes too seldom: p - q. The tokens with q - p > 0 are "
                    "those "
                    "that "
                    "are rejected.",
                    "剩余分布是 q 提得太少的部分：p - q。q - p > 0 的 token 正是会被拒绝的。",
                ),
                (("max(a - b, 0)", "max(b - a, 0)"),),
            ),
            Mistake(
                Text("The residual is not divided by its sum", "剩余分布没有除以它的和"),
                Text(
                    "The residual adds up to less than 1, so a large random number draws no token. Divide by the sum.",
                    "max(p - q, 0) 之和小于 1，随机数大时采不到任何 token。要除以它的和。",
                ),
                (("one / total for one in residual", "one for one in residual"),),
            ),
            Mistake(
                Text("Not divided by q", "没有除以 q"),
                Text(
                    "A draft is proposed with probability q(x) already. Accepted with p(x), it comes out with p(x) × "
                    "q(x). The ratio p(x) / q(x) gives min(p, q).",
                    "草稿 x 本来就只以 q(x) 的概率被提出。如果再以 p(x) 接受，它出现的概率是 p(x) × q(x)。"
                    "用比值 p(x) / q(x)，得到的才是 min(p, q)。",
                ),
                (("next(numbers) * q[draft] < p[draft]", "next(numbers) < p[draft]"),),
            ),
            Mistake(
                Text("The ratio is turned round", "比值写反了"),
                Text(
                    "Drafts that the model finds *more* likely than the draft model are always accepted: u < p(x) / "
                    "q(x).",
                    "模型认为比草稿模型**更**可能的草稿总是接受：u < p(x) / q(x)。",
                ),
                (("next(numbers) * q[draft] < p[draft]", "next(numbers) * p[draft] < q[draft]"),),
            ),
            Mistake(
                Text("Only the likeliest token is accepted", "只接受概率最大的 token"),
                Text(
                    "This is right for greedy decoding. When sampling, other tokens must come out too, as often as p "
                    "says.",
                    "贪心解码时可以这样。采样时，其他 token 也要按 p 的概率出现。",
                ),
                (("next(numbers) * q[draft] < p[draft]", "next(numbers) >= 0 and draft == p.index(max(p))"),),
            ),
            Mistake(
                Text("Goes on after a rejection", "拒绝之后继续"),
                Text(
                    "The drafts behind a rejected one were made, and the model's rows computed, for another text. Drop "
                    "them: the step ends with the token drawn from the residual.",
                    "被拒绝的草稿后面的草稿，以及模型的各行，都是针对另一段文本算的。要丢弃：这一步到剩余分布里采出的 "
                    "token 为止。",
                ),
                (("        return tokens\n    tokens", "    tokens"),),
            ),
            Mistake(
                Text("One token too few if all are accepted", "全部接受时少一个 token"),
                Text(
                    "The model has a row behind the last draft too. If all drafts are accepted, a token is drawn "
                    "from it "
                    "at no further cost.",
                    "最后一个草稿后面，模型也有一行概率。草稿全部接受时，从这一行再采一个 token，不用额外的计算。",
                ),
                (("    tokens.append(draw(model_probs[len(drafts)], next(numbers)))\n", ""),),
            ),
            Mistake(
                Text("A random number is used twice", "同一个随机数用了两次"),
                Text(
                    "After a rejection, u is known to be at least p(x) / q(x), so it is not uniform any more: small "
                    "values never occur. Take the next number for the draw.",
                    "拒绝之后，已知 u 不小于 p(x) / q(x)，它就不再是均匀分布：小的值不会出现。采样要用下一个随机数。",
                ),
                (
                    ("if next(numbers) * q[draft]", "u = next(numbers)\n        if u * q[draft]"),
                    ("draw(probs, next(numbers))", "draw(probs, u)"),
                ),
            ),
        ),
    ),
)
