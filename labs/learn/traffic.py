"""Requests and the pool that they share: the cases of exercises that run a whole schedule."""

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from labs.learn.texts import Text, count


class Request(NamedTuple):
    """A prompt that arrives before step `arrival`, which counts from 0, and gets `n` answers of `max_tokens` tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    arrival: int = 0


class Traffic(NamedTuple):
    """A pool, a budget of tokens for each step, and requests. Each must fit into the empty pool."""

    num_blocks: int
    block_size: int
    budget: int
    requests: tuple[Request, ...]


def describe_traffic(traffic: Traffic) -> Text:
    """Return the case in words, and how the steps are written."""
    blocks = f"{count(traffic.num_blocks, 'block')} of {count(traffic.block_size, 'slot')}"
    en = [f"{blocks}; at most {count(traffic.budget, 'token')} a step."]
    zh = [f"{traffic.num_blocks} 个块，每块 {traffic.block_size} 个槽位；每步最多 {traffic.budget} 个 token。"]
    for i, one in enumerate(traffic.requests):
        name, prompt = chr(ord("A") + i), " ".join(map(str, one.prompt))
        when = f", arrives before step {one.arrival + 1}" if one.arrival else ""
        when_zh = f"，在第 {one.arrival + 1} 步之前到达" if one.arrival else ""
        answers = f" in each of {one.n} answers" if one.n > 1 else ""
        answers_zh = f"{one.n} 个回答各" if one.n > 1 else ""
        size, size_zh = count(len(one.prompt), "token"), f"{len(one.prompt)} 个 token"
        en.append(f"{name}: prompt of {size} [{prompt}], generates {one.max_tokens}{answers}{when}.")
        zh.append(f"{name}：提示词 {size_zh} [{prompt}]，{answers_zh}生成 {one.max_tokens} 个{when_zh}。")
    en.append("Below, A+3 means that a step computes 3 tokens of A.")
    zh.append("下面的 A+3 表示一步计算 A 的 3 个 token。")
    return Text("  \n".join(en), "  \n".join(zh))


def drop_requests(traffic: Traffic, fails: Callable[[Traffic], bool]) -> Traffic:
    """Return the traffic without the requests that are not needed to let it fail, the last ones first."""
    for i in reversed(range(len(traffic.requests))):
        fewer = traffic._replace(requests=traffic.requests[:i] + traffic.requests[i + 1 :])
        if fewer.requests and fails(fewer):
            traffic = fewer
    return traffic


def traffics(max_n: int = 1, max_requests: int = 4) -> st.SearchStrategy[Traffic]:
    """Return a strategy: tight pools, prompts that repeat and share prefixes, blocks that are partly filled."""
    tokens = st.lists(st.integers(0, 2), max_size=6)
    request = st.tuples(st.integers(0, 6), tokens, st.integers(1, 6), st.integers(1, max_n), st.integers(0, 3))
    return st.builds(
        make_traffic,
        st.integers(0, 4),
        st.sampled_from((2, 3, 4, 1)),
        st.sampled_from((9, 6, 4, 3, 2, 1)),
        st.lists(request, min_size=1, max_size=max_requests),
    )


def make_traffic(spare: int, block_size: int, budget: int, requests: list[Any]) -> Traffic:
    """Return a case. `requests`: (tokens shared with the prompt before, more tokens, max_tokens, n, arrival)."""
    prompt: tuple[int, ...] = ()
    made = []
    for num_shared, tokens, max_tokens, n, arrival in requests:
        prompt = (*prompt[:num_shared], *tokens)[:9] or (0,)
        made.append(Request(prompt, max_tokens, n, arrival))
    least = max(-(-(len(one.prompt) + one.max_tokens) // block_size) for one in made)
    return Traffic(least + spare, block_size, budget, tuple(made))
