"""`return_prefix_misses`: answers say why prompt tokens were computed. The oracle is an engine that is used offline.

Without a salt, no answer depends on how far a prompt agrees with a cached one inside a block.
"""

import asyncio
import json

import pytest
from test_responses import stream as response_events

from nanovllm_extras import LLM, SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.disaggregation import prefill_body
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.server_options import ServerOptions
from tests.extras.serve.conftest import Client

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SMALL = {"dtype": "float32", "num_kv_blocks": 16, "block_size": 4, "explain_prefix_misses": True}
SECRET = [*range(60, 74)]  # 14 tokens: 3 blocks that can be found, and the rest
PROMPTS = [SECRET, SECRET, [*SECRET[:9], 7, *SECRET[10:]], [7] * 61, SECRET, SECRET[:3]]  # 61 tokens evict the others
TEMPLATE = "{%- for m in messages %}{{ m.content }}{%- endfor %}"
GREEDY = {"temperature": 0, "ignore_eos": True, "return_prefix_misses": True}


@pytest.fixture(scope="module")
def explaining(with_tokenizer):
    with AsyncLLM(with_tokenizer, **SMALL) as llm:
        llm.engine.tokenizer.chat_template = TEMPLATE
        yield llm


def forget(llm):
    """Reset the prefix cache in the engine's thread."""
    asyncio.run(llm.call(llm.engine.reset_prefix_cache))


@pytest.fixture
def asked(explaining):
    """A client of a server whose prefix cache is empty."""
    forget(explaining)
    return Client(make_app(ServerOptions(model_names=("tiny",)), explaining))


@pytest.fixture(scope="module")
def expected(with_tokenizer):
    """The causes of `PROMPTS`, one after the other, as JSON."""
    with LLM(with_tokenizer, **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        metrics = [llm.generate(prompt, params, use_tqdm=False)[0].metrics for prompt in prompts]
    causes = [[as_json(miss) for miss in one.prefix_misses] for one in metrics]
    assert {miss["cause"] for misses in causes for miss in misses} == {
        "never_seen", "partial_block", "differs", "evicted"
    }  # fmt: skip
    return causes


def as_json(miss):
    """The fields that an answer to a request with a salt has."""
    names = ("start", "end", "cause", "cached_token_ids", "prompt_token_ids", "step")
    fields = {name: getattr(miss, name) for name in names if getattr(miss, name)} | {"start": miss.start}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def without_steps(misses):
    """The engine of the server has computed more steps than that of the oracle."""
    return [{name: value for name, value in miss.items() if name != "step"} for miss in misses]


def complete(client, prompt, is_stream, **fields):
    body = {"prompt": prompt, "max_tokens": 3, **GREEDY, **fields}
    if not is_stream:
        return [choice["prefix_misses"] for choice in client.ask(COMPLETIONS, **body)["choices"]]
    return [
        choice["prefix_misses"]
        for chunk in client.events(COMPLETIONS, **body)
        for choice in chunk["choices"]
        if "prefix_misses" in choice
    ]


def chat(client, prompt, is_stream, **fields):
    text = client.server.llm.engine.tokenizer.decode(prompt)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, **GREEDY, **fields}
    if not is_stream:
        return [client.ask(CHAT, **body)["prefix_misses"]]
    return [chunk["prefix_misses"] for chunk in client.events(CHAT, **body) if "prefix_misses" in chunk]


def respond(client, prompt, is_stream, **fields):
    text = client.server.llm.engine.tokenizer.decode(prompt)
    body = {"input": text, "max_output_tokens": 3, **GREEDY, **fields}
    if not is_stream:
        return [client.ask(RESPONSES, **body)["prefix_misses"]]
    told = [event.get("response", {}) for event in response_events(client, **body)]
    return [response["prefix_misses"] for response in told if "prefix_misses" in response]


@pytest.mark.parametrize(("ask", "is_stream"), [(complete, True), (chat, False), (chat, True), (respond, True)])
def test_answers_have_the_engines_causes(asked, expected, ask, is_stream):
    for prompt, causes in zip(PROMPTS, expected, strict=True):
        (told,) = ask(asked, prompt, is_stream, cache_salt="mine")  # once in an answer
        assert without_steps(told) == without_steps(causes)
        assert [type(miss["step"]) for miss in told if miss["cause"] == "evicted"] == [int] * ("evicted" in str(causes))


def test_each_prompt_of_a_completion_has_its_own(asked):
    told = complete(asked, [SECRET, SECRET[:3]], False, n=2, temperature=1)
    longer, shorter = [{"start": 0, "end": 12, "cause": "never_seen"}, part(12, 14)], [part(0, 3)]
    assert sorted(told, key=len) == [shorter, shorter, longer, longer]
    (whole,) = complete(asked, SECRET, False, echo=True, logprobs=1, max_tokens=0)
    assert whole == [{"start": 0, "end": 14, "cause": "cache_off"}]


def part(start, end):
    return {"start": start, "end": end, "cause": "partial_block"}


def test_without_a_salt_no_answer_says_how_far_a_block_agrees(asked):
    """A client must not find out another client's prompt token by token."""
    complete(asked, SECRET, False)
    for block in range(3):
        answers = []
        for num_equal in range(4 * block, 4 * block + 4):
            guess = [*SECRET[:num_equal], *[7] * (14 - num_equal)]
            answers.append(complete(asked, guess, False, max_tokens=1))
            forget(asked.server.llm)
            complete(asked, SECRET, False)
        cause = "differs" if block else "never_seen"  # of a first token that no cached prompt has, too
        assert answers == [[[{"start": 4 * block, "end": 12, "cause": cause}, part(12, 14)]]] * len(answers)
    complete(asked, SECRET, False, cache_salt="theirs")
    (salted,) = complete(asked, [*SECRET[:6], *[7] * 8], False, cache_salt="mine")
    assert salted[0]["cause"] == "never_seen", "prompts of another salt are not compared"


def test_answers_have_no_causes_unless_requested(asked, client):
    for value in (None, False):
        assert "prefix_misses" not in json.dumps(
            [
                asked.ask(COMPLETIONS, prompt="abc", max_tokens=1, return_prefix_misses=value),
                asked.ask(RESPONSES, input="abc", max_output_tokens=1, return_prefix_misses=value),
                asked.events(CHAT, messages=[{"role": "user", "content": "abc"}], return_prefix_misses=value),
            ]
        )
    assert client.ask(COMPLETIONS, prompt="abc", max_tokens=1, return_prefix_misses=False)
    for path, body in ((COMPLETIONS, {"prompt": "abc"}), (RESPONSES, {"input": "abc"})):
        client.refuse(path, {**body, "return_prefix_misses": True}, "return_prefix_misses", "--explain-prefix-misses")
    body = json.dumps({"prompt": "abc", "return_prefix_misses": True}).encode()
    assert "return_prefix_misses" not in json.loads(asyncio.run(prefill_body(body))), "a prefill engine is not asked"
