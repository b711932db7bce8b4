"""Count padding: of a batch whose rows are padded to the longest one, and of static batches whose rows wait."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.texts import Text

SOLUTION = '''
def count_padding(lens):
    """Return how many places of a padded batch hold no token. `lens`: the tokens of each row, at least one row."""
    return max(lens) * len(lens) - sum(lens)


def count_wasted_places(num_steps, batch_size):
    """Return the wasted places of static batching, over all batches.

    num_steps: for each request, in the order of arrival, the number of steps that it needs
    batch_size: rows of each batch
    """
    wasted = 0
    for i in range(0, len(num_steps), batch_size):
        batch = num_steps[i : i + batch_size]
        wasted += max(batch) * batch_size - sum(batch)
    return wasted


def utilisation(num_steps, batch_size):
    """Return the share of all places of static batching that are used, from 0 to 1."""
    used = sum(num_steps)
    return used / (used + count_wasted_places(num_steps, batch_size))
'''


class Case(NamedTuple):
    """The rows of one padded batch, or the steps of requests in static batches."""

    lens: tuple[int, ...]
    batch_size: int


PADDING = Text("padding of one batch with a row for each", "组成一个 batch（每个占一行）时的填充")


def run(answer: ModuleType, case: Case) -> Iterator[Seen]:
    lens, size = list(case.lens), case.batch_size
    yield Seen(PADDING, answer.count_padding(list(lens)))
    label = Text(f"wasted places of static batches, rows: {size}", f"静态批处理（每个 batch {size} 行）空转的位置")
    yield Seen(label, answer.count_wasted_places(list(lens), size))
    yield Seen(Text("utilisation of these static batches", "这些静态 batch 的利用率"), answer.utilisation(lens, size))


def draw_rows(lens: list[int]) -> str:
    """Return a line for each row: `■` is a token or a used place, `·` is padding."""
    return "\n".join("■" * n + "·" * (max(lens) - n) for n in lens)


def draw(case: Case, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Draw the batches that are counted, and the right counts below them."""
    lens, size = list(case.lens), case.batch_size
    if right is not None and right.label == PADDING:
        batches = [lens]
    else:
        batches = [lens[i : i + size] for i in range(0, len(lens), size)]
        batches[-1] = batches[-1] + [0] * (size - len(batches[-1]))
    drawn = "\n\n".join(map(draw_rows, batches))
    counts = f"■ {drawn.count('■')}   · {drawn.count('·')}"
    return [(Text("■ used, · wasted", "■ 已使用，· 浪费"), f"{drawn}\n\n{counts}")]


def is_near(a: Any, b: Any) -> bool:
    return bool(abs(a - b) < 1e-9)


def describe(case: Case) -> Text:
    lens = " ".join(map(str, case.lens))
    return Text(
        f"Lengths, or numbers of steps: {lens}. Rows of a static batch: {case.batch_size}.",
        f"长度（或步数）：{lens}。静态 batch 的行数：{case.batch_size}。",
    )


