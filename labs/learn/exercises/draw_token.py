"""Chapter 10: draw a token by inverse CDF, from a random number that depends only on the request."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs.learn.exercise import Build, Mistake, Seen
from labs.learn.texts import Text

SOLUTION = '''
def uniform(seed, position):
    """Return a random number, 0 <= u < 1, that depends only on its arguments. It is one of 0/16, 1/16, ... 15/16."""
    bits = (seed * 0x9E3779B1 + position * 0x85EBCA77 + 0x27D4EB2F) % 2**32
    bits = (bits ^ bits >> 15) * 0x2C1B3C6D % 2**32
    return (bits >> 20) % 16 / 16


def sample(batch):
    """Return a token for each row of the batch. A row is (probs, seed, position)."""
    tokens = []
    for probs, seed, position in batch:
        u = uniform(seed, position)
        token, sum_so_far = 0, probs[0]
        while sum_so_far <= u:
            token += 1
            sum_so_far += probs[token]
        tokens.append(token)
    return tokens
'''

WEIGHTS = (0, 3, 8, 1, 0, 4)  # of 16. Two tokens have the probability 0


class Tokens(NamedTuple):
    """The tokens of one request in two runs."""

    num_requests: int
    by_itself: tuple[int, ...]
    in_a_batch: tuple[int, ...]

    def __repr__(self) -> str:
        single, batch = (" ".join(map(str, one)) for one in (self.by_itself, self.in_a_batch))
        return f"batch=1: {single}   batch={self.num_requests}: {batch}"


def run(answer: ModuleType, case: Any) -> Iterator[Seen]:
    """Run all requests in one batch, and each by itself. A request is (seed, number of tokens)."""
    together = generate(answer, case)
    for i in reversed(range(len(case))):
        seed, num_tokens = case[i]
        (by_itself,) = generate(answer, [(seed, num_tokens)])
        name = chr(ord("A") + i)
        label = Text(f"{name}, seed {seed}", f"{name}，种子 {seed}")
        yield Seen(label, Tokens(len(case), tuple(by_itself), tuple(together[i])))


def generate(answer: ModuleType, requests: Any) -> list[list[int]]:
    """Return the tokens of requests that run together. A request that has all of its tokens leaves the batch."""
    outputs: list[list[int]] = [[] for _ in requests]
    while running := [i for i, (_, num_tokens) in enumerate(requests) if len(outputs[i]) < num_tokens]:
        batch = [(next_probs(outputs[i]), requests[i][0], len(outputs[i])) for i in running]
        tokens = [int(token) for token in answer.sample(batch)]
        for i, token in zip(running, tokens, strict=True):
            outputs[i].append(token)
    return outputs


def next_probs(tokens: list[int]) -> list[float]:
    """Return the probabilities that the model gives: the same weights, rotated by the tokens so far."""
    shift = sum(tokens) % len(WEIGHTS)
    return [weight / 16 for weight in WEIGHTS[shift:] + WEIGHTS[:shift]]


def draw(case: Any, right: Seen | None, yours: Seen | None) -> list[tuple[Text, str]]:
    """Say if your tokens depend on the batch."""
    if yours is None or not isinstance(yours.value, Tokens) or yours.value.by_itself == yours.value.in_a_batch:
        return []
    title = Text("Your tokens depend on the batch", "你的 token 取决于 batch 里的其他请求")
    return [(title, f"batch=1   {yours.value.by_itself}\nbatch={len(case)}   {yours.value.in_a_batch}")]


def describe(case: Any) -> Text:
    names = [f"{chr(ord('A') + i)} (seed={seed}, max_tokens={num})" for i, (seed, num) in enumerate(case)]
    probs = "0, 3/16, 8/16, 1/16, 0, 4/16"
    return Text(
        f"These requests run together, and then each by itself: {', '.join(names)}. The first probabilities are "
        f"{probs}.",
        f"以下请求先一起运行，再各自单独运行：{'、'.join(names)}。第一组概率是 {probs}。",
    )


EXERCISES = (
    Build(
        name="draw_token",
        chapter="10_from_logits_to_text",
        title=Text("Draw a token in any batch", "在任何 batch 里采到同一个 token"),
        task=Text(
            "Write `sample(batch)`. A row of the batch is (probs, seed, position): the probabilities of one\n"
            "sequence, the seed of its request, and how many tokens its answer has so far. For each row, draw a\n"
            "token by inverse CDF: get the random number u = `uniform(seed, position)`, which is given. The token\n"
            "is the first one for which the sum of the probabilities up to and including it is greater than u.\n\n"
            "    probs [0.5, 0.25, 0.25]     sums 0.5, 0.75, 1.0     u = 0.5: 0.5 is not greater, 0.75 is: token 1\n\n"
            "Return a list with one token for each row. The checker runs each request in a batch and by itself:\n"
            "the tokens must be the same.",
            "写 `sample(batch)`。batch 的一行是 (probs, seed, position)：一个序列的各个概率、它的请求的种子、它的\n"
            "回答目前有几个 token。对每一行用逆变换采样采一个 token：先取随机数 u = `uniform(seed, position)`（已\n"
            "给出）；从 token 0 开始累加概率，第一个使累计值大于 u 的 token 就是结果。\n\n"
            "    probs [0.5, 0.25, 0.25]     累计 0.5、0.75、1.0     u = 0.5：0.5 不大于 u，0.75 大于：token 1\n\n"
            "返回一个列表，每行一个 token。检查器让每个请求在 batch 里运行一次，再单独运行一次：两次的 token 必须\n"
            "相同。",
        ),
        hints=(
            Text(
                "Each row is handled by itself. Nothing may depend on which other rows there are.",
                "逐行处理，每一行都不能受其他行影响。",
            ),
            Text(
                "Walk over `probs` and add them up. Stop at the first token whose sum is greater than u.",
                "依次累加 `probs`，在累计值第一次大于 u 的那个 token 停下。",
            ),
            Text(
                "`u = uniform(seed, position)`, `sum_so_far = 0.0`, then for each token: `sum_so_far += prob`; "
                "if `sum_so_far > u`, append the token and `break`.",
                "`u = uniform(seed, position)`，`sum_so_far = 0.0`；对每个 token：`sum_so_far += prob`，"
                "如果 `sum_so_far > u`，就追加这个 token 并 `break`。",
            ),
        ),
        answer=SOLUTION,
        holes=("sample",),
        run=run,
        examples=(
            tuple((seed, 3 + seed % 3) for seed in range(7, 15)),
            ((7, 6), (7, 6), (8, 2)),
            ((1, 8),),
            tuple((seed, 2) for seed in range(16)),
        ),
        cases=lambda: st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), min_size=1, max_size=4).map(tuple),
        describe=describe,
        draw=draw,
        mistakes=(
            Mistake(
                Text("Random numbers in the order of the batch", "按 batch 的顺序取随机数"),
                Text(
                    "One generator gives its next number to each row, so the other requests decide which number a "
                    "request gets: its tokens change with the batch. Take the number from the request's own seed and "
                    "position.",
                    "用一个发生器依次给每一行下一个数，那么一个请求拿到哪个数，就由其他请求决定：batch 一变，token "
                    "也变。"
                    "应该用这个请求自己的种子和位置得到随机数。",
                ),
                (
                    (
                        "uniform(seed, position)\n        token",
                        "uniform(batch[0][1], batch[0][2] + len(tokens))\n        token",
                    ),
                ),
            ),
            Mistake(
                Text("The row is used instead of the position", "用行号代替了位置"),
                Text(
                    "The row of a sequence changes when others come and go, and does not change from step to step. Use "
                    "the position of the token in its answer.",
                    "别的序列加入或离开时，行号会变；而相邻两步之间，行号往往不变。应该用 token 在回答中的位置。",
                ),
                (("uniform(seed, position)\n        token", "uniform(seed, len(tokens))\n        token"),),
            ),
            Mistake(
                Text("The same number at each position", "每个位置都用同一个随机数"),
                Text(
                    "Each token of an answer needs a number of its own. With only the seed, u is the same in all "
                    "steps.",
                    "回答里的每个 token 都要有自己的随机数。只用种子，每一步的 u 都相同。",
                ),
                (("uniform(seed, position)\n        token", "uniform(seed, 0)\n        token"),),
            ),
            Mistake(
                Text("The seed is not used", "没有用种子"),
                Text(
                    "With only the position, all requests get the same numbers, whatever their seeds are.",
                    "只用位置，所有请求拿到的随机数都一样，种子不起作用。",
                ),
                (("uniform(seed, position)\n        token", "uniform(0, position)\n        token"),),
            ),
            Mistake(
                Text("A token with probability 0 can be drawn", "会采到概率为 0 的 token"),
                Text(
                    "The sum must be greater than u, not equal to it. u can be 0, and a forbidden token has the "
                    "probability 0: with `sum_so_far >= u` such a token would be drawn.",
                    "累计值必须大于 u，等于还不行。u 可能是 0，被禁止的 token 概率也是 0：用 `sum_so_far >= u` "
                    "就会采到它。",
                ),
                (("sum_so_far <= u", "sum_so_far < u"),),
            ),
            Mistake(
                Text("Always the likeliest token", "总是取概率最大的 token"),
                Text(
                    "This is greedy decoding. The random number u decides which token is drawn.",
                    "这是贪心解码。采到哪个 token，应由随机数 u 决定。",
                ),
                (("        tokens.append(token)", "        tokens.append(probs.index(max(probs)))"),),
            ),
            Mistake(
                Text("A single probability is compared with u", "拿单个概率和 u 比较"),
                Text(
                    "u is compared with the sum of the probabilities so far. No single one needs to be greater than u.",
                    "和 u 比较的是累计的概率。单个概率不一定有大于 u 的。",
                ),
                (("sum_so_far += probs[token]", "sum_so_far = probs[token] if token < len(probs) - 1 else 1"),),
            ),
            Mistake(
                Text("One token too far", "多走了一个 token"),
                Text(
                    "The sum includes the token itself. If it is compared before the token's probability is added, the "
                    "next token is drawn.",
                    "累计值要包括这个 token 自己。如果先比较、后累加，采到的就是下一个 token。",
                ),
                (
                    ("token, sum_so_far = 0, probs[0]", "token, sum_so_far = 0, 0"),
                    ("sum_so_far += probs[token]", "sum_so_far += probs[token - 1]"),
                ),
            ),
        ),
    ),
)
