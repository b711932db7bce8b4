"""Write one attention step with a KV cache. The checker shows the weight of each key that a query reads.

The values that the checker stores are not random: V of position j is 1 in dimension j, and 0 in the dimensions of other
positions. So the output of a query is the list of its attention weights, and shows which slots it has read.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.tensors import Numbers, draw_matrix, first_cell, is_close, read_tensor
from labs.learn.texts import Text

MAX_LEN = 6
OLD, KV_HEAD, HEAD_DIM = MAX_LEN, MAX_LEN + 1, MAX_LEN + 2  # two dimensions of V: old data; the number of the KV head

SOLUTION = '''
import torch


def attend(q, k, v, k_cache, v_cache, start):
    """Write k and v of the new tokens to the cache, and return the attention output of the new tokens.

    q and the result: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]
    k_cache, v_cache: [max_len, num_kv_heads, head_dim]; position i is in row i
    start: how many tokens are in the cache, and so the position of the first new token
    """
    num_tokens, num_heads, head_dim = q.shape
    end = start + num_tokens
    k_cache[start:end] = k
    v_cache[start:end] = v
    group = num_heads // k.shape[1]  # how many query heads share a KV head
    keys = k_cache[:end].repeat_interleave(group, dim=1)  # [end, num_heads, head_dim]
    values = v_cache[:end].repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) / head_dim**0.5  # [num_heads, num_tokens, end]
    positions = torch.arange(start, end)
    is_seen = torch.arange(end) <= positions[:, None]  # [num_tokens, end]
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
'''


class Case(NamedTuple):
    """Steps of one sequence: `chunks` are the numbers of new tokens. `seed` decides the queries and keys."""

    num_kv_heads: int
    group: int
    chunks: tuple[int, ...]
    seed: int


def run(answer: ModuleType, case: Case) -> Iterator[Seen]:
    """Observe the output of each step, then the cache. The cache begins with old data of another sequence."""
    num_heads = case.num_kv_heads * case.group
    k_cache, v_cache = make_keys(MAX_LEN, case.num_kv_heads, case.seed + 1), make_values(OLD, MAX_LEN, case)
    start = 0
    for i, num_tokens in enumerate(case.chunks):
        end = start + num_tokens
        q = make_keys(num_tokens, num_heads, case.seed + 7 * i + 2)
        k = make_keys(num_tokens, case.num_kv_heads, case.seed + 7 * i + 3)
        v = torch.cat([make_values(position, 1, case) for position in range(start, end)])
        out = answer.attend(q, k, v, k_cache, v_cache, start)
        positions = f"{start} … {end - 1}" if num_tokens > 1 else str(start)
        en, zh = f"step {i + 1}, position{'s' * (num_tokens > 1)} {positions}", f"第 {i + 1} 步，位置 {positions}"
        yield Seen(Text(f"{en}: weights", f"{zh}：权重"), read_output(out, q, end))
        cache = Cache(torch.stack([k_cache[:end], v_cache[:end]]))
        yield Seen(Text(f"{en}: K and V in the cache", f"{zh}：缓存里的 K 和 V"), cache)
        start = end


class Output(Numbers):
    """The output of a step, after which `end` tokens are in the cache."""

    def __init__(self, tensor: Tensor, end: int) -> None:
        super().__init__(tensor)
        self.end = end

    def __repr__(self) -> str:
        return "; ".join(self.draw_row(query, 0) for query in range(len(self.tensor)))

    def draw_row(self, query: int, head: int) -> str:
        """Return what one query reads: the weight of each key."""
        return " ".join(f"{weight:.2f}" for weight in self.tensor[query, head, : self.end].tolist())

    def compare(self, other: "Output") -> tuple[str, str]:
        """Return the weights of the query and head with the largest difference."""
        query, head, _ = find_largest(self.tensor, other.tensor)
        name = f"of query {self.end - len(self.tensor) + query}, head {head}"
        rows = [one.draw_row(query, head) for one in (self, other)]
        if rows[0] == rows[1]:
            rows = [
                f"{row}, KV head {one.tensor[query, head, KV_HEAD]:g}"
                for row, one in zip(rows, (self, other), strict=True)
            ]
        return f"weights {rows[0]} ({name})", f"weights {rows[1]} ({name})"


class Cache(Numbers):
    """K and V in the cache, of all tokens so far."""

    def __repr__(self) -> str:
        return "K " + " ".join(f"[{row[0]:.3g} …]" for row in self.tensor[0, :, 0].tolist())


def find_largest(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Return the index of the largest difference. A NaN is larger than any number."""
    difference = (a - b).abs().nan_to_num(nan=float("inf"))
    return tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))


