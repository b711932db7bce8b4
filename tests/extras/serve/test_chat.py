"""`/v1/chat/completions`: the template's prompt, the engine's answer, and streams that add up to the whole."""

import asyncio

import pytest
from test_structured import ADD, TEMPLATE, WEATHER, allowed, named

from nanovllm_extras import SamplingParams

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
PROMPT = "system:Be brief.|user:What?|assistant:"


@pytest.fixture(scope="module")
def greedy_text(llm):
    """The engine's own greedy answer to a prompt."""

    async def answer(prompt, max_tokens):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return [output async for output in llm.generate(prompt, params)][-1].outputs[0].text

    return lambda prompt, max_tokens=12: asyncio.run(answer(prompt, max_tokens))


def ask(client, messages=MESSAGES, **others):
    return client.ask(PATH, **{"messages": messages, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **others})


def test_the_answer_is_the_engines_to_the_templates_prompt(client, greedy_text, llm):
    answer = ask(client)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": greedy_text(PROMPT)},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len(llm.engine.tokenizer.encode(PROMPT))


def test_earlier_refusals_are_text(client):
    """Oracle: the same conversation with the refusal as a plain text."""
    refusal = {"type": "refusal", "refusal": "I can't."}

    def answer_after(**answer):
        turns = [*MESSAGES, {"role": "assistant", **answer}, {"role": "user", "content": "Why?"}]
        return ask(client, turns)["choices"]

    wanted = answer_after(content="I can't.")
    assert answer_after(content=[refusal]) == wanted
    assert answer_after(content=None, refusal="I can't.") == wanted
    assert answer_after(content="I can't.", refusal=None) == wanted
    both = answer_after(content=[{"type": "text", "text": "No. "}, refusal])
    assert both == answer_after(content="No. \nI can't.")
    for role, part in (("user", refusal), ("assistant", {"type": "refusal"}), ("assistant", {"type": "text"})):
        client.refuse(PATH, {"messages": [{"role": role, "content": [part]}]}, "messages")


def test_the_end_of_the_prompt(client, greedy_text):
    messages = [*MESSAGES, {"role": "assistant", "content": "It"}]
    for answer, prompt in (
        (ask(client, messages, continue_final_message=True, add_generation_prompt=False), PROMPT + "It"),
        (ask(client, add_generation_prompt=False, model="alias"), PROMPT.removesuffix("assistant:")),
    ):
        assert answer["choices"][0]["message"]["content"] == greedy_text(prompt)
        assert answer["model"] == "tiny"


def test_without_max_tokens_the_context_is_the_limit(client, llm):
    usage = ask(client, max_tokens=None)["usage"]
    assert usage["total_tokens"] == llm.engine.parts.max_model_len
    assert ask(client, max_tokens=None, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    assert ask(client, max_tokens=5, max_completion_tokens=3)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("n", "logprobs"), [(1, False), (3, True)])
def test_a_stream_adds_up_to_the_whole(client, n, logprobs):
    body = {"n": n, "temperature": 1.0, "seed": 4, "logprobs": logprobs, "top_logprobs": 2 if logprobs else None}
    whole = ask(client, **body)
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = client.events(PATH, messages=MESSAGES, max_tokens=12, ignore_eos=True, **{**body, **options})
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    for expected in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == expected["message"]["content"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [expected["finish_reason"]]
        if logprobs:
            streamed = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert [entry["token"] for entry in streamed] == [e["token"] for e in expected["logprobs"]["content"]]


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_logprobs_add_up_to_the_text(client, stream):
    """The tokenizer has a token for each byte, so each of these characters is cut."""
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "max_tokens": 9}
    body["structured_outputs"] = {"choice": ["é☃!"]}
    if stream:
        choices = [choice for event in client.events(PATH, **body) for choice in event["choices"]]
        entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    else:
        entries = client.ask(PATH, **body)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries[:6]] == [[byte] for byte in "é☃!".encode()]
    assert all(one["bytes"] for entry in entries for one in entry["top_logprobs"])


