"""Chapter 10: top-p keeps the fewest likeliest tokens whose probabilities add up to at least p."""

from collections.abc import Iterator
from math import isclose, isnan
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.texts import Text

SOLUTION = '''
import torch


def apply_top_p(probs, p):
    """Return the probabilities after top-p, in the same order as before. probs, result: [vocab_size] float64"""
    sorted_probs, token_ids = probs.sort(descending=True)  # [vocab_size] each
    sum_before = sorted_probs.cumsum(0) - sorted_probs  # of the tokens that are likelier
    is_kept = sum_before < p
    kept = torch.zeros_like(probs)
    kept[token_ids[is_kept]] = sorted_probs[is_kept]
    return kept / kept.sum()
'''


def run(answer: ModuleType, case: Any) -> Iterator[Seen]:
    """Filter the probabilities weight / (sum of the weights) with the p's of the case, written as num / (the sum)."""
    weights, nums = case
    probs = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    for num in nums:
        found = answer.apply_top_p(probs.clone(), num / sum(weights))
        yield Seen(
            Text(f"p = {num / sum(weights):g}", f"p = {num / sum(weights):g}"), [round(float(one), 6) for one in found]
        )


def is_same(a: list[float], b: list[float]) -> bool:
    near = [isclose(x, y, abs_tol=1e-5) or (isnan(x) and isnan(y)) for x, y in zip(a, b, strict=True)]
    return all(near)