def read_output(out: Any, q: Tensor, end: int) -> Output | str:
    numbers = read_tensor(out, q.shape)
    return numbers if isinstance(numbers, str) else Output(numbers.tensor, end)


def make_keys(num_tokens: int, num_heads: int, seed: int) -> Tensor:
    """Return small whole numbers that look random: [num_tokens, num_heads, HEAD_DIM]."""
    values = [(seed * 31 + i * i * 7 + i * 13) % 97 % 4 - 1 for i in range(num_tokens * num_heads * HEAD_DIM)]
    return torch.tensor(values, dtype=torch.float32).view(num_tokens, num_heads, HEAD_DIM)


def make_values(dimension: int, num_tokens: int, case: Case) -> Tensor:
    """Return V with a 1 in this dimension, and the number of the KV head: [num_tokens, num_kv_heads, HEAD_DIM]."""
    v = torch.zeros(num_tokens, case.num_kv_heads, HEAD_DIM)
    v[:, :, dimension] = 1
    v[:, :, KV_HEAD] = torch.arange(case.num_kv_heads)
    return v


def draw(case: Case, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Draw what differs first: the weights of a query head, or a row of the cache."""
    a, b = (None if seen is None else seen.value for seen in (right, yours))
    if isinstance(a, Output) and isinstance(b, Output):
        return draw_weights(case, a, b)
    cell = first_cell(a.tensor, b.tensor) if isinstance(a, Numbers) and isinstance(b, Numbers) else None
    if cell is None or not isinstance(b, Numbers):
        return []
    row = Text(
        f"{'KV'[cell[0]]} of position {cell[1]} is not in its row", f"位置 {cell[1]} 的 {'KV'[cell[0]]} 不在它的行里"
    )
    return [(row, str(b.tensor[cell[0], cell[1]].tolist()))]


def draw_weights(case: Case, a: Output, b: Output) -> list[tuple[Text, str]]:
    """Draw the weights of the query head with the largest difference, with that cell in brackets."""
    query, head, _ = find_largest(a.tensor, b.tensor)
    end, num_tokens = a.end, len(a.tensor)
    is_old_read = bool((b.tensor[:, head, OLD] > 0).any())
    keys = [f"key {i}" for i in range(end)] + ["old"] * is_old_read
    rows = [f"query {position}" for position in range(end - num_tokens, end)]
    columns = [*range(end), OLD][: len(keys)]
    weights = [out[:, head, columns] for out in (a.tensor, b.tensor)]
    drawings = []
    if first_cell(*weights) is not None:
        mark = (query, find_largest(weights[0][query], weights[1][query])[0])
        for (en, zh), table in zip((("right", "正确"), ("yours", "你的")), weights, strict=True):
            title = Text(
                f"weights of query head {head}, {en} ([ ]: the largest difference)",
                f"查询头 {head} 的注意力权重，{zh}（[ ]：差别最大处）",
            )
            drawings.append((title, draw_matrix(table, rows, keys, mark)))
    if is_old_read:
        text = Text(
            "old: rows that are not written yet hold data of another sequence", "old：尚未写入的行里是另一个序列的数据"
        )
        drawings.append((text, ""))
    kv_head, read = head // case.group, float(b.tensor[query, head, KV_HEAD])
    if case.num_kv_heads > 1 and read.is_integer() and read != kv_head:
        text = Text(
            f"query head {head} must read KV head {kv_head}; yours reads KV head {read:.0f}",
            f"查询头 {head} 应读 KV 头 {kv_head}；你的读了 KV 头 {read:.0f}",
        )
        drawings.append((text, ""))
    return drawings


def describe(case: Case) -> Text:
    num_heads = case.num_kv_heads * case.group
    chunks = ", ".join(map(str, case.chunks))
    return Text(
        f"Query heads: {num_heads}; KV heads: {case.num_kv_heads}; new tokens of the steps: {chunks}. V of position "
        "j is "
        "1 in dimension j only, so the output shows the weight of each key.",
        f"查询头：{num_heads}；KV 头：{case.num_kv_heads}；各步的新 token 数：{chunks}。位置 j 的 V 只在第 j 维为 1，"
        "所以输出就是每个键的权重。",
    )


def cases() -> st.SearchStrategy[Case]:
    chunks = st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda one: sum(one) <= MAX_LEN)
    return st.builds(Case, st.integers(1, 2), st.integers(1, 2), chunks.map(tuple), st.integers(0, 9))


MISTAKES = (
    Mistake(
        Text("The mask starts at position 0", "掩码从位置 0 算起"),
        Text(
            "The first new token has position `start`, not 0. A decode has one query, and it reads all keys; with a "
            "mask from 0 it reads only key 0.",
            "第一个新 token 的位置是 `start`，不是 0。解码只有一个查询，它要读所有的键；掩码从 0 算起，它就只读到键 "
            "0。",
        ),
        (("torch.arange(start, end)", "torch.arange(num_tokens)"),),
    ),
    Mistake(
        Text("Reading before writing", "先读后写"),
        Text(
            "A new token also reads itself, and the new tokens before it. Until their K and V are written, their rows "
            "hold old data: the column *old*.",
            "新 token 也要读自己，还要读同一步里排在它前面的新 token。写入之前，那些行里还是旧数据：见 *old* 一列。",
        ),
        (
            ("    k_cache[start:end] = k\n    v_cache[start:end] = v\n", ""),
            ("    return torch", "    k_cache[start:end] = k\n    v_cache[start:end] = v\n    return torch"),
        ),
    ),
    Mistake(
        Text("Scores are not divided by √head_dim", "得分没有除以 √head_dim"),
        Text(
            "A dot product grows with the number of dimensions. Without the division one weight is nearly 1 and the "
            "others nearly 0.",
            "点积随维数增大。不除的话，一个权重接近 1，其余接近 0。",
        ),
        ((" / head_dim**0.5", ""),),
    ),
    Mistake(
        Text("Scores are divided by head_dim", "得分除以了 head_dim"),
        Text("Divide by the square root of head_dim: `head_dim**0.5`.", "要除以 head_dim 的平方根：`head_dim**0.5`。"),
        (("head_dim**0.5", "head_dim"),),
    ),
    Mistake(
        Text("Softmax over the queries", "对查询做了 softmax"),
        Text(
            "The weights of one query over all its keys sum to 1: softmax goes along the keys, which are the last "
            "dimension here. In your table the columns sum to 1, not the rows.",
            "一个查询对它所有键的权重之和为 1：softmax 要沿着键的那一维，这里是最后一维。你的表里，和为 1 "
            "的是列而不是行。",
        ),
        (("softmax(dim=-1)", "softmax(dim=-2)"),),
    ),
    Mistake(
        Text("Query heads read the wrong KV heads", "查询头读错了 KV 头"),
        Text(
            "With 4 query heads and 2 KV heads, query heads 0 and 1 share KV head 0, and 2 and 3 share KV head 1. "
            "`repeat` gives 0, 1, 0, 1; `repeat_interleave` gives 0, 0, 1, 1.",
            "4 个查询头、2 个 KV 头时，查询头 0、1 共用 KV 头 0，2、3 共用 KV 头 1。`repeat` 得到 0, 1, 0, 1；"
            "`repeat_interleave` 得到 0, 0, 1, 1。",
        ),
        (
            ("k_cache[:end].repeat_interleave(group, dim=1)", "k_cache[:end].repeat(1, group, 1)"),
            ("v_cache[:end].repeat_interleave(group, dim=1)", "v_cache[:end].repeat(1, group, 1)"),
        ),
    ),
    Mistake(
        Text("Softmax over the heads", "对头做了 softmax"),
        Text(
            "Each head has weights of its own: softmax goes along the keys, which are the last dimension of "
            "[num_heads, num_tokens, end]. With one head, each of your weights is 1.",
            "每个头各有自己的权重：softmax 要沿着键的那一维，即 [num_heads, num_tokens, end] 的最后一维。"
            "只有一个头时，你的权重全是 1。",
        ),
        (("softmax(dim=-1)", "softmax(dim=0)"),),
    ),
    Mistake(
        Text("Only the new tokens are read", "只读了新 token"),
        Text(
            "`k` and `v` have only the new tokens. The tokens of earlier steps are in the cache, and this step must "
            "read them too: keys and values are the rows 0 … end - 1 of the cache, not `k` and `v`.",
            "`k` 和 `v` 里只有新 token。前面各步的 token 在缓存里，这一步也要读：键和值是缓存的第 0 … end - 1 行，"
            "不是 `k` 和 `v`。",
        ),
        (
            ("k_cache[:end].repeat", "k.repeat"),
            ("v_cache[:end].repeat", "v.repeat"),
            ("torch.arange(end) <= positions", "positions <= positions"),
        ),
    ),
    Mistake(
        Text("Keys of the new tokens, values of all", "键只有新 token 的，值是全部的"),
        Text(
            "Keys and values belong together: both are the rows 0 … end - 1 of the cache. With the keys in `k`, the "
            "shapes fit only while the cache is empty; with one new token, its score is used for all positions.",
            "键和值是成对的：都要取缓存的第 0 … end - 1 行。键只取 `k` 的话，只有缓存为空时形状才对；"
            "只有一个新 token 时，它的得分被当成了所有位置的得分。",
        ),
        (("k_cache[:end].repeat", "k.repeat"),),
    ),
    Mistake(
        Text("The mask is square", "掩码是方的"),
        Text(
            "A mask of [num_tokens, num_tokens] fits in the first step, and in a decode, whose only query reads all "
            "keys. A chunk behind cached tokens needs [num_tokens, end]: a row for each new token, and a column for "
            "each position.",
            "[num_tokens, num_tokens] 的掩码在第一步可用，解码时也可用，因为唯一的查询要读所有的键。"
            "前面已有缓存的 chunk 需要 [num_tokens, end]：每个新 token 一行，每个位置一列。",
        ),
        (("torch.arange(end) <= positions", "positions <= positions"),),
    ),
    Mistake(
        Text("A token does not read itself", "token 没有读自己"),
        Text(
            "Token i reads the tokens 0 … i, itself included: `<=`, not `<`. With `<`, the first token reads nothing, "
            "and softmax gives NaN.",
            "token i 读 token 0 … i，包括它自己：用 `<=`，不是 `<`。用 `<` 的话，第一个 token 什么也读不到，softmax "
            "得到 NaN。",
        ),
        (("torch.arange(end) <= positions", "torch.arange(end) < positions"),),
    ),
    Mistake(
        Text("A token reads the next one", "token 读到了后一个"),
        Text(
            "The mask is one position too wide: token i must not read token i + 1.",
            "掩码宽了一个位置：token i 不能读 token i + 1。",
        ),
        (("torch.arange(start, end)\n", "torch.arange(start, end) + 1\n"),),
    ),
    Mistake(
        Text("No causal mask", "没有因果掩码"),
        Text(
            "Several new tokens are computed at a time, and each may read only the tokens up to its own position. "
            "Decodes do not show this mistake, because their only token is the last one.",
            "一步会计算好几个新 token，每个只能读到自己的位置为止。解码看不出这个错误，因为它唯一的 token "
            "就是最后一个。",
        ),
        (('scores.masked_fill(~is_seen, float("-inf"))', "scores"),),
    ),
    Mistake(
        Text("Masked scores are 0", "被遮住的得分是 0"),
        Text(
            "A score of 0 has the weight exp(0) = 1 before the division by the sum. Masked scores must be −∞: "
            "exp(−∞) = 0.",
            "得分 0 在除以总和之前的权重是 exp(0) = 1。被遮住的得分必须是 −∞：exp(−∞) = 0。",
        ),
        (('float("-inf")', "0.0"),),
    ),
    Mistake(
        Text("The mask comes after the softmax", "在 softmax 之后才遮住"),
        Text(
            "Masked keys have weight 0, but they were counted in the sum of the softmax: the rows do not sum to 1. "
            "Mask the scores first.",
            "被遮住的键权重虽然是 0，但 softmax 的总和里算进了它们：各行之和不是 1。要先遮住得分。",
        ),
        (('.masked_fill(~is_seen, float("-inf")).softmax(dim=-1)', ".softmax(dim=-1) * is_seen"),),
    ),
    Mistake(
        Text("K and V are written to the first rows", "K 和 V 写到了开头的行"),
        Text(
            "The first new token belongs in row `start`. Rows 0 … start - 1 hold the tokens of earlier steps.",
            "第一个新 token 应写入第 `start` 行。第 0 … start - 1 行是前面各步的 token。",
        ),
        (
            ("k_cache[start:end] = k", "k_cache[:num_tokens] = k"),
            ("v_cache[start:end] = v", "v_cache[:num_tokens] = v"),
        ),
    ),
    Mistake(
        Text("The mask is inverted", "掩码反了"),
        Text(
            "`masked_fill` replaces the scores where the mask is True. Those are the tokens that "
            "must not be read: `~is_seen`.",
            "`masked_fill` 替换掩码为 True 的位置。那应该是不能读的 token：`~is_seen`。",
        ),
        (("masked_fill(~is_seen", "masked_fill(is_seen"),),
    ),
    Mistake(
        Text("Scores are divided by √num_heads", "分数除以了 √num_heads"),
        Text(
            "A score is a sum over the head_dim products of one head, so it is divided by √head_dim. "
            "The number of heads plays no part.",
            "一个分数是一个头里 head_dim 个乘积之和，所以要除以 √head_dim，与头数无关。",
        ),
        (("head_dim**0.5", "num_heads**0.5"),),
    ),
    Mistake(
        Text("The whole cache is read", "读了整个缓存"),
        Text(
            "The cache has rows for tokens that do not exist yet. Read the rows up to `start + num_tokens` only.",
            "缓存里有还不存在的 token 的行。只能读到第 `start + num_tokens` 行之前。",
        ),
        (
            ("k_cache[:end].repeat_interleave(group, dim=1)", "k_cache.repeat_interleave(group, dim=1)"),
            ("v_cache[:end].repeat_interleave(group, dim=1)", "v_cache.repeat_interleave(group, dim=1)"),
            ("torch.arange(end) <= positions[:, None]", "torch.ones(num_tokens, len(k_cache), dtype=torch.bool)"),
        ),
    ),
    Mistake(
        Text("K and V are not kept in the cache", "K 和 V 没有写入缓存"),
        Text(
            "This step is right, but the next one reads rows that nothing was written to. Assign to "
            "the rows of `k_cache` and `v_cache`; a new tensor is lost when the function returns.",
            "这一步是对的，但下一步会读到没有写过的行。要给 `k_cache` 和 `v_cache` 的行赋值；新建的张"
            "量在函数返回时就丢了。",
        ),
        (
            ("    k_cache[start:end] = k\n    v_cache[start:end] = v\n", ""),
            (
                "k_cache[:end].repeat_interleave(group, dim=1)",
                "torch.cat([k_cache[:start], k]).repeat_interleave(group, dim=1)",
            ),
            (
                "v_cache[:end].repeat_interleave(group, dim=1)",
                "torch.cat([v_cache[:start], v]).repeat_interleave(group, dim=1)",
            ),
        ),
    ),
    Mistake(
        Text("K and V are exchanged", "K 和 V 写反了"),
        Text(
            "`k` goes to `k_cache`, and `v` to `v_cache`. Keys are compared with queries; values are summed.",
            "`k` 写入 `k_cache`，`v` 写入 `v_cache`。键用来和查询比较，值用来求和。",
        ),
        (
            (
                "    k_cache[start:end] = k\n    v_cache[start:end] = v\n",
                "    k_cache[start:end] = v\n    v_cache[start:end] = k\n",
            ),
        ),
    ),
    Mistake(
        Text("All query heads read KV head 0", "所有查询头都读第 0 个 KV 头"),
        Text(
            "Each KV head has its own group of query heads: with 4 and 2, query heads 2 and 3 read KV head 1.",
            "每个 KV 头有自己的一组查询头：4 个和 2 个时，查询头 2 和 3 读 KV 头 1。",
        ),
        (
            ("k_cache[:end].repeat_interleave(group, dim=1)", "k_cache[:end, :1].repeat_interleave(num_heads, dim=1)"),
            ("v_cache[:end].repeat_interleave(group, dim=1)", "v_cache[:end, :1].repeat_interleave(num_heads, dim=1)"),
        ),
    ),
)


EXERCISES = (
    Build(
        name="attend_with_cache",
        chapter="02_kv_cache",
        title=Text("Attention with a KV cache", "带 KV cache 的注意力"),
        task=Text(
            "One attention layer computes the new tokens of one sequence. `start` tokens are in the cache, so the new\n"
            "tokens have the positions start, start + 1, …\n"
            "1. Write `k` and `v` to the rows of these positions in `k_cache` and `v_cache`.\n"
            "2. For each new token and query head, compute scores q · key / √head_dim with the keys of all positions\n"
            "   up to the token's own position. Softmax over these keys gives the weights.\n"
            "3. Return the sums weight · value, in the shape of `q`.\n"
            "\n"
            "The number of query heads is a multiple of the number of KV heads. With 4 and 2, query heads 0 and 1\n"
            "read KV head 0, and query heads 2 and 3 read KV head 1.\n"
            "Example: start = 3 and two new tokens. Token 3 reads keys 0 … 3, token 4 reads keys 0 … 4.",
            "一个注意力层计算一个序列的新 token。缓存里已有 `start` 个 token，所以新 token 的位置是 start、start + "
            "1、……\n"
            "1. 把 `k` 和 `v` 写入 `k_cache` 和 `v_cache` 中这些位置的行。\n"
            "2. 对每个新 token 和每个查询头，与到它自己的位置为止的所有键计算得分 q · key / √head_dim，\n"
            "   对这些键做 softmax，得到权重。\n"
            "3. 返回 权重 · 值 之和，形状与 `q` 相同。\n"
            "\n"
            "查询头数是 KV 头数的整数倍。有 4 个查询头、2 个 KV 头时，查询头 0 和 1 读 KV 头 0，2 和 3 读 KV 头 1。\n"
            "例：start = 3，两个新 token。token 3 读键 0 … 3，token 4 读键 0 … 4。",
        ),
        hints=(
            Text(
                "Write first. Then read rows 0 … end - 1 of the cache, with end = start + the number of new tokens.",
                "先写。然后读缓存的第 0 … end - 1 行，end = start + 新 token 数。",
            ),
            Text(
                "The new tokens have `positions = torch.arange(start, end)`. With them, "
                "`is_seen = torch.arange(end) <= positions[:, None]` has a row for each new token and a "
                "column for each key. Where it is False, the score is −∞. You may also use two loops, over tokens and "
                "heads.",
                "新 token 的位置是 `positions = torch.arange(start, end)`。`is_seen = torch.arange(end) <= "
                "positions[:, None]` 每个新 token 一行，每个键一列。为 False 处得分取 −∞。"
                "也可以用两层循环，分别遍历 token 和头。",
            ),
            Text(
                "`keys = k_cache[:end].repeat_interleave(num_heads // num_kv_heads, dim=1)`, the same for the values, "
                'and `scores = torch.einsum("qhd,khd->hqk", q, keys) / head_dim**0.5`.',
                "`keys = k_cache[:end].repeat_interleave(num_heads // num_kv_heads, dim=1)`，值也一样；"
                '`scores = torch.einsum("qhd,khd->hqk", q, keys) / head_dim**0.5`。',
            ),
        ),
        answer=SOLUTION,
        holes=("attend",),
        run=run,
        examples=(
            Case(1, 1, (2, 1), 1),
            Case(1, 1, (1, 1, 1), 2),
            Case(2, 2, (3, 1, 2), 3),
            Case(2, 1, (2, 2), 4),
            Case(1, 2, (4,), 5),
        ),
        cases=cases,
        describe=describe,
        is_same=is_close,
        draw=draw,
        mistakes=MISTAKES,
    ),
)