def test_the_end_token_is_not_among_the_tokens_of_a_text(client, llm):
    """guidance shows the tokens of each chunk that has text. `<` may begin a tag, so it is sent with the end."""
    end = llm.engine.tokenizer.eos_token
    body = {"messages": MESSAGES, "logprobs": True, "max_tokens": 9, "structured_outputs": {"choice": ["<"]}}
    choices = [choice for event in client.events(PATH, **body) for choice in event["choices"]]
    told = [(one["delta"].get("content"), [entry["token"] for entry in one["logprobs"]["content"]])
            for one in choices if one["logprobs"]]  # fmt: skip
    assert not [tokens for text, tokens in told if text and end in tokens]
    assert "".join(one["delta"].get("content", "") for one in choices) == "<"
    assert told[-1] == (None, [end])
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_a_conversation_is_tokenized_as_its_chat(client, llm, monkeypatch):
    """Oracle: the chat of the same body, whose template writes the tools."""
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", TEMPLATE)
    tools = [WEATHER, ADD]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    bodies = [
        {"tools": tools},
        {"tools": tools, "tool_choice": "none"},
        {"tools": tools, "tool_choice": "required"},
        {"tools": tools, "tool_choice": named("add")},
        {"tools": tools, "tool_choice": allowed("auto", "add")},
        {"tools": [], "tool_choice": "auto"},
        {"tools": tools, "messages": history},
        {"tools": tools, "chat_template_kwargs": {"open": True}},
        {"messages": [*history, {"role": "assistant", "content": "So"}], "continue_final_message": True},
    ]
    counts = []
    for body in ({"messages": MESSAGES, **one} for one in bodies):
        counts.append(client.ask("/tokenize", **body)["count"])
        assert counts[-1] == client.ask(PATH, **body, max_tokens=1)["usage"]["prompt_tokens"], body
    assert len(set(counts)) > 4
    for wrong in ({"tool_choice": "required"}, {"tools": tools, "tool_choice": named("f")}):
        for path in ("/tokenize", PATH):
            client.refuse(path, {"messages": MESSAGES, **wrong}, "tool_choice")


def test_the_template_gets_effort_and_documents(client, llm, monkeypatch):
    template = "{{ reasoning_effort }}|{{ enable_thinking }}|{% for one in documents or [] %}{{ one.text }}{% endfor %}"
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", template)

    def prompt(**fields):
        body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        tokens = client.post("/tokenize", body).json()["tokens"]
        usage = client.post("/v1/chat/completions", {**body, "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens"] == len(tokens)
        return llm.engine.tokenizer.decode(tokens)

    assert prompt() == "||"
    assert prompt(reasoning_effort="high", documents=[{"text": "a"}, {"text": "b"}]) == "high||ab"
    assert prompt(reasoning_effort="none") == "none|False|"
    assert prompt(reasoning_effort="none", chat_template_kwargs={"enable_thinking": "yes"}) == "none|yes|"
    for bad in ({"documents": "a"}, {"documents": ["a"]}, {"reasoning_effort": 3}):
        client.refuse(PATH, {"messages": MESSAGES, **bad}, next(iter(bad)))


def test_token_ids_are_returned_if_requested(client, llm):
    """Oracle: the tokenizer, which has a token for each byte. In a stream, the prompt's are in the first chunk."""
    tokenizer, fields = llm.engine.tokenizer, {"n": 2, "temperature": 1.0, "seed": 4, "return_token_ids": True}
    whole = ask(client, **fields)
    assert whole["prompt_token_ids"] == tokenizer.encode(PROMPT)
    for choice in whole["choices"]:
        assert len(choice["token_ids"]) == 12
        assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["message"]["content"]
    chunks = client.events(PATH, messages=MESSAGES, max_tokens=12, ignore_eos=True, **fields)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not [chunk for chunk in chunks[1:] if "prompt_token_ids" in chunk]
    for expected in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        assert sum([c.get("token_ids", []) for c in mine], []) == expected["token_ids"]
    plain = ask(client, **{**fields, "return_token_ids": False})
    assert "prompt_token_ids" not in plain
    assert not [choice for choice in plain["choices"] if "token_ids" in choice]


def test_token_ids_of_tool_calls_are_complete(client):
    """A stream has chunks for tokens that show no text, such as those of a tag."""
    fields = {"tools": [ADD], "tool_choice": "required", "max_tokens": 60, "return_token_ids": True}
    whole = client.ask(PATH, messages=MESSAGES, seed=1, **fields)["choices"][0]["token_ids"]
    chunks = client.events(PATH, messages=MESSAGES, seed=1, **fields)
    assert sum([c.get("token_ids", []) for chunk in chunks for c in chunk["choices"]], []) == whole