def draw(case: Any, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Draw the tokens, the likeliest first, with the sum so far and both results."""
    weights, _ = case
    columns = [one.value if one is not None and isinstance(one.value, list) else [] for one in (right, yours)]
    lines, so_far = ["token   probability   sum so far     right     yours"], 0.0
    for token in sorted(range(len(weights)), key=lambda i: -weights[i]):
        prob = weights[token] / sum(weights)
        so_far += prob
        shown = [f"{one[token]:9.3f}" if token < len(one) else "        ?" for one in columns]
        lines.append(f"{token:5}   {prob:11.3f}   {so_far:10.3f} {' '.join(shown)}")
    return [(Text("The tokens, the likeliest first", "各 token，概率最大的在前"), "\n".join(lines))]


def describe(case: Any) -> Text:
    weights, _ = case
    probs = ", ".join(f"{weight}/{sum(weights)}" for weight in weights)
    return Text(f"The probabilities of tokens 0, 1, … are {probs}.", f"token 0、1、…… 的概率依次是 {probs}。")


@st.composite
def cases(draw: Any) -> Any:
    """Return different weights whose sum is a power of two: then the sums of probabilities are exact."""
    weights = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True))
    total = next(size for size in (8, 16, 32, 64, 128) if size > sum(weights) and size - sum(weights) not in weights)
    weights.insert(draw(st.integers(0, len(weights))), total - sum(weights))
    sums = [sum(sorted(weights)[-i:]) for i in range(1, len(weights) + 1)]  # p may be exactly one of them
    return tuple(weights), (draw(st.sampled_from(sums) | st.integers(1, total)),)


EXERCISES = (
    Build(
        name="top_p",
        chapter="10_from_logits_to_text",
        title=Text("Top-p", "top-p"),
        task=Text(
            "Top-p keeps the fewest likeliest tokens whose probabilities add up to at least p. All others get the\n"
            "probability 0. Then the kept probabilities are divided by their sum, so that they add up to 1 again.\n\n"
            "    probabilities       [0.25, 0.5, 0.0625, 0.125, 0.0625]     p = 0.8\n"
            "    the likeliest       0.5, then 0.25 (sum 0.75), then 0.125 (sum 0.875: this is at least 0.8)\n"
            "    kept                tokens 1, 0 and 3, with the sum 0.875\n"
            "    result              [0.286, 0.571, 0, 0.143, 0]\n\n"
            "Return the result in the order of `probs`: entry i is the probability of token i. At least one token\n"
            "is kept. (In the checker's cases no two probabilities are equal.)",
            "top-p 从概率最大的 token 开始保留，概率之和一达到 p 就停；其余 token 的概率变成 0。然后把留下的概率除\n"
            "以它们的和，使总和重新等于 1。\n\n"
            "    概率                [0.25, 0.5, 0.0625, 0.125, 0.0625]     p = 0.8\n"
            "    从大到小            0.5，再加 0.25（和为 0.75），再加 0.125（和为 0.875：已达到 0.8）\n"
            "    保留                token 1、0、3，和为 0.875\n"
            "    结果                [0.286, 0.571, 0, 0.143, 0]\n\n"
            "结果的顺序和 `probs` 相同：第 i 项是 token i 的概率。至少保留一个 token。（检查用的例子里，没有两个概\n"
            "率相等。）",
        ),
        hints=(
            Text(
                "Sort the probabilities from large to small, and keep the token ids: `probs.sort(descending=True)` "
                "returns both.",
                "把概率从大到小排序，并记下 token id：`probs.sort(descending=True)` 同时返回两者。",
            ),
            Text(
                "A token is kept if the tokens *before* it add up to less than p. So the token that crosses p is kept.",
                "如果排在一个 token **前面**的概率之和小于 p，就保留它。这样，使和达到 p 的那个 token 也会留下。",
            ),
            Text(
                "`sum_before = sorted_probs.cumsum(0) - sorted_probs`. Write the kept ones into "
                "`torch.zeros_like(probs)` "
                "at their token ids.",
                "`sum_before = sorted_probs.cumsum(0) - sorted_probs`。把留下的概率按 token id 写进 "
                "`torch.zeros_like(probs)`。",
            ),
        ),
        answer=SOLUTION,
        holes=("apply_top_p",),
        run=run,
        examples=(
            ((4, 8, 1, 2, 1), (13, 12, 1, 16, 8)),
            ((16, 8, 4, 3, 1), (28, 25, 31)),
            ((1, 2, 5), (5, 7, 8)),
            ((3, 1), (1, 2, 3, 4)),
            ((1,), (1,)),
        ),
        cases=cases,
        describe=describe,
        is_same=is_same,
        draw=draw,
        mistakes=(
            Mistake(
                Text("The token that crosses p is dropped", "丢掉了使和达到 p 的 token"),
                Text(
                    "The kept tokens must add up to at least p, so the token with which the sum reaches p is kept. "
                    "With "
                    "0.5, 0.25, 0.125 and p = 0.8, the first two add up to only 0.75. And if the likeliest token is "
                    "larger than p, nothing at all would be left.",
                    "留下的概率之和至少要是 p，所以使和达到 p 的那个 token 也要保留。概率为 0.5、0.25、0.125，p = "
                    "0.8 时，"
                    "前两个之和只有 0.75。如果最大的概率就超过 p，这样做会一个 token 都不剩。",
                ),
                (("is_kept = sum_before < p", "is_kept = sum_before + sorted_probs <= p"),),
            ),
            Mistake(
                Text("One token too many", "多留了一个 token"),
                Text(
                    "If the kept tokens already add up to exactly p, no further token is needed. Compare with `<`, not "
                    "with `<=`.",
                    "如果留下的概率之和已经恰好等于 p，就不再需要下一个 token。这里要用 `<`，不是 `<=`。",
                ),
                (("sum_before < p", "sum_before <= p"),),
            ),
            Mistake(
                Text("The probabilities do not add up to 1", "概率之和不等于 1"),
                Text(
                    "After the filter, divide the kept probabilities by their sum. Otherwise a uniform number can be "
                    "larger than all of them together, and draws no token.",
                    "过滤之后，要把留下的概率除以它们的和。否则均匀随机数可能比它们的总和还大，采不到任何 token。",
                ),
                (("return kept / kept.sum()", "return kept"),),
            ),
            Mistake(
                Text("Divided by p", "除以了 p"),
                Text(
                    "The kept probabilities add up to p or more. Divide by their sum, not by p: divided by p they can "
                    "add up to more than 1.",
                    "留下的概率之和可能大于 p。要除以它们的和，而不是除以 p：除以 p 之后总和可能超过 1。",
                ),
                (("kept / kept.sum()", "kept / p"),),
            ),
            Mistake(
                Text("Sorted in ascending order", "排成了升序"),
                Text(
                    "`sort` begins with the smallest value. Top-p begins with the likeliest token: "
                    "`probs.sort(descending=True)`.",
                    "`sort` 默认从最小值开始，而 top-p 要从概率最大的 token 开始：`probs.sort(descending=True)`。",
                ),
                (("probs.sort(descending=True)", "probs.sort()"),),
            ),
            Mistake(
                Text("The result is in sorted order", "结果停留在排序后的顺序"),
                Text(
                    "Entry i of the result is the probability of token i. Write the kept probabilities back to their "
                    "token ids; otherwise other tokens are drawn.",
                    "结果的第 i 项是 token i 的概率。要把留下的概率写回它们的 token id，否则采到的是别的 token。",
                ),
                (("kept[token_ids[is_kept]]", "kept[is_kept]"),),
            ),
            Mistake(
                Text("Each probability is compared with p", "拿单个概率和 p 比较"),
                Text(
                    "p is a limit for the sum of the likeliest tokens, not for one token.",
                    "p 限制的是概率最大的若干 token 之和，不是单个 token 的概率。",
                ),
                (("sum_before < p", "sorted_probs >= p"),),
            ),
            Mistake(
                Text("softmax of probabilities", "对概率又做了一次 softmax"),
                Text(
                    "`softmax` takes logits. Of probabilities, it makes nearly equal numbers, and the dropped tokens "
                    "get e^0 = 1 and come back. Divide by the sum instead.",
                    "`softmax` 的输入是 logits。对概率再做一次，结果会变得几乎相等；丢掉的 token 得到 e^0 = 1，"
                    "又回来了。"
                    "应该除以它们的和。",
                ),
                (("kept / kept.sum()", "kept.softmax(0)"),),
            ),
        ),
    ),
)
