"""Write attention that reads one block after the other, with an online softmax. m, l and o are compared per block."""

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.tensors import Numbers, draw_table, is_close, read_tensor
from labs.learn.texts import Text

HEAD_DIM = 2

SOLUTION = '''
import torch


def attend(q, k_cache, v_cache, block_table, seq_len):
    """Return the output of one query [head_dim], and the list of (m, l, o) after each block.

    q: [head_dim]; k_cache, v_cache: [num_blocks, block_size, head_dim]
    block_table: the blocks of the sequence in their order; it may have more entries than the sequence needs
    seq_len: the number of tokens to read; slots after them may hold anything, even NaN
    """
    block_size = k_cache.shape[1]
    m, l, o = float("-inf"), 0.0, torch.zeros(len(q))
    states = []
    for i in range(-(-seq_len // block_size)):  # rounded up
        num_used = min(block_size, seq_len - i * block_size)
        k = k_cache[block_table[i], :num_used]  # [num_used, head_dim]
        v = v_cache[block_table[i], :num_used]
        scores = k @ q  # [num_used]
        m_new = max(m, scores.max().item())
        weights = 2 ** (scores - m_new)
        shrink = 2 ** (m - m_new)
        l = l * shrink + weights.sum().item()
        o = o * shrink + weights @ v
        m = m_new
        states.append((m, l, o))
    return o / l, states
'''


class Case(NamedTuple):
    """A sequence in scattered blocks. Its tokens have these scores; slots after it hold NaN, or old data."""

    block_size: int
    scores: tuple[int, ...]
    table: tuple[int, ...]
    tail: str  # "NaN" or "old"


def run(answer: ModuleType, case: Case) -> Iterator[Seen]:
    """Observe m, l and o after each block, then the output."""
    q, k_cache, v_cache = make_cache(case)
    table = [*case.table, *([0] * 2)]  # padded, as in a batch with longer sequences
    output, states = answer.attend(q, k_cache, v_cache, table, len(case.scores))
    rows: list[list[str]] = []
    for i, state in enumerate(states):
        block_id = case.table[i] if i < len(case.table) else 0
        value = read_state(state)
        label = Text(f"after block {block_id}: (m, l, o)", f"{block_id} 号块之后：(m, l, o)")
        rows.append([str(block_id), *draw_tokens(case, v_cache, i), *map(show, value)])
        yield Seen(label, value, draw_table(["block", "scores", "values", "m", "l", "o"], rows))
    yield Seen(Text("output, o / l at the end", "输出，即最后的 o / l"), read_tensor(output, [HEAD_DIM]))