MISTAKES = (
    Mistake(
        Text("The longest row is counted as padding", "把最长的一行也算进了填充"),
        Text(
            "Padding is what is missing to the longest row: places minus tokens. This counts all places.",
            "填充是每行与最长一行之间差的部分：位置数减去 token 数。这里数的是全部位置。",
        ),
        (("max(lens) * len(lens) - sum(lens)", "max(lens) * len(lens)"),),
    ),
    Mistake(
        Text("Rows are padded to the shortest", "按最短的一行填充"),
        Text(
            "No token may be cut off, so all rows become as long as the longest one.",
            "token 一个也不能丢，所以每一行都要填充到最长一行的长度。",
        ),
        (("max(lens) * len(lens) - sum(lens)", "sum(lens) - min(lens) * len(lens)"),),
    ),
    Mistake(
        Text("One difference for the whole batch", "整个 batch 只算了一个差"),
        Text(
            "Each row has its own padding. The difference between the longest and the shortest row is the padding of "
            "the shortest row only.",
            "每一行都有自己的填充。最长与最短之差只是最短那一行的填充。",
        ),
        (("max(lens) * len(lens) - sum(lens)", "max(lens) - min(lens)"),),
    ),
    Mistake(
        Text("One batch instead of several", "算成了一个 batch"),
        Text(
            "Each batch ends with its own longest request, and then the next one begins. Take the maximum of each "
            "batch, "
            "not of all requests.",
            "每个 batch 到它自己最长的请求结束为止，然后下一个 batch 开始。要取每个 batch 的最大值，而不是所有请求的。",
        ),
        (("max(batch) * batch_size", "max(num_steps) * batch_size"),),
    ),
    Mistake(
        Text("Empty rows of the last batch are forgotten", "忘了最后一个 batch 的空行"),
        Text(
            "A batch has `batch_size` rows, also if the last requests do not fill it. Its empty rows are wasted too.",
            "每个 batch 都有 `batch_size` 行，最后几个请求没有填满时也一样。空行也算浪费。",
        ),
        (("max(batch) * batch_size", "max(batch) * len(batch)"),),
    ),
    Mistake(
        Text("The last batch is forgotten", "漏了最后一个 batch"),
        Text(
            "If the requests do not fill all batches, the rest is a batch too: round up, or step through the list by "
            "`batch_size`.",
            "请求不能正好分满时，剩下的也是一个 batch：要向上取整，或者按 `batch_size` 为步长遍历列表。",
        ),
        (("range(0, len(num_steps), batch_size)", "range(0, len(num_steps) - batch_size + 1, batch_size)"),),
    ),
    Mistake(
        Text("Requests are sorted by length", "按长度排了序"),
        Text(
            "Sorting the requests by length would often waste less, but the lengths of answers are not known in "
            "advance. Batches are formed in the order of arrival.",
            "按长度排序往往浪费更少，但回答有多长事先并不知道。batch 按到达顺序组成。",
        ),
        (("    wasted = 0\n", "    wasted = 0\n    num_steps = sorted(num_steps)\n"),),
    ),
    Mistake(
        Text("The wasted share", "算成了浪费的比例"),
        Text(
            "Utilisation is the used share: used places / all places. 1 minus this is the waste.",
            "利用率是已使用的比例：已使用的位置 / 全部位置。1 减去它才是浪费。",
        ),
        (("return used / (used", "return 1 - used / (used"),),
    ),
    Mistake(
        Text("Used divided by wasted", "已使用的除以了浪费的"),
        Text(
            "Divide by all places, which are the used and the wasted ones together.",
            "要除以全部位置，即已使用的与浪费的之和。",
        ),
        (
            (
                "return used / (used + count_wasted_places(num_steps, batch_size))",
                "return used / (count_wasted_places(num_steps, batch_size) or used)",
            ),
        ),
    ),
    Mistake(
        Text("The last request counts as the longest", "把最后一个请求当成了最长的"),
        Text(
            "A batch ends with its longest request, which may be any of them: `max(batch)`.",
            "一个 batch 到它最长的请求结束为止，最长的可以是任何一个：`max(batch)`。",
        ),
        (("wasted += max(batch) * batch_size - sum(batch)", "wasted += batch[-1] * batch_size - sum(batch)"),),
    ),
    Mistake(
        Text("Only the last batch is counted", "只算了最后一个 batch"),
        Text("Add up the wasted places of all batches.", "要把所有 batch 浪费的位置加起来。"),
        (("wasted += max(batch) * batch_size - sum(batch)", "wasted = max(batch) * batch_size - sum(batch)"),),
    ),
    Mistake(
        Text("Batches overlap", "batch 重叠了"),
        Text(
            ("The next batch begins after the `batch_size` requests of this one, not one request later."),
            "下一个 batch 从这 `batch_size` 个请求之后开始，而不是往后一个请求。",
        ),
        (("range(0, len(num_steps), batch_size)", "range(len(num_steps))"),),
    ),
    Mistake(
        Text("Used places count as wasted", "用到的位置也算成浪费"),
        Text(
            ("The places of a batch are rows times steps. Those that are used, `sum(batch)`, are not wasted."),
            "一个 batch 的位置数是行数乘以步数。其中用到的 `sum(batch)` 个不算浪费。",
        ),
        (("wasted += max(batch) * batch_size - sum(batch)", "wasted += max(batch) * batch_size"),),
    ),
    Mistake(
        Text("The share is rounded down", "比例被向下取整"),
        Text(
            "`//` gives a whole number, here nearly always 0. A share is a fraction: `/`.",
            "`//` 得到整数，这里几乎总是 0。比例是小数：用 `/`。",
        ),
        (("return used / (used", "return used // (used"),),
    ),
)

