"""`/v1/completions` against the engine itself, `transformers` and log_softmax: whole, and chunk by chunk."""

import pytest
import torch

from nanovllm_extras.serve.sampling import to_seed
from tests.conftest import hf_greedy

PATH = "/v1/completions"
PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def tokenizer(llm):
    return llm.engine.tokenizer


def text_of(tokenizer, token_ids):
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def test_greedy_tokens_are_those_of_transformers(client, tokenizer, tiny_checkpoint):
    expected = hf_greedy(tiny_checkpoint[1], PROMPT, 16)  # the default of max_tokens
    answer = client.ask(PATH, prompt=PROMPT, temperature=0, ignore_eos=True)
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": text_of(tokenizer, expected),
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 16,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"]},
    }


def test_top_p_0_keeps_only_the_likeliest_token(client):
    """As OpenAI allows: `shell-gpt --top-p 0` sends it."""
    greedy = client.ask(PATH, prompt=PROMPT, temperature=0, max_tokens=12, ignore_eos=True)
    body = {"prompt": PROMPT, "temperature": 1, "max_tokens": 12, "ignore_eos": True, "n": 3}
    texts = [choice["text"] for choice in client.ask(PATH, top_p=0, **body)["choices"]]
    assert texts == [greedy["choices"][0]["text"]] * 3


def test_prompts_are_texts_or_token_ids_one_or_several(client, tokenizer):
    texts = ["abc", "xyzw"]
    ids = [tokenizer.encode(text) for text in texts]
    body = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    alone = [client.ask(PATH, prompt=text, **body)["choices"][0]["text"] for text in texts]
    assert [client.ask(PATH, prompt=one, **body)["choices"][0]["text"] for one in ids] == alone
    for prompts in (texts, ids):
        choices = client.ask(PATH, prompt=prompts, **body)["choices"]
        assert [(choice["index"], choice["text"]) for choice in choices] == list(enumerate(alone))


def test_choices_are_numbered_prompt_by_prompt(client):
    body = {"prompt": ["abc", "xyz"], "n": 3, "seed": 5, "max_tokens": 6, "temperature": 1.5, "ignore_eos": True}
    choices = client.ask(PATH, **body)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    alone = client.ask(PATH, **{**body, "prompt": "xyz"})["choices"]
    assert [choice["text"] for choice in choices[3:]] == [choice["text"] for choice in alone]
    assert len({choice["text"] for choice in choices}) > 2


