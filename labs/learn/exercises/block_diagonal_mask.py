"""Write the mask of a step: which of the cached and new tokens of all sequences each new token reads."""

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.tensors import Numbers, first_cell, is_close, read_tensor
from labs.learn.texts import Text

SOLUTION = '''
def make_mask(chunks):
    """Return the mask of a step as a list of rows of True and False. True: the new token reads this token.

    chunks: (start, num_new_tokens) of each sequence; `start` tokens are computed already
    rows: the new tokens of all sequences, one sequence after the other
    columns: all tokens of the sequences, the computed and the new ones, one sequence after the other
    """
    num_columns = sum(start + num_new_tokens for start, num_new_tokens in chunks)
    mask, first = [], 0  # first: the column of the sequence's token 0
    for start, num_new_tokens in chunks:
        for position in range(start, start + num_new_tokens):
            mask.append([first <= column <= first + position for column in range(num_columns)])
        first += start + num_new_tokens
    return mask
'''


class Case(NamedTuple):
    chunks: tuple[tuple[int, int], ...]


def run(answer: ModuleType, case: Case) -> Iterator[Seen]:
    mask = answer.make_mask([tuple(chunk) for chunk in case.chunks])
    num_rows = sum(num_new_tokens for _, num_new_tokens in case.chunks)
    value = read_tensor(mask, [num_rows, sum(map(sum, case.chunks))])
    yield Seen(
        Text("mask: rows, columns", "掩码：行数、列数"), Mask(value.tensor) if isinstance(value, Numbers) else value
    )


class Mask(Numbers):
    def __repr__(self) -> str:
        return f"mask of shape {list(self.tensor.shape)}"

    def compare(self, other: Numbers) -> tuple[str, str]:
        """Return the first row that differs."""
        row = (self.tensor != other.tensor).nonzero()[0, 0]
        first, second = (" ".join(f"{x:g}" for x in one.tensor[row].tolist()) for one in (self, other))
        return f"row {row}: {first}", f"row {row}: {second}"


