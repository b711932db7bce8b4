"""Write the lower bound of a decode step's time: bytes to read and arithmetic, each divided by the machine's rate."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.tensors import draw_table
from labs.learn.texts import Text

SOLUTION = '''
from dataclasses import dataclass


@dataclass
class Model:
    num_weights: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    bytes_per_value: int  # of a weight, and of a value of K or V


@dataclass
class Machine:
    bytes_per_s: int  # read from memory
    flops_per_s: int


def count_bytes(model, seq_lens):
    """Return the bytes that a decode step reads: the weights, and the KV cache of each sequence.

    seq_lens: for each sequence of the step, the number of tokens whose K and V its new token reads
    """
    kv_values_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return (model.num_weights + sum(seq_lens) * kv_values_per_token) * model.bytes_per_value


def count_flops(model, seq_lens):
    """Return the FLOP of a decode step: the products with the weights, and attention."""
    num_tokens = len(seq_lens)
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * sum(seq_lens)
    return 2 * model.num_weights * num_tokens + attention


def least_seconds(model, machine, seq_lens):
    """Return a lower bound of the step's time, for a machine that reads and computes at the same time."""
    memory = count_bytes(model, seq_lens) / machine.bytes_per_s
    arithmetic = count_flops(model, seq_lens) / machine.flops_per_s
    return max(memory, arithmetic)
