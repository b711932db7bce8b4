"""Requests and the pool that they share: the cases of exercises that run a whole schedule."""

from typing import Any, NamedTuple

from hypothesis import strategies as st

from nanovllm.extras.learn.texts import Text


class Request(NamedTuple):
    """A prompt that arrives before step `arrival`, which counts from 0, and gets `n` answers of `max_tokens` tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    arrival: int = 0


class Traffic(NamedTuple):
    """A pool, a budget of tokens for each step, and requests. Each request by itself must fit into the pool."""

    num_blocks: int
    block_size: int
    budget: int
    requests: tuple[Request, ...]


def describe_traffic(traffic: Traffic) -> Text:
    """Return the case in words."""
    pool = f"{traffic.num_blocks} × {traffic.block_size}"
    en = [f"A pool of {pool} slots; at most {traffic.budget} tokens a step."]
    zh = [f"块池共 {pool} 个 slot；每步最多 {traffic.budget} 个 token。"]
    for i, one in enumerate(traffic.requests):
        name, prompt = chr(ord("A") + i), " ".join(map(str, one.prompt))
        when = f", arrives before step {one.arrival + 1}" if one.arrival else ""
        when_zh = f"，在第 {one.arrival + 1} 步之前到达" if one.arrival else ""
        answers = f", {one.n} answers" if one.n > 1 else ""
        answers_zh = f"，{one.n} 个回答" if one.n > 1 else ""
        en.append(f"{name}: prompt {prompt}; {one.max_tokens} tokens{answers}{when}.")
        zh.append(f"{name}：提示词 {prompt}；生成 {one.max_tokens} 个 token{answers_zh}{when_zh}。")
    return Text("  \n".join(en), "  \n".join(zh))


@st.composite
def traffics(draw: Any, max_n: int = 1, max_requests: int = 4) -> Traffic:
    """Return a strategy: tight pools, prompts that repeat and share prefixes, blocks that are partly filled."""
    block_size = draw(st.integers(1, 4))
    requests: list[Request] = []
    prompts: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, max_requests))):
        beginning = draw(st.sampled_from([(), *prompts]))
        prompt = (*beginning, *draw(st.lists(st.integers(0, 2), min_size=0 if beginning else 1, max_size=6)))
        prompts.append(prompt)
        request = Request(prompt, draw(st.integers(1, 6)), draw(st.integers(1, max_n)), draw(st.integers(0, 3)))
        requests.append(request)
    least = max(-(-(len(one.prompt) + one.max_tokens) // block_size) for one in requests)
    num_blocks = least + draw(st.integers(0, 4))
    return Traffic(num_blocks, block_size, draw(st.integers(1, 9)), tuple(requests))