EXERCISES = (
    Build(
        name="count_padding",
        chapter="04_one_step",
        title=Text("Count padding", "数填充"),
        task=Text(
            "A tensor has rows of equal length. If sequences with different numbers of tokens are its rows, the "
            "shorter\n"
            "ones are padded to the length of the longest. `count_padding` counts the places without a token.\n"
            "Static batching wastes places too: `batch_size` requests start together, in the order of arrival, and "
            "the\n"
            "next ones start when the last of them has finished. `count_wasted_places` counts the places (row and "
            "step)\n"
            "that are not used, over all batches. The last batch may have fewer requests; its empty rows count as "
            "well.\n"
            "`utilisation` is the share of the places that are used.\n"
            "\n"
            "    count_padding([5, 1, 1, 1])           12    a chunk of 5 tokens beside three decodes: (5 - 1) · 3\n"
            "    count_wasted_places([2, 7, 1, 6], 2)  10    2 rows · (7 + 6) steps - 16 used\n"
            "    utilisation([2, 7, 1, 6], 2)          16 / 26",
            "张量的每一行一样长。如果把 token 数不同的序列作为各行，短的就要填充（padding）到最长一行的长度。\n"
            "`count_padding` 数出没有 token 的位置。\n"
            "静态批处理也会浪费位置：`batch_size` 个请求按到达顺序一起开始，等其中最后一个结束，下一批才开始。\n"
            "`count_wasted_places` 数出所有 batch 里没有用到的位置（一行的一步是一个位置）。\n"
            "最后一个 batch 的请求可能不够，它的空行也算。`utilisation` 是用到的位置所占的比例。\n"
            "\n"
            "    count_padding([5, 1, 1, 1])           12    5 个 token 的 chunk 与三个解码：(5 - 1) · 3\n"
            "    count_wasted_places([2, 7, 1, 6], 2)  10    2 行 · (7 + 6) 步 - 用到的 16\n"
            "    utilisation([2, 7, 1, 6], 2)          16 / 26",
        ),
        hints=(
            Text(
                "All places minus the used ones. How many places does a batch have?",
                "全部位置减去用到的位置。一个 batch 有多少个位置？",
            ),
            Text(
                "A batch has `max(lens) * len(lens)` places. For static batches, cut `num_steps` into slices of "
                "`batch_size`.",
                "一个 batch 有 `max(lens) * len(lens)` 个位置。静态批处理时，把 `num_steps` 按 `batch_size` 切开。",
            ),
            Text(
                "`for i in range(0, len(num_steps), batch_size):` and then `max(batch) * batch_size - sum(batch)`.",
                "`for i in range(0, len(num_steps), batch_size):`，然后是 `max(batch) * batch_size - sum(batch)`。",
            ),
        ),
        answer=SOLUTION,
        holes=("count_padding", "count_wasted_places", "utilisation"),
        run=run,
        examples=(
            Case((5, 1, 1, 1), 2),
            Case((2, 7, 1, 6), 2),
            Case((3, 3, 2), 2),
            Case((4,), 3),
            Case((1, 2), 3),
            Case((1, 5, 2, 4, 3), 2),
        ),
        cases=lambda: st.builds(
            Case, st.lists(st.integers(1, 9), min_size=1, max_size=7).map(tuple), st.integers(1, 4)
        ),
        describe=describe,
        is_same=is_near,
        draw=draw,
        mistakes=MISTAKES,
    ),
)
