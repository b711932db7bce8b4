"""Requests and the pool that they share: the cases of exercises that run a whole schedule."""

from typing import Any, NamedTuple

from hypothesis import strategies as st

from nanovllm.extras.learn.texts import Text, count


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
    """Return the case in words."""
    pool = f"{traffic.num_blocks} × {traffic.block_size}"
    en = [f"A pool of {pool} slots; at most {count(traffic.budget, 'token')} a step."]
    zh = [f"块池共 {pool} 个槽位；每步最多 {traffic.budget} 个 token。"]
    for i, one in enumerate(traffic.requests):
        name, prompt = chr(ord("A") + i), " ".join(map(str, one.prompt))
        when = f", arrives before step {one.arrival + 1}" if one.arrival else ""
        when_zh = f"，在第 {one.arrival + 1} 步之前到达" if one.arrival else ""
        answers = f", {one.n} answers" if one.n > 1 else ""
        answers_zh = f"，{one.n} 个回答" if one.n > 1 else ""
        en.append(f"{name}: prompt {prompt}, then {count(one.max_tokens, 'token')}{answers}{when}.")
        zh.append(f"{name}：提示词 {prompt}；生成 {one.max_tokens} 个 token{answers_zh}{when_zh}。")
    return Text("  \n".join(en), "  \n".join(zh))


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
