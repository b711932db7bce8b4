"""Merge attention outputs of several parts of a context (split KV) by the logarithms of their sums of weights."""

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.tensors import draw_table, is_close, read_tensor
from labs.learn.texts import Text

SOLUTION = '''
import math


def merge(parts):
    """Return (output, s) of attention to all tokens of the parts.

    parts: a list of (output, s) for one query head; output is a list of numbers, the o / l of the part
           s = m + log2(l) is the logarithm of the part's sum of 2 ** score; a part without tokens has s = -inf, and its
           output may hold anything, even NaN
    """
    parts = [(output, s) for output, s in parts if s > -math.inf]
    largest = max(s for _, s in parts)
    weights = [2 ** (s - largest) for _, s in parts]
    total = sum(weights)
    output = [0.0] * len(parts[0][0])
    for weight, (part, _) in zip(weights, parts, strict=True):
        for i, value in enumerate(part):
            output[i] += weight / total * value
    return output, largest + math.log2(total)
'''


class Case(NamedTuple):
    """Scores of the tokens of each part. `offset` is added to all: large scores overflow without a maximum."""

    parts: tuple[tuple[int, ...], ...]
    offset: int


def run(answer: ModuleType, case: Case) -> Iterator[Seen]:
    """Observe the logarithm, then the output, of all parts together. The parts are computed here."""
    parts = make_parts(case)
    output, s = answer.merge([(list(part), s) for part, s in parts])
    largest = max(log for _, log in parts)
    weights = [2 ** (log - largest) for _, log in parts]
    rows = [
        [name, show(part), f"{log:.5g}", f"{weight / sum(weights):.3g}"]
        for name, (part, log), weight in zip("abcd", parts, weights, strict=False)
    ]
    rows.append(["merged", show(output), show([s]), ""])
    drawing = draw_table(["part", "output", "s", "right share"], rows)
    yield Seen(Text("output", "输出"), read_tensor(output, [2]), drawing)
    yield Seen(Text("s, the logarithm of the sum of weights", "s，权重之和的对数"), read_tensor(s, []), drawing)


def make_parts(case: Case) -> list[tuple[list[float], float]]:
    """Return (output, s) of each part. Token i of all tokens has the values (8 · i, 8 or 0)."""
    parts, position = [], 0
    for scores in case.parts:
        weights = [2.0 ** (score - max(scores)) for score in scores]
        values = [(8.0 * (position + i), 8.0 * (i % 2)) for i in range(len(scores))]
        position += len(scores)
        if not scores:
            parts.append(([math.nan, math.nan], -math.inf))
            continue
        total = sum(weights)
        output = [sum(w * v[k] for w, v in zip(weights, values, strict=True)) / total for k in range(2)]
        parts.append((output, case.offset + max(scores) + math.log2(total)))
    return parts


def show(values: Any) -> str:
    numbers = read_tensor(values, [len(values)]) if isinstance(values, list | tuple) else values
    if isinstance(numbers, str) or not hasattr(numbers, "tensor"):
        return str(numbers)[:40]
    return ", ".join(f"{x:.5g}" for x in numbers.tensor.tolist())


def describe(case: Case) -> Text:
    en, zh, position = [], [], 0
    for name, scores in zip("abcd", case.parts, strict=False):
        values = ", ".join(str(8 * (position + i)) for i in range(len(scores)))
        numbers = ", ".join(str(score + case.offset) for score in scores)
        position += len(scores)
        en.append(f"{name}: scores {numbers}, values {values} in dimension 0." if scores else f"{name}: no tokens.")
        zh.append(f"{name}：得分 {numbers}，第 0 维的值 {values}。" if scores else f"{name}：没有 token。")
    return Text("Parts: " + " ".join(en), "各部分：" + "".join(zh))


def cases() -> st.SearchStrategy[Case]:
    part = st.lists(st.integers(-3, 3), max_size=4).map(tuple)
    parts = st.lists(part, min_size=1, max_size=4).filter(lambda parts: any(map(len, parts))).map(tuple)
    return st.builds(Case, parts, st.sampled_from((0, 0, 2000, -2000)))


KEPT = "    parts = [(output, s) for output, s in parts if s > -math.inf]\n"