def draw(case: Case, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Draw both masks. In the learner's mask, cells that must not be read, or are missing, have another sign."""
    if right is None or not isinstance(right.value, Numbers):
        return []
    a = right.value.tensor != 0
    drawings = [
        (
            Text("right (■ reads)", "正确（■ 表示读取）"),
            draw_mask(case, [["■" if x else "·" for x in row] for row in a]),
        )
    ]
    if yours is None or not isinstance(yours.value, Numbers):
        return drawings
    b = yours.value.tensor != 0
    signs = {(True, True): "■", (False, False): "·", (False, True): "✗", (True, False): "○"}
    cells = [[signs[bool(x), bool(y)] for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]
    cell = first_cell(a.double(), b.double())
    if cell is None:  # the values are not 0 and 1
        return drawings
    rows, columns = name_tokens(case)
    title = Text(
        f"yours (✗: must not be read; ○: must be read); {rows[cell[0]]} must {'' if a[cell] else 'not '}read "
        f"{columns[cell[1]]}",
        f"你的（✗ 不该读却读了，○ 该读却没读）；{rows[cell[0]]} {'要' if a[cell] else '不能'}读 {columns[cell[1]]}",
    )
    return [*drawings, (title, draw_mask(case, cells))]


def name_tokens(case: Case) -> tuple[list[str], list[str]]:
    """Return the names of rows and columns: `B1` is token 1 of the second sequence."""
    rows, columns = [], []
    for i, (start, num_new_tokens) in enumerate(case.chunks):
        names = [f"{chr(ord('A') + i)}{position}" for position in range(start + num_new_tokens)]
        rows += names[start:]
        columns += names
    return rows, columns


def draw_mask(case: Case, cells: list[list[str]]) -> str:
    rows, columns = name_tokens(case)
    width = max(map(len, columns))
    lines = [" ".join([" " * width, *(name.rjust(width) for name in columns)])]
    for name, row in zip(rows, cells, strict=True):
        lines.append(" ".join([name.rjust(width), *(sign.rjust(width) for sign in row)]))
    return "\n".join(lines)


def describe(case: Case) -> Text:
    en, zh = [], []
    for i, (start, num_new_tokens) in enumerate(case.chunks):
        name = chr(ord("A") + i)
        en.append(f"{name}: computed {start}, new {num_new_tokens}")
        zh.append(f"{name}：已计算 {start}，新 {num_new_tokens}")
    return Text(f"Tokens of the sequences: {'; '.join(en)}.", f"各序列的 token：{'；'.join(zh)}。")


MISTAKES = (
    Mistake(
        Text("Sequences read each other", "序列之间互相读取"),
        Text(
            "The mask is causal over the whole batch: B reads the tokens of A. Each sequence reads only itself, so the "
            "mask has a block for each sequence.",
            "这个掩码只是在整个 batch 上因果：B 读到了 A 的 token。每个序列只能读自己，所以每个序列在掩码里各占一块。",
        ),
        (("first <= column <=", "0 <= column <="),),
    ),
    Mistake(
        Text("Only positions are compared", "只比较了位置"),
        Text(
            "A token must be in the same sequence, and must not come later. This mask compares positions only: a "
            "token of B also reads tokens of A.",
            "被读的 token 必须在同一个序列里，而且不能在后面。这个掩码只比较位置：B 的 token 也读了 A 的 token。",
        ),
        (
            (
                "[first <= column <= first + position for column in range(num_columns)]",
                "[other <= position for start, num in chunks for other in range(start + num)]",
            ),
        ),
    ),
    Mistake(
        Text("No causal mask inside a block", "块内没有因果掩码"),
        Text(
            "Inside its own block, a token reads only the tokens up to its own position. Here it also reads later "
            "ones.",
            "在自己的块里，token 也只能读到自己的位置为止。这里它还读了后面的 token。",
        ),
        (("column <= first + position", "column < first + start + num_new_tokens"),),
    ),
    Mistake(
        Text("The triangle is upside down", "三角形画反了"),
        Text(
            "This mask is upper triangular: a token reads the tokens after it. It must read itself and the tokens "
            "before it, which is the lower triangle.",
            "这是上三角：token 读的是它后面的 token。它应当读自己和前面的 token，也就是下三角。",
        ),
        (("first <= column <= first + position", "first + position <= column < first + start + num_new_tokens"),),
    ),
    Mistake(
        Text("A token does not read itself", "token 没有读自己"),
        Text(
            "A token reads the positions 0 … its own, its own included. Without it, the first token of a prompt would "
            "read nothing.",
            "token 要读位置 0 到它自己，包括自己。否则提示词的第一个 token 什么也读不到。",
        ),
        (("column <= first + position", "column < first + position"),),
    ),
    Mistake(
        Text("Positions count from 0 in each chunk", "每个 chunk 的位置从 0 数起"),
        Text(
            "The first new token of a chunk has position `start`: it reads the cached tokens and itself. Only without "
            "cached tokens is the block a square triangle.",
            "chunk 的第一个新 token 的位置是 `start`：它要读缓存的 token 和自己。没有缓存的 token 时，"
            "块才是方的三角形。",
        ),
        (("range(start, start + num_new_tokens):", "range(num_new_tokens):"),),
    ),
    Mistake(
        Text("Cached tokens are not read", "没有读缓存的 token"),
        Text(
            "A new token also reads the tokens of its sequence that were computed in earlier steps. That is what the "
            "KV "
            "cache is for.",
            "新 token 还要读本序列在前面各步算过的 token。KV cache 就是为此保留的。",
        ),
        (("first <= column <=", "first + start <= column <="),),
    ),
    Mistake(
        Text("All blocks begin in column 0", "所有块都从第 0 列开始"),
        Text(
            "The block of the second sequence begins after the columns of the first one.",
            "第二个序列的块要从第一个序列的列之后开始。",
        ),
        (("        first += start + num_new_tokens\n", ""),),
    ),
    Mistake(
        Text("Blocks begin too early", "块的起点太靠前"),
        Text(
            "A sequence has a column for each of its tokens, computed and new: start + num_new_tokens columns. Here "
            "the "
            "next block begins after the new ones only.",
            "一个序列的每个 token 都占一列，已计算的和新的都算：共 start + num_new_tokens 列。这里只跳过了新 token "
            "的列。",
        ),
        (("first += start + num_new_tokens", "first += num_new_tokens"),),
    ),
    Mistake(
        Text("True and False are exchanged", "True 和 False 反了"),
        Text(
            "True means that the token is read. Some libraries use True for masked cells; here it is the opposite.",
            "True 表示要读。有些库用 True 表示遮住，这里正好相反。",
        ),
        (("[first <= column <= first + position for", "[not first <= column <= first + position for"),),
    ),
    Mistake(
        Text("Columns for new tokens only", "只有新 token 的列"),
        Text(
            "The columns are all tokens that can be read: the cached ones of each sequence, too.",
            "列是所有可以读的 token，也包括每个序列缓存里的。",
        ),
        (("sum(start + num_new_tokens for start, num_new_tokens in chunks)", "sum(num for _, num in chunks)"),),
    ),
    Mistake(
        Text("Rows for computed tokens", "已计算的 token 也有行"),
        Text(
            "A row is a token that this step computes. Computed tokens are only read: they have columns, and no rows.",
            "一行是这一步要算的一个 token。已计算的 token 只是被读：它们有列，没有行。",
        ),
        (
            (
                "        for position in range(start, start + num_new_tokens):\n",
                "        for position in range(start + num_new_tokens):\n",
            ),
        ),
    ),
    Mistake(
        Text("A token reads the next one", "token 读了下一个"),
        Text(
            "The last column that a token reads is its own: `first + position`. Here it also reads the token after it.",
            "token 读的最后一列是它自己：`first + position`。这里它还读了后面的一个。",
        ),
        (("<= first + position for", "<= first + position + 1 for"),),
    ),
    Mistake(
        Text("Rows of different lengths", "各行长度不同"),
        Text(
            "All rows have a column for each token of all sequences. Fill the columns of other sequences with False.",
            "每一行都要包含所有序列的每个 token 的列。别的序列的列填 False。",
        ),
        (
            (
                "[first <= column <= first + position for column in range(num_columns)]",
                "[column <= position for column in range(start + num_new_tokens)]",
            ),
        ),
    ),
    Mistake(
        Text("Everything is read", "全部都读了"),
        Text(
            "A token reads only its own sequence, and only up to its own position. Here every token "
            "reads every other one.",
            "token 只读自己的序列，而且只读到自己的位置。这里每个 token 都读了全部。",
        ),
        (
            (
                "[first <= column <= first + position for column in range(num_columns)]",
                "[True for column in range(num_columns)]",
            ),
        ),
    ),
    Mistake(
        Text("The block begins in column `start`", "块从第 `start` 列开始"),
        Text(
            "`start` is a number of computed tokens, not a column. The columns of a sequence begin "
            "at `first`, with its token 0.",
            "`start` 是已计算的 token 数，不是列号。一个序列的列从 `first`（它的第 0 个 token）开始。",
        ),
        (("first <= column <= first + position", "start <= column <= first + position"),),
    ),
    Mistake(
        Text("A token reads only itself", "token 只读了自己"),
        Text(
            "A token reads all tokens of its sequence up to its own position, not only its own.",
            "token 要读本序列里到自己位置为止的所有 token，不只是自己。",
        ),
        (("first <= column <= first + position", "column == first + position"),),
    ),
)

EXERCISES = (
    Build(
        name="block_diagonal_mask",
        chapter="04_one_step",
        title=Text("The block-diagonal mask", "块对角掩码"),
        task=Text(
            "A step computes the new tokens of several sequences as one long list, without padding. Write the mask of\n"
            "this step: a row for each new token, a column for each token of the sequences, computed or new. A token\n"
            "reads only its own sequence, up to its own position. Return a list of rows of True (reads) and False.\n"
            "\n"
            "    chunks = [(0, 2), (2, 1)]      A: 2 new tokens      B: 2 computed tokens and 1 new one, a decode\n"
            "            A0  A1  B0  B1  B2\n"
            "        A0   ■   ·   ·   ·   ·\n"
            "        A1   ■   ■   ·   ·   ·\n"
            "        B2   ·   ·   ■   ■   ■",
            "一步把几个序列的新 token 连成一个长列表来计算，没有填充。写出这一步的掩码：每个新 token 一行，\n"
            "各序列的每个 token（已计算的和新的）一列。一个 token 只读自己的序列，读到自己的位置为止。\n"
            "返回由 True（读）和 False 组成的行的列表。\n"
            "\n"
            "    chunks = [(0, 2), (2, 1)]      A：2 个新 token      B：2 个已计算，1 个新 token（解码）\n"
            "            A0  A1  B0  B1  B2\n"
            "        A0   ■   ·   ·   ·   ·\n"
            "        A1   ■   ■   ·   ·   ·\n"
            "        B2   ·   ·   ■   ■   ■",
        ),
        hints=(
            Text(
                "Keep the column in which the current sequence begins. It grows by start + num_new_tokens.",
                "记住当前序列从哪一列开始。每个序列之后加上 start + num_new_tokens。",
            ),
            Text(
                "The new tokens of a sequence have the positions start … start + num_new_tokens - 1.",
                "一个序列的新 token 的位置是 start … start + num_new_tokens - 1。",
            ),
            Text(
                "The token at `position` reads the columns with `first <= column <= first + position`.",
                "位置为 `position` 的 token 读满足 `first <= column <= first + position` 的列。",
            ),
        ),
        answer=SOLUTION,
        holes=("make_mask",),
        run=run,
        examples=(
            Case(((0, 2), (2, 1))),
            Case(((0, 3), (0, 2))),
            Case(((4, 1), (1, 3), (0, 2))),
            Case(((2, 2),)),
        ),
        cases=lambda: st.builds(
            Case, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=3).map(tuple)
        ),
        describe=describe,
        is_same=is_close,
        draw=draw,
        mistakes=MISTAKES,
    ),
)