def make_cache(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k_cache and v_cache. q is [1, 0], so the first number of a key is its score."""
    num_blocks, size = max(case.table) + 1, case.block_size
    filler = float("nan") if case.tail == "NaN" else 3.0
    k_cache = torch.full((num_blocks, size, HEAD_DIM), filler)
    v_cache = torch.full((num_blocks, size, HEAD_DIM), filler)
    for position, score in enumerate(case.scores):
        block_id, offset = case.table[position // size], position % size
        k_cache[block_id, offset] = torch.tensor([float(score), 7.0])
        v_cache[block_id, offset] = torch.tensor([8.0 * (1 + position * 5 % 7), 8.0 * (position % 3)])
    return torch.tensor([1.0, 0.0]), k_cache, v_cache


def draw_tokens(case: Case, v_cache: Tensor, i: int) -> list[str]:
    """Return the scores and the values of the tokens in entry `i` of the block table."""
    scores = case.scores[i * case.block_size : (i + 1) * case.block_size]
    values = v_cache[case.table[i], : len(scores)].tolist() if scores else []
    return [" ".join(map(str, scores)), "  ".join(f"({a:g}, {b:g})" for a, b in values)]


def read_state(state: Any) -> tuple[Numbers | str, ...]:
    return tuple(read_tensor(x, shape) for x, shape in zip(state, ([], [], [HEAD_DIM]), strict=True))


def show(value: Numbers | str) -> str:
    if isinstance(value, str):
        return value
    return ", ".join(f"{x:.5g}" for x in value.tensor.flatten().tolist())


def describe(case: Case) -> Text:
    tail = Text("NaN", "NaN") if case.tail == "NaN" else Text("old data (3)", "旧数据（3）")
    return Text(
        f"Blocks of {case.block_size}, block table {list(case.table)} (then padding with 0), scores "
        f"{list(case.scores)}. "
        f"The other slots hold {tail.en}.",
        f"块大小 {case.block_size}，块表 {list(case.table)}（后面用 0 填充），得分 {list(case.scores)}。"
        f"其余槽位里是{tail.zh}。",
    )


@st.composite
def cases(draw: Any) -> Case:
    size = draw(st.integers(1, 3))
    scores = draw(st.lists(st.integers(-3, 3), min_size=1, max_size=7))
    num_blocks = math.ceil(len(scores) / size)
    table = draw(st.permutations(range(1, num_blocks + 2)))[:num_blocks]
    return Case(size, tuple(scores), tuple(table), draw(st.sampled_from(("old", "NaN"))))


SHRINK = "        shrink = 2 ** (m - m_new)\n"

MISTAKES = (
    Mistake(
        Text("o is not rescaled", "o 没有重新缩放"),
        Text(
            "When a block has a larger score, m grows, and all earlier weights become smaller: multiply the old o by "
            "2 ** (m - m_new), as you did with l.",
            "某一块里有更大的得分时，m 变大，之前所有的权重都要变小：旧的 o 也要乘以 2 ** (m - m_new)，和 l 一样。",
        ),
        (("o = o * shrink + weights @ v", "o = o + weights @ v"),),
    ),
    Mistake(
        Text("l is not rescaled", "l 没有重新缩放"),
        Text(
            "When m grows, the earlier weights in l become smaller too: multiply the old l by 2 ** (m - m_new), as you "
            "did with o.",
            "m 变大时，l 里之前的权重也要变小：旧的 l 也要乘以 2 ** (m - m_new)，和 o 一样。",
        ),
        (("l = l * shrink +", "l = l +"),),
    ),
    Mistake(
        Text("Nothing is rescaled", "什么都没有重新缩放"),
        Text(
            "The weights of earlier blocks were computed with a smaller m. Before you add a block, multiply the old "
            "l and "
            "o by 2 ** (m - m_new).",
            "之前各块的权重是用较小的 m 算的。加上新的一块之前，旧的 l 和 o 都要乘以 2 ** (m - m_new)。",
        ),
        ((SHRINK, "        shrink = 1.0\n"),),
    ),
    Mistake(
        Text("The factor is upside down", "系数取反了"),
        Text(
            "m only grows, so the factor 2 ** (m - m_new) is at most 1. With m_new - m it makes earlier tokens larger, "
            "and at the first block it is infinite.",
            "m 只会变大，所以系数 2 ** (m - m_new) 不超过 1。写成 m_new - m，之前的 token 反而被放大了，"
            "而且在第一块就是无穷大。",
        ),
        ((SHRINK, "        shrink = 2 ** (m_new - m)\n"),),
    ),
    Mistake(
        Text("m is the largest score of the block only", "m 只是这一块的最大得分"),
        Text(
            "m is the largest score of all blocks so far: max(m, largest score of the block). The quotient o / l is "
            "the "
            "same, but after a block with small scores the factor is larger than 1, and can overflow.",
            "m 是到目前为止所有块的最大得分：max(m, 这一块的最大得分)。这样写 o / l 虽然不变，"
            "但遇到得分小的块，系数会大于 1，可能溢出。",
        ),
        (("max(m, scores.max().item())", "scores.max().item()"),),
    ),
    Mistake(
        Text("m starts at 0", "m 从 0 开始"),
        Text(
            "If all scores are below 0, m stays 0, which is not a score. With very small scores all weights become 0. "
            "Start with −∞.",
            "所有得分都小于 0 时，m 停在 0，而 0 不是任何得分。得分很小时，所有权重都会变成 0。要从 −∞ 开始。",
        ),
        (('m, l, o = float("-inf")', "m, l, o = 0.0"),),
    ),
    Mistake(
        Text("Empty slots of the last block are read", "读了最后一块的空槽位"),
        Text(
            "The last block may be filled only partly. Slots after the last token hold old data, or NaN: read only the "
            "first seq_len - i · block_size slots.",
            "最后一块可能没有填满。最后一个 token 之后的槽位里是旧数据或 NaN：只能读前 seq_len - i · block_size "
            "个槽位。",
        ),
        (("num_used = min(block_size, seq_len - i * block_size)", "num_used = block_size"),),
    ),
    Mistake(
        Text("0 · NaN is NaN", "0 · NaN 得到 NaN"),
        Text(
            "The empty slots of the last block have weight 0, but V may be NaN there, and 0 · NaN is NaN. Leave these "
            "slots out, or replace their V by 0.",
            "最后一块的空槽位权重是 0，但那里的 V 可能是 NaN，而 0 · NaN 还是 NaN。要跳过这些槽位，或者把它们的 V "
            "换成 0。",
        ),
        (
            ("k = k_cache[block_table[i], :num_used]", "k = k_cache[block_table[i]]"),
            ("v = v_cache[block_table[i], :num_used]", "v = v_cache[block_table[i]]"),
            ("scores = k @ q  #", 'scores = torch.where(torch.arange(block_size) < num_used, k @ q, float("-inf"))  #'),
        ),
    ),
    Mistake(
        Text("A full last block is skipped", "跳过了填满的最后一块"),
        Text(
            "`seq_len % block_size` is 0 if the last block is full, but then all of its slots are used.",
            "最后一块正好填满时，`seq_len % block_size` 是 0，但它的所有槽位都要读。",
        ),
        (
            (
                "min(block_size, seq_len - i * block_size)",
                "block_size if (i + 1) * block_size < seq_len else seq_len % block_size",
            ),
        ),
    ),
    Mistake(
        Text("The last block is forgotten", "漏了最后一块"),
        Text(
            "A block that is filled only partly is also read: round the number of blocks up.",
            "没有填满的块也要读：块数要向上取整。",
        ),
        (("range(-(-seq_len // block_size)):  # rounded up", "range(max(1, seq_len // block_size)):"),),
    ),
    Mistake(
        Text("Padding of the block table is read", "读了块表的填充项"),
        Text(
            "The table may have more entries than the sequence needs. Read ceil(seq_len / block_size) of them.",
            "块表的项可能比序列需要的多。只读 ceil(seq_len / block_size) 项。",
        ),
        (
            ("range(-(-seq_len // block_size)):  # rounded up", "range(len(block_table)):"),
            ("min(block_size, seq_len - i * block_size)", "min(block_size, max(1, seq_len - i * block_size))"),
        ),
    ),
    Mistake(
        Text("The block table is not used", "没有用块表"),
        Text(
            "Entry i of the table is the block: k_cache[block_table[i]]. Block i itself belongs to anyone.",
            "块表的第 i 项才是块号：k_cache[block_table[i]]。第 i 号块本身可能属于任何序列。",
        ),
        (("k = k_cache[block_table[i],", "k = k_cache[i,"), ("v = v_cache[block_table[i],", "v = v_cache[i,")),
    ),
    Mistake(
        Text("Blocks in the order of memory", "按内存顺序读块"),
        Text(
            "The order is that of the block table. In memory order, the last block, which is filled partly, comes at "
            "the "
            "wrong time, so that the wrong slots are left out.",
            "顺序以块表为准。按内存里的顺序读，没有填满的最后一块就不在最后，跳过的槽位也就错了。",
        ),
        (
            (
                "    states = []\n",
                "    states = []\n    block_table = sorted(block_table[: -(-seq_len // block_size)])\n",
            ),
        ),
    ),
    Mistake(
        Text("All states hold the same tensor", "所有状态里是同一个张量"),
        Text(
            "`o *= …` and `o += …` change the tensor in place, and the states of earlier blocks hold this tensor. "
            "Compute "
            "a new tensor, `o = o * shrink + …`, or append a copy.",
            "`o *= …` 和 `o += …` 原地修改张量，而之前各块的状态里存的就是这个张量。"
            "要算出新的张量 `o = o * shrink + …`，或者存一份副本。",
        ),
        (("        o = o * shrink + weights @ v\n", "        o *= shrink\n        o += weights @ v\n"),),
    ),
    Mistake(
        Text("Not divided by l", "没有除以 l"),
        Text(
            "o is the sum of weight · value. Divide it by l, the sum of the weights, once at the end.",
            "o 是 权重 · 值 之和。最后要除以权重之和 l，只除一次。",
        ),
        (("return o / l, states", "return o, states"),),
    ),
    Mistake(
        Text("Powers of e", "用了 e 的幂"),
        Text(
            "This exercise works with powers of 2, like kernels: the scores are scaled for them. Use "
            "`2 **` for the weights and for the factor.",
            "这个练习和 kernel 一样用 2 的幂，分数已按此缩放。权重和缩放因子都用 `2 **`。",
        ),
        (
            ("weights = 2 ** (scores - m_new)", "weights = torch.exp(scores - m_new)"),
            ("2 ** (m - m_new)", "2.718281828459045 ** (m - m_new)"),
        ),
    ),
    Mistake(
        Text("m is not kept", "没有保存 m"),
        Text(
            "The next block needs the largest score so far. Set `m = m_new` at the end of the loop.",
            "下一块需要目前为止的最大分数。循环末尾要 `m = m_new`。",
        ),
        (("        m = m_new\n", ""),),
    ),
    Mistake(
        Text("Only the last block counts in o", "o 里只有最后一块"),
        Text(
            "`o` adds the blocks before, rescaled: `o * shrink + weights @ v`.",
            "`o` 要加上前面各块的结果（缩放后）：`o * shrink + weights @ v`。",
        ),
        (("o = o * shrink + weights @ v", "o = weights @ v"),),
    ),
    Mistake(
        Text("Only the last block counts in l", "l 里只有最后一块"),
        Text(
            "`l` is the sum of the weights of all blocks so far: `l * shrink` and the weights of this one.",
            "`l` 是目前为止所有块的权重之和：`l * shrink` 加上这一块的权重。",
        ),
        (("l = l * shrink + weights.sum().item()", "l = weights.sum().item()"),),
    ),
    Mistake(
        Text("Keys instead of values", "用了键而不是值"),
        Text(
            "The weights come from the keys. What is summed with them are the values, from `v_cache`.",
            "权重由键算出，而用它们求和的是 `v_cache` 里的值。",
        ),
        (("v = v_cache[block_table[i], :num_used]", "v = k_cache[block_table[i], :num_used]"),),
    ),
)

EXERCISES = (
    Build(
        name="attend_to_blocks",
        chapter="06_paged_attention",
        title=Text("Paged attention, block by block", "逐块的分页注意力"),
        task=Text(
            "One query attends to a sequence whose K and V are in scattered blocks. Read one block after the other, "
            "in\n"
            "the order of the block table, and keep m, l and o of the online softmax:\n"
            "    m  the largest score so far      l  the sum of 2 ** (score - m)      o  the sum of 2 ** (score - m) "
            "· v\n"
            "A score is k · q (q is scaled already). If m grows, the old l and o are multiplied by 2 ** (m - m_new).\n"
            "Begin with m = −∞. Read only the first `seq_len` tokens: the other slots may hold anything, even NaN.\n"
            "Return (output, states): o / l at the end, and a list with (m, l, o) after each block.\n"
            "\n"
            "    blocks of 2, table [7, 2], scores 0 2 | 3 1, values 8 4 | 2 16 (head_dim 1)\n"
            "    after block 7   m = 2   l = 1/4 + 1 = 1.25            o = 8/4 + 4 = 6\n"
            "    after block 2   m = 3   l = 1.25/2 + 1 + 1/4 = 1.875  o = 6/2 + 2 + 16/4 = 9      output 9 / 1.875",
            "一个查询要读一个序列，它的 K 和 V 散落在各个块里。按块表的顺序一块一块地读，维护 online softmax 的 "
            "m、l、o：\n"
            "    m  目前的最大得分      l  2 ** (得分 - m) 之和      o  2 ** (得分 - m) · v 之和\n"
            "得分是 k · q（q 已经缩放过）。m 变大时，旧的 l 和 o 要乘以 2 ** (m - m_new)。m 从 −∞ 开始。\n"
            "只读前 `seq_len` 个 token：其余槽位里可能是任何东西，甚至 NaN。\n"
            "返回 (output, states)：最后的 o / l，以及每一块之后的 (m, l, o) 组成的列表。\n"
            "\n"
            "    块大小 2，块表 [7, 2]，得分 0 2 | 3 1，值 8 4 | 2 16（head_dim 为 1）\n"
            "    7 号块之后   m = 2   l = 1/4 + 1 = 1.25            o = 8/4 + 4 = 6\n"
            "    2 号块之后   m = 3   l = 1.25/2 + 1 + 1/4 = 1.875  o = 6/2 + 2 + 16/4 = 9      输出 9 / 1.875",
        ),
        hints=(
            Text(
                "The number of blocks is ceil(seq_len / block_size). In the last one, cut the slots after the last "
                "token "
                "off before you compute anything.",
                "块数是 ceil(seq_len / block_size)。在最后一块里，先切掉最后一个 token 之后的槽位，再做计算。",
            ),
            Text(
                "For each block: scores, m_new, weights = 2 ** (scores - m_new), then l and o: the old one times "
                "2 ** (m - m_new) plus the block's sum. Set m last.",
                "每一块：scores，m_new，weights = 2 ** (scores - m_new)，然后是 l 和 o：旧值乘以 2 ** (m - m_new)，"
                "再加上这一块的和。最后更新 m。",
            ),
            Text(
                "`v = v_cache[block_table[i], :min(block_size, seq_len - i * block_size)]`, the same for k; "
                "`o = o * shrink + weights @ v`.",
                "`v = v_cache[block_table[i], :min(block_size, seq_len - i * block_size)]`，k 也一样；"
                "`o = o * shrink + weights @ v`。",
            ),
        ),
        answer=SOLUTION,
        holes=("attend",),
        run=run,
        examples=(
            Case(2, (0, 2, 3, 1, 2), (3, 1, 2), "NaN"),
            Case(2, (1, -2, 0, 3), (2, 1), "old"),
            Case(3, (-1, -3, -2, -2), (2, 1), "old"),
            Case(3, (2, 0, 1, 1, 3, 0, 2, 1), (4, 1, 3), "NaN"),
            Case(1, (3, 1, 2), (2, 3, 1), "old"),
        ),
        cases=cases,
        describe=describe,
        is_same=is_close,
        mistakes=MISTAKES,
    ),
)