MISTAKES = (
    Mistake(
        Text("The mean of the outputs", "取了输出的平均值"),
        Text(
            "The parts do not count equally: a part with larger scores, or with more tokens, has a larger sum of "
            "weights, "
            "2 ** s. Weigh the outputs by it.",
            "各部分的分量不同：得分大的、token 多的部分，权重之和 2 ** s 也大。要按它来加权。",
        ),
        (("weight / total * value", "value / len(parts)"),),
    ),
    Mistake(
        Text("Weighed by s itself", "直接用 s 加权"),
        Text(
            "s is a logarithm, and may be negative. The weight of a part is 2 ** s, or 2 ** (s - largest).",
            "s 是对数，还可能是负数。一部分的权重是 2 ** s，即 2 ** (s - largest)。",
        ),
        (("weight / total * value", "s / sum(s for _, s in parts) * value"), ("(part, _) in", "(part, s) in")),
    ),
    Mistake(
        Text("Overflow", "溢出"),
        Text(
            "2 ** 2000 overflows, and 2 ** -2000 is 0. Subtract the largest s first: then the largest weight is 1.",
            "2 ** 2000 会溢出，2 ** -2000 等于 0。先减去最大的 s，这样最大的权重是 1。",
        ),
        (("2 ** (s - largest) for", "2.0 ** s for"), ("largest + math.log2(total)", "math.log2(total)")),
    ),
    Mistake(
        Text("Powers of e", "用了 e 的幂"),
        Text(
            "s is a logarithm to base 2, because the weights are 2 ** score. Powers of e give the parts with larger s "
            "too much weight.",
            "权重是 2 ** 得分，所以 s 是以 2 为底的对数。用 e 的幂，s 大的部分权重就过大了。",
        ),
        (("2 ** (s - largest) for", "math.exp(s - largest) for"),),
    ),
    Mistake(
        Text("The weights do not sum to 1", "权重之和不是 1"),
        Text(
            "The outputs of the parts are divided by their own l already. Their weights must sum to 1: divide by the "
            "total.",
            "各部分的输出已经各自除以了自己的 l。合并时权重之和必须是 1：要除以总和。",
        ),
        (("weight / total * value", "weight * value"),),
    ),
    Mistake(
        Text("The largest part only", "只用了最大的部分"),
        Text(
            "The part with the largest s counts most, but the others count too.",
            "s 最大的部分分量最重，但其他部分也要算。",
        ),
        (("weights = [2 ** (s - largest) for", "weights = [float(s == largest) for"), ("+ math.log2(total)", "")),
    ),
    Mistake(
        Text("s is the largest s", "s 取成了最大的 s"),
        Text(
            "The merged part may be merged again, so its s must be the logarithm of the whole sum: largest + "
            "log2(total).",
            "合并的结果可能还要再合并，所以它的 s 必须是总和的对数：largest + log2(total)。",
        ),
        (("largest + math.log2(total)", "largest"),),
    ),
    Mistake(
        Text("The maximum is missing in s", "s 里漏了最大值"),
        Text(
            "The total is a sum of 2 ** (s - largest). Add `largest` again: s = largest + log2(total).",
            "总和是 2 ** (s - largest) 之和。取对数之后要把 `largest` 加回来：s = largest + log2(total)。",
        ),
        (("largest + math.log2(total)", "math.log2(total)"),),
    ),
    Mistake(
        Text("s is the sum of all s", "s 取成了各个 s 之和"),
        Text(
            "Adding logarithms multiplies the sums. The sums are to be added: log2 of the sum of 2 ** s.",
            "对数相加是把权重之和相乘。应当是权重之和相加：对 2 ** s 之和取 log2。",
        ),
        (("largest + math.log2(total)", "sum(s for _, s in parts)"),),
    ),
    Mistake(
        Text("0 · NaN of an empty part", "空的部分：0 · NaN"),
        Text(
            "A part without tokens has s = −∞ and the weight 0. Its output may be NaN, and 0 · NaN is NaN: skip this "
            "part.",
            "没有 token 的部分 s = −∞，权重是 0。它的输出可能是 NaN，而 0 · NaN 还是 NaN：要跳过这一部分。",
        ),
        ((KEPT, ""),),
    ),
    Mistake(
        Text("Only the last part counts in the output", "输出里只有最后一部分"),
        Text("The output is the sum over all parts: `+=`, not `=`.", "输出是各部分之和：用 `+=`，不用 `=`。"),
        (("output[i] += ", "output[i] = "),),
    ),
    Mistake(
        Text("The parts are added without weights", "各部分没有加权就相加"),
        Text(
            (
                "Each part is an average already, so their sum is too large. Weigh each one by its share "
                "of the sum of all weights."
            ),
            "每一部分已经是平均值，直接相加就太大了。要按各自占总权重的比例加权。",
        ),
        (("weight / total * value", "value"),),
    ),
    Mistake(
        Text("The smallest s is subtracted", "减去了最小的 s"),
        Text(
            (
                "Then the weight of the largest part is a huge number, and overflows if the parts differ "
                "much. Subtract the largest s: all weights are at most 1."
            ),
            "这样最大的部分权重非常大，各部分相差大时会溢出。应减去最大的 s：所有权重都不超过 1。",
        ),
        (("largest = max(", "largest = min("),),
    ),
    Mistake(
        Text("The natural logarithm", "用了自然对数"),
        Text(
            "s belongs to powers of 2: `math.log2`, not `math.log`.",
            "s 对应的是 2 的幂：用 `math.log2`，不用 `math.log`。",
        ),
        (("math.log2(total)", "math.log(total)"),),
    ),
    Mistake(
        Text("The exponent has the wrong sign", "指数的符号反了"),
        Text(
            "The part with the largest s has the largest weight: `2 ** (s - largest)`.",
            "s 最大的部分权重最大：`2 ** (s - largest)`。",
        ),
        (("2 ** (s - largest) for", "2 ** (largest - s) for"),),
    ),
    Mistake(
        Text("The sum instead of its logarithm", "用了和，而不是它的对数"),
        Text("s is a logarithm: `largest + math.log2(total)`.", "s 是对数：`largest + math.log2(total)`。"),
        (("largest + math.log2(total)", "largest + total"),),
    ),
)