@pytest.mark.parametrize(("echo", "logprobs", "n"), [(False, None, 1), (True, 2, 2), (False, 2, 1)])
def test_a_stream_adds_up_to_the_whole(client, echo, logprobs, n):
    body = {"prompt": ["abc", "wxyz"], "max_tokens": 10, "seed": 3, "n": n, "echo": echo, "logprobs": logprobs}
    whole = client.ask(PATH, **body)
    events = client.events(PATH, **body, stream_options={"include_usage": True})
    *chunks, last = events
    assert last["choices"] == []
    cached = {"prompt_tokens_details": None}
    assert last["usage"] | cached == whole["usage"] | cached
    assert {chunk["id"] for chunk in events} == {last["id"]}
    assert all(chunk["usage"] is None for chunk in chunks)
    for expected in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        assert "".join(c["text"] for c in mine) == expected["text"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [expected["finish_reason"]]
        if logprobs is not None:
            for name, values in expected["logprobs"].items():
                streamed = [value for c in mine if c["logprobs"] for value in c["logprobs"][name]]
                assert streamed == values if name in ("tokens", "text_offset") else close(streamed, values)


@pytest.mark.parametrize(("echo", "max_tokens"), [(True, 0), (False, 6)])
def test_token_ids_are_returned_if_requested(client, tokenizer, echo, max_tokens):
    """Each choice has those of its prompt and of its text, in its first chunk and in all chunks. `echo` adds none."""
    texts, fields = ["abc", "wxyz"], {"max_tokens": max_tokens, "n": 2, "seed": 3, "ignore_eos": True, "echo": echo}
    fields |= {"prompt": texts, "return_token_ids": True}
    choices = client.ask(PATH, **fields)["choices"]
    for choice in choices:
        prompt = texts[choice["index"] // 2]
        assert choice["prompt_token_ids"] == tokenizer.encode(prompt)
        assert len(choice["token_ids"]) == max_tokens
        assert prompt * echo + text_of(tokenizer, choice["token_ids"]) == choice["text"]
    streamed = [choice for chunk in client.events(PATH, **fields) for choice in chunk["choices"]]
    for expected in choices:
        first, *others = [choice for choice in streamed if choice["index"] == expected["index"]]
        assert first["prompt_token_ids"] == expected["prompt_token_ids"]
        assert not [choice for choice in others if "prompt_token_ids" in choice]
        assert sum([choice["token_ids"] for choice in [first, *others]], []) == expected["token_ids"]
    plain = client.ask(PATH, **{**fields, "return_token_ids": None})["choices"]
    assert not [choice for choice in plain if {"token_ids", "prompt_token_ids"} & choice.keys()]


def close(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(close(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(close(a, b) for a, b in zip(left, right, strict=True))
    return left == (right if right is None else pytest.approx(right, abs=1e-4))


def test_logprobs_of_prompt_and_output_are_log_softmax(client, tiny_checkpoint, tokenizer):
    answer = client.ask(PATH, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2, echo=True, ignore_eos=True)[
        "choices"
    ][0]
    token_ids = PROMPT + hf_greedy(tiny_checkpoint[1], PROMPT, 4)
    with torch.no_grad():
        expected = tiny_checkpoint[1](torch.tensor([token_ids])).logits[0].log_softmax(-1)
    logprobs = answer["logprobs"]
    assert logprobs["tokens"] == [tokenizer.decode([i]) for i in token_ids]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    for position, token_id in enumerate(token_ids[1:]):
        assert logprobs["token_logprobs"][position + 1] == pytest.approx(float(expected[position, token_id]), abs=1e-4)
        top = [round(float(value), 3) for value in expected[position].topk(2).values]
        shown = sorted((round(value, 3) for value in logprobs["top_logprobs"][position + 1].values()), reverse=True)
        assert shown[: len(top)] == pytest.approx(top, abs=2e-3) or len(shown) < 3  # tokens without text share a name


def test_echo_without_output_scores_a_prompt(client, tokenizer):
    answer = client.ask(PATH, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    (choice,) = answer["choices"]
    assert choice["text"] == tokenizer.decode(PROMPT)
    assert len(choice["logprobs"]["tokens"]) == 5
    assert answer["usage"]["completion_tokens"] == 0


def test_stop_strings_and_stop_tokens_end_a_completion(client, tokenizer, tiny_checkpoint):
    expected = hf_greedy(tiny_checkpoint[1], PROMPT, 12)
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    stopped = client.ask(PATH, **body, stop_token_ids=[expected[6]])["choices"][0]
    index = expected.index(expected[6])
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", expected[6])
    assert stopped["text"] == text_of(tokenizer, expected[:index])
    text = client.ask(PATH, **body)["choices"][0]["text"]
    stop = text[4:6]
    for given in (stop, [stop, "never there"]):
        stopped = client.ask(PATH, **body, stop=given)["choices"][0]
        assert (stopped["text"], stopped["stop_reason"]) == (text[: text.index(stop)], stop)


def test_sampling_fields_reach_the_engine(client, llm, monkeypatch):
    """Each field is seen by the engine under its own name and with its value."""
    seen = []
    add = type(llm.engine).add_request
    monkeypatch.setattr(
        type(llm.engine), "add_request", lambda self, *arguments: (seen.append(arguments), add(self, *arguments))[1]
    )
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "bad_words": ["b"],
        "allowed_token_ids": [1, 2, 3, 5],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "stop": ["q"],
        "max_tokens": 2,
        "seed": 11,
        "logprobs": 1,
    }
    client.ask(PATH, prompt="a", **fields, logit_bias={"2": -1.5}, priority=3)
    (_, _, (params, *_), priority, *_) = seen[0]
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {2: -1.5}
    assert priority == 3


def test_seeds_may_have_a_sign():
    assert list(map(to_seed, (-1, None, -2, 2**63))) == [None, None, 2**64 - 2, 2**63]