'''


class Case(NamedTuple):
    """A model and a machine, in the order of their fields, and the sequences."""

    model: tuple[int, int, int, int, int, int]
    machine: tuple[int, int]
    seq_lens: tuple[int, ...]


QWEN3_06B = (596_000_000, 28, 16, 8, 128, 2)
H100 = (3_350_000_000_000, 989_000_000_000_000)
EXAMPLE = Case(QWEN3_06B, H100, (1000,) * 64)


def run(answer: ModuleType, case: Case) -> Iterator[Seen]:
    """Observe the three numbers. Beside each is drawn what the answer says of the example of the chapter."""
    yield Seen(Text("bytes read", "读取的字节数"), *observe(answer, case, 0))
    yield Seen(Text("FLOP", "运算量（FLOP）"), *observe(answer, case, 1))
    yield Seen(Text("seconds, at least", "至少多少秒"), *observe(answer, case, 2))


def observe(answer: ModuleType, case: Case, which: int) -> tuple[Any, str]:
    """Return one of the three numbers, and the same number of 64 sequences with Qwen3-0.6B."""
    value, example = compute(answer, case, which), compute(answer, EXAMPLE, which)
    if not isinstance(example, int | float):
        return value, ""
    shown = show_seconds(example) if which == 2 else show(example, ("B", "FLOP")[which])
    return value, f"Qwen3-0.6B, H100, {show_lens(EXAMPLE.seq_lens)} tokens: {shown}"


def compute(answer: ModuleType, case: Case, which: int) -> Any:
    model, machine, seq_lens = answer.Model(*case.model), answer.Machine(*case.machine), list(case.seq_lens)
    if which == 2:
        return answer.least_seconds(model, machine, seq_lens)
    return (answer.count_bytes, answer.count_flops)[which](model, seq_lens)


def is_near(a: Any, b: Any) -> bool:
    return bool(abs(a - b) <= 1e-9 * max(abs(a), abs(b)))


def draw(case: Case, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Draw where the right number comes from, with yours below it."""
    if right is None or yours is None or isinstance(yours.value, bool) or not isinstance(yours.value, int | float):
        return []
    num_weights, num_layers, num_heads, num_kv_heads, head_dim, size = case.model
    num_seqs, total = len(case.seq_lens), sum(case.seq_lens)
    kv, attention = 2 * num_layers * num_kv_heads * head_dim * size, 4 * num_layers * num_heads * head_dim
    parts = {
        "bytes read": [
            ("weights", f"{num_weights:,} · {size}", num_weights * size),
            ("KV cache", f"{total:,} · {kv:,} a token", total * kv),
        ],
        "FLOP": [
            ("weights", f"2 · {num_weights:,} · {num_seqs}", 2 * num_weights * num_seqs),
            ("attention", f"{total:,} · {attention:,} a token", total * attention),
        ],
    }
    if right.label.en not in parts:
        num_bytes, flops = (sum(part[2] for part in parts[name]) for name in parts)
        rows = [
            ["memory", f"{num_bytes:,} / {case.machine[0]:,}", show_seconds(num_bytes / case.machine[0])],
            ["arithmetic", f"{flops:,} / {case.machine[1]:,}", show_seconds(flops / case.machine[1])],
            ["right", "", show_seconds(right.value)],
            ["yours", "", show_seconds(yours.value)],
        ]
    else:
        unit = "B" if right.label.en == "bytes read" else "FLOP"
        rows = [[name, terms, show(value, unit)] for name, terms, value in parts[right.label.en]]
        rows += [["right", "", show(right.value, unit)], ["yours", "", show(yours.value, unit)]]
    return [(Text("where the number comes from", "这个数的来历"), draw_table(["", "", ""], rows).lstrip("\n"))]


def show(value: float, unit: str) -> str:
    """Return 8_500_000_000 as "8.5 GB"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:g} {unit}"


def show_seconds(value: float) -> str:
    return f"{1e3 * value:.4g} ms" if abs(value) < 1 else f"{value:.4g} s"


def describe(case: Case) -> Text:
    names = ("num_weights", "num_layers", "num_heads", "num_kv_heads", "head_dim", "bytes_per_value")
    model = ", ".join(f"{name} {value:,}" for name, value in zip(names, case.model, strict=True))
    machine = f"{case.machine[0]:,} B/s, {case.machine[1]:,} FLOP/s"
    lens = show_lens(case.seq_lens)
    return Text(
        f"Model: {model}.  \nMachine: {machine}.  \nTokens that the sequences read: {lens}.",
        f"模型：{model}。  \n机器：{machine}。  \n各序列要读的 token 数：{lens}。",
    )


def show_lens(seq_lens: tuple[int, ...]) -> str:
    if len(seq_lens) > 3 and len(set(seq_lens)) == 1:
        return f"{len(seq_lens)} × {seq_lens[0]:,}"
    return ", ".join(f"{n:,}" for n in seq_lens)


def cases() -> st.SearchStrategy[Case]:
    small = st.integers(1, 9)
    model = st.builds(
        lambda weights, layers, group, kv_heads, dim, size: (weights, layers, group * kv_heads, kv_heads, dim, size),
        st.integers(1, 1000), small, st.integers(1, 4), st.integers(1, 4), st.integers(2, 9), st.integers(1, 4),
    )  # fmt: skip
    machine = st.tuples(st.integers(1, 100), st.integers(1, 100))
    return st.builds(Case, model, machine, st.lists(small, min_size=1, max_size=4).map(tuple))


MISTAKES = (
    Mistake(
        Text("The KV cache is forgotten", "忘了 KV cache"),
        Text(
            "Each new token reads K and V of all tokens of its sequence. With many sequences, or long ones, these are "
            "more bytes than the weights.",
            "每个新 token 都要读它的序列所有 token 的 K 和 V。序列多了或长了，这些字节比权重还多。",
        ),
        (("(model.num_weights + sum(seq_lens) * kv_values_per_token) *", "model.num_weights *"),),
    ),
    Mistake(
        Text("The KV cache is counted once", "KV cache 只算了一次"),
        Text(
            "Sequences share the weights, not the KV cache: each sequence reads its own. Sum over the sequences.",
            "各序列共用权重，但不共用 KV cache：每个序列读自己的。要对所有序列求和。",
        ),
        (("num_weights + sum(seq_lens) *", "num_weights + max(seq_lens) *"),),
    ),
    Mistake(
        Text("The KV cache of the first sequence", "只算了第一个序列的 KV cache"),
        Text(
            "`seq_lens[0]` is one sequence. Each sequence of the step reads its own KV cache: sum over all of them.",
            "`seq_lens[0]` 只是一个序列。一步里的每个序列都读自己的 KV cache：要对所有序列求和。",
        ),
        (("num_weights + sum(seq_lens) *", "num_weights + seq_lens[0] *"),),
    ),
    Mistake(
        Text("Only K is counted, or only V", "只算了 K，或只算了 V"),
        Text(
            "A token keeps a key and a value for each KV head: times 2.",
            "每个 token 的每个 KV 头都有一个键和一个值：乘以 2。",
        ),
        (("2 * model.num_layers * model.num_kv_heads", "model.num_layers * model.num_kv_heads"),),
    ),
    Mistake(
        Text("Query heads instead of KV heads", "用了查询头数，而不是 KV 头数"),
        Text(
            "Queries are not kept. The cache has K and V of each KV head, of which there may be fewer than query "
            "heads.",
            "查询不会保留。缓存里是每个 KV 头的 K 和 V，KV 头可能比查询头少。",
        ),
        (("model.num_layers * model.num_kv_heads", "model.num_layers * model.num_heads"),),
    ),
    Mistake(
        Text("The layers are forgotten", "忘了乘层数"),
        Text("Each layer has its own K and V of a token.", "每一层都有自己的 K 和 V。"),
        (("2 * model.num_layers * model.num_kv_heads", "2 * model.num_kv_heads"),),
    ),
    Mistake(
        Text("Values instead of bytes", "算的是值的个数，不是字节数"),
        Text(
            "Memory is measured in bytes: multiply weights and K and V by `bytes_per_value`.",
            "内存按字节计：权重、K 和 V 都要乘以 `bytes_per_value`。",
        ),
        ((" * model.bytes_per_value", ""),),
    ),
    Mistake(
        Text("The weights are read for each sequence", "每个序列都读了一遍权重"),
        Text(
            "A step reads each weight once and uses it for all sequences. This is why a batch is cheap.",
            "一步只读一遍权重，所有序列共用。这正是批处理便宜的原因。",
        ),
        (("(model.num_weights +", "(model.num_weights * len(seq_lens) +"),),
    ),
    Mistake(
        Text("One FLOP for each weight", "每个权重只算了一次运算"),
        Text(
            "A weight takes part in a multiplication and an addition for each token: 2 FLOP.",
            "对每个 token，一个权重参与一次乘法和一次加法：2 FLOP。",
        ),
        (("2 * model.num_weights * num_tokens", "model.num_weights * num_tokens"),),
    ),
    Mistake(
        Text("The arithmetic of one sequence", "只算了一个序列的运算"),
        Text(
            "Reading a weight is shared, arithmetic is not: each sequence's token multiplies it again.",
            "权重的读取是共用的，运算不是：每个序列的 token 都要再乘一次。",
        ),
        (("2 * model.num_weights * num_tokens", "2 * model.num_weights"),),
    ),
    Mistake(
        Text("Attention's arithmetic is forgotten", "忘了注意力的运算"),
        Text(
            "For each token that it reads, a query head does 2 · head_dim FLOP for the score and 2 · head_dim for the "
            "weighted sum of values, in each layer.",
            "每读一个 token，每个查询头在每一层都要做 2 · head_dim FLOP 求得分，再做 2 · head_dim FLOP 求值的加权和。",
        ),
        (("num_tokens + attention", "num_tokens"),),
    ),
    Mistake(
        Text("KV heads in the arithmetic of attention", "注意力的运算用了 KV 头数"),
        Text(
            "Query heads share K and V, but each query head computes its own scores: count query heads here.",
            "查询头共用 K 和 V，但每个查询头各算各的得分：这里要用查询头数。",
        ),
        (("model.num_layers * model.num_heads", "model.num_layers * model.num_kv_heads"),),
    ),
    Mistake(
        Text("The times are added", "把两个时间相加了"),
        Text(
            "The machine reads and computes at the same time, so the longer of both is the bound: `max`.",
            "机器一边读一边算，所以下界是两者中较长的：用 `max`。",
        ),
        (("max(memory, arithmetic)", "memory + arithmetic"),),
    ),
    Mistake(
        Text("The shorter time", "取了较短的时间"),
        Text(
            "A step ends when both are done: reading and arithmetic. The longer one is the bound: `max`.",
            "读和算都完成，一步才结束。下界是较长的那个：用 `max`。",
        ),
        (("max(memory, arithmetic)", "min(memory, arithmetic)"),),
    ),
    Mistake(
        Text("Sequences are counted, not their tokens", "数的是序列，不是 token"),
        Text(
            "Each sequence reads K and V of all of its tokens. Sum the lengths in `seq_lens`; do not "
            "count the sequences.",
            "每个序列要读自己所有 token 的 K 和 V。要把 `seq_lens` 里的长度加起来，而不是数序列的个数。",
        ),
        (("num_weights + sum(seq_lens) *", "num_weights + len(seq_lens) *"),),
    ),
    Mistake(
        Text("head_dim is forgotten", "忘了 head_dim"),
        Text(
            "K of one token is a vector of head_dim values in each layer and KV head, and so is V.",
            "在每一层、每个 KV 头里，一个 token 的 K 是有 head_dim 个值的向量，V 也是。",
        ),
        (("2 * model.num_layers * model.num_kv_heads * model.head_dim", "2 * model.num_layers * model.num_kv_heads"),),
    ),
    Mistake(
        Text("The KV cache is counted in values", "KV cache 数的是值的个数"),
        Text(
            "The weights are counted in bytes, but K and V in values. Both have `bytes_per_value` bytes a value.",
            "权重按字节算了，K 和 V 却按值的个数算。两者每个值都占 `bytes_per_value` 字节。",
        ),
        (
            (
                "(model.num_weights + sum(seq_lens) * kv_values_per_token) * model.bytes_per_value",
                "model.num_weights * model.bytes_per_value + sum(seq_lens) * kv_values_per_token",
            ),
        ),
    ),
    Mistake(
        Text("Two FLOP in attention", "注意力只算了 2 FLOP"),
        Text(
            "For each token that is read, a head multiplies and adds head_dim values twice: once for "
            "the score, and once for the weighted sum of V. That is 4 · head_dim FLOP.",
            "每读一个 token，一个头要做两次 head_dim 个乘加：一次算分数，一次对 V 加权求和。一共 4 · head_dim FLOP。",
        ),
        (("4 * model.num_layers", "2 * model.num_layers"),),
    ),
    Mistake(
        Text("All tokens are computed again", "所有 token 都重算了"),
        Text(
            "A decode step computes one token of each sequence: `len(seq_lens)` tokens. The others "
            "are only read from the KV cache.",
            "一个解码步对每个序列只算一个 token，共 `len(seq_lens)` 个。其余的只是从 KV cache 里读。",
        ),
        (("2 * model.num_weights * num_tokens", "2 * model.num_weights * sum(seq_lens)"),),
    ),
    Mistake(
        Text("Attention in one layer", "注意力只算了一层"),
        Text(
            "Each layer has attention of its own, so its arithmetic counts `num_layers` times.",
            "每一层都有自己的注意力，所以计算量要乘以 `num_layers`。",
        ),
        (("4 * model.num_layers * model.num_heads", "4 * model.num_heads"),),
    ),
    Mistake(
        Text("The machine's two speeds are exchanged", "机器的两个速度用反了"),
        Text(
            "Bytes are divided by bytes per second, and FLOP by FLOP per second.",
            "字节数要除以每秒字节数，FLOP 要除以每秒 FLOP 数。",
        ),
        (
            ("/ machine.bytes_per_s", "/ machine.flops_per_second"),
            ("/ machine.flops_per_s\n", "/ machine.bytes_per_s\n"),
            ("machine.flops_per_second", "machine.flops_per_s"),
        ),
    ),
    Mistake(
        Text("Only the memory is counted", "只算了内存"),
        Text(
            "With many sequences, the arithmetic can take longer than reading. The step takes at "
            "least the longer of both times.",
            "序列很多时，计算可能比读取更久。一步至少要两者中较长的时间。",
        ),
        (("max(memory, arithmetic)", "memory"),),
    ),
)


EXERCISES = (
    Build(
        name="step_time",
        chapter="03_what_a_step_waits_for",
        title=Text("The least time of a step", "一步至少要多久"),
        task=Text(
            "A decode step computes one token of each sequence. `seq_lens` has the number of tokens that each new "
            "token\n"
            "reads in the KV cache. The step reads all weights once, and K and V of these tokens in all layers.\n"
            "Arithmetic: for each new token 2 FLOP with each weight; for each token that is read 4 · head_dim FLOP in\n"
            "each layer and query head. The machine reads and computes at the same time.\n"
            "Write `count_bytes`, `count_flops` and `least_seconds`.\n"
            "\n"
            "    10 weights, 1 layer, 2 query heads, 1 KV head, head_dim 3, 2 bytes a value; seq_lens [4, 1]\n"
            "    bytes  (10 + 5 · 2 · 1 · 1 · 3) · 2 = 80          K and V of 4 + 1 tokens\n"
            "    FLOP   2 · 10 · 2 + 4 · 1 · 2 · 3 · 5 = 160\n"
            "    with 10 bytes/s and 100 FLOP/s: at least max(8, 1.6) = 8 s",
            "一个解码步为每个序列算一个 token。`seq_lens` 是每个新 token 要在 KV cache 里读多少个 token。\n"
            "这一步把所有权重读一遍，并读这些 token 在所有层的 K 和 V。\n"
            "运算：每个新 token 与每个权重做 2 FLOP；每读一个 token，每层每个查询头做 4 · head_dim FLOP。\n"
            "机器一边读一边算。写出 `count_bytes`、`count_flops` 和 `least_seconds`。\n"
            "\n"
            "    10 个权重，1 层，2 个查询头，1 个 KV 头，head_dim 3，每个值 2 字节；seq_lens [4, 1]\n"
            "    字节  (10 + 5 · 2 · 1 · 1 · 3) · 2 = 80          4 + 1 个 token 的 K 和 V\n"
            "    FLOP  2 · 10 · 2 + 4 · 1 · 2 · 3 · 5 = 160\n"
            "    每秒 10 字节、100 FLOP：至少 max(8, 1.6) = 8 秒",
        ),
        hints=(
            Text(
                "What do the sequences of a step share, and what has each for itself? Weights are shared, K and V "
                "are not.",
                "一步里的序列共用什么，各自有什么？权重是共用的，K 和 V 不是。",
            ),
            Text(
                "A cached token has 2 · num_layers · num_kv_heads · head_dim values. The step reads `sum(seq_lens)` of "
                "them.",
                "缓存里的一个 token 有 2 · num_layers · num_kv_heads · head_dim 个值。一步读 `sum(seq_lens)` 个 "
                "token。",
            ),
            Text(
                "FLOP: `2 * num_weights * len(seq_lens) + 4 * num_layers * num_heads * head_dim * sum(seq_lens)`. "
                "Divide "
                "bytes and FLOP by their rates and take the larger quotient.",
                "FLOP：`2 * num_weights * len(seq_lens) + 4 * num_layers * num_heads * head_dim * sum(seq_lens)`。"
                "字节数和 FLOP 各除以速率，取较大的商。",
            ),
        ),
        answer=SOLUTION,
        holes=("count_bytes", "count_flops", "least_seconds"),
        run=run,
        examples=(
            EXAMPLE,
            Case(QWEN3_06B, H100, (1,) * 1024),
            Case((100, 2, 4, 2, 8, 2), (100, 50), (3, 5)),
            Case((1000, 1, 2, 1, 4, 2), (50, 2000), (1, 2, 3)),
            Case((100, 2, 6, 2, 8, 4), (100, 50), (3, 5)),
        ),
        cases=cases,
        describe=describe,
        is_same=is_near,
        draw=draw,
        mistakes=MISTAKES,
    ),
)