EXERCISES = (
    Build(
        name="merge_partials",
        chapter="06_paged_attention",
        title=Text("Merge partial results", "合并部分结果"),
        task=Text(
            "In split KV, several processors each attend to a part of a long context, for the same query. Each "
            "returns\n"
            "its output o / l, and s = m + log2(l), the logarithm of its sum of weights: the sum of 2 ** score is 2 "
            "** s.\n"
            "`merge(parts)` returns (output, s) of attention to all tokens. The parts count by their sums of "
            "weights, so\n"
            "the output is a weighted mean of the outputs. Numbers such as s = 2000 must not overflow. A part may "
            "have no\n"
            "token: its s is -inf, and its output may hold NaN. At least one part has tokens.\n"
            "\n"
            "    merge([([4.0], 1.0), ([10.0], 2.0)])      weights 2 and 4, together 6\n"
            "    output [4 · 2/6 + 10 · 4/6] = [8.0]       s = log2(6) = 2 + log2(1.5)",
            "split-KV 让几个处理器对同一个查询各算长上下文的一部分。每个都返回输出 o / l，以及 s = m + log2(l)，\n"
            "即权重之和的对数：2 ** 得分 之和等于 2 ** s。\n"
            "`merge(parts)` 返回对全部 token 做注意力的 (output, s)。每一部分的权重是 2 ** s（它的权重之和），\n"
            "所以输出是各部分输出的加权平均。s = 2000 这样的数也不能溢出。\n"
            "有的部分可能没有 token：它的 s 是 -inf，输出里可能是 NaN。至少有一个部分有 token。\n"
            "\n"
            "    merge([([4.0], 1.0), ([10.0], 2.0)])      权重 2 和 4，共 6\n"
            "    output [4 · 2/6 + 10 · 4/6] = [8.0]       s = log2(6) = 2 + log2(1.5)",
        ),
        hints=(
            Text(
                "This is a softmax of the s values, and then a weighted sum of the outputs: attention over parts.",
                "对各个 s 做 softmax，再对输出加权求和：相当于对各部分做注意力。",
            ),
            Text(
                "Skip the parts with s = -inf. Subtract the largest s before 2 ** …, and add it again at the end.",
                "跳过 s = -inf 的部分。计算 2 ** … 之前减去最大的 s，最后再加回来。",
            ),
            Text(
                "`weights = [2 ** (s - largest) for _, s in parts]`, then each weight / total, and "
                "`largest + math.log2(total)`.",
                "`weights = [2 ** (s - largest) for _, s in parts]`，各自除以 total；s 是 `largest + "
                "math.log2(total)`。",
            ),
        ),
        answer=SOLUTION,
        holes=("merge",),
        run=run,
        examples=(
            Case(((1,), (2,)), 0),
            Case(((0, 2), (), (3, 1, 2)), 0),
            Case(((1, 1), (0,), (-1, 2)), 2000),
            Case(((0,), (-2, -3)), -2000),
            Case(((), (), (1, 0)), 0),
            Case(((1500,), (-1500,)), 0),
        ),
        cases=cases,
        describe=describe,
        is_same=is_close,
        mistakes=MISTAKES,
    ),
)
