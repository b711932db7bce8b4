"""Budgets of reasoning over HTTP: `thinking_token_budget` of chats, and `budget_tokens` of messages.

Oracle: the same prompt without a budget up to the tag, and the completion of the prompt with reasoning and tag.

Seen to fail when broken: a budget that is not passed on, by either route; one that is passed on for a disabled or an
adaptive reasoning; one that harmony's parser takes without effect.
"""

import pytest

from nanovllm_extras.serve.parsers.parser_registry import parsers_named
from tests.extras.serve.conftest import CHAT_TEMPLATE, named_events

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ASKED = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24, "temperature": 0}
ASKED |= {"ignore_eos": True, "logit_bias": {str(i): -100.0 for i in (*range(35), *range(94, 300))}}  # only letters
OPENED = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture
def thinking(client, llm, monkeypatch):
    """A client of a model whose template opens the reasoning, if it is to think."""
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", CHAT_TEMPLATE + "{{ '<think>' if enable_thinking }}")
    return client


def expected(client, budget):
    """The reasoning and the content of an answer."""
    prompt, limits = "user:Hi|assistant:<think>", {key: one for key, one in ASKED.items() if key != "messages"}
    reasoning = client.ask("/v1/completions", prompt=prompt, **limits)["choices"][0]["text"][:budget]
    limits["max_tokens"] -= budget + len("</think>")
    rest = client.ask("/v1/completions", prompt=f"{prompt}{reasoning}</think>", **limits)["choices"][0]["text"]
    return reasoning, rest


@pytest.mark.parametrize("budget", [0, 5])
def test_a_chat(thinking, budget):
    reasoning, content = expected(thinking, budget)
    fields = {**ASKED, **OPENED, "thinking_token_budget": budget}
    (choice,) = thinking.ask(CHAT, **fields)["choices"]
    assert (choice["message"].get("reasoning", ""), choice["message"]["content"]) == (reasoning, content)
    deltas = [one["delta"] for event in thinking.events(CHAT, **fields) for one in event["choices"]]
    for name, text in (("reasoning", reasoning), ("content", content)):
        assert "".join(delta.get(name) or "" for delta in deltas) == text
    limits = {key: one for key, one in fields.items() if key not in ("messages", "chat_template_kwargs")}
    (choice,) = thinking.ask("/v1/completions", prompt="user:Hi|assistant:<think>", **limits)["choices"]
    assert choice["text"] == f"{reasoning}</think>{content}"
    for no_limit in (None, -1, 100):
        (choice,) = thinking.ask(CHAT, **{**fields, "thinking_token_budget": no_limit})["choices"]
        assert len(choice["message"]["reasoning"]) == 24


def test_a_message(thinking):
    reasoning, content = expected(thinking, 5)
    fields = {**ASKED, "thinking": {"type": "enabled", "budget_tokens": 5}}
    thought, text = thinking.ask(MESSAGES, **fields)["content"]
    assert (thought["thinking"], text["text"]) == (reasoning, content)
    deltas = [
        one["delta"] for one in named_events(thinking.post(MESSAGES, {**fields, "stream": True})) if "delta" in one
    ]
    assert "".join(delta.get("thinking", "") for delta in deltas) == reasoning
    (thought,) = thinking.ask(MESSAGES, **fields | {"thinking": {"type": "adaptive", "budget_tokens": 5}})["content"]
    assert len(thought["thinking"]) == 24
    (thought,) = thinking.ask(MESSAGES, **fields | {"thinking": {"type": "enabled", "budget_tokens": 100}})["content"]
    assert len(thought["thinking"]) == 24, "a budget of more than max_tokens limits nothing"


def test_forms_have_no_reasoning(thinking):
    """A form that may describe reasoning excludes a budget, except for messages, to which clients always give one."""
    forms = ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"choice": ["ab"]}})
    for form in forms:
        thinking.ask(CHAT, **ASKED | OPENED | {"thinking_token_budget": 3} | form)
    regex = {"structured_outputs": {"regex": "[a-c]{9}"}}
    words = "thinking_token_budget", "structured_outputs.regex", "got 3"
    thinking.refuse(CHAT, ASKED | {"thinking_token_budget": 3} | regex, "thinking_token_budget", *words)
    answer = thinking.ask(MESSAGES, **ASKED | regex | {"thinking": {"type": "enabled", "budget_tokens": 3}})
    assert len("".join(block.get("text", block.get("thinking")) for block in answer["content"])) == 9


def test_models_without_tags(new_client):
    client = new_client(parsers=parsers_named("openai", "openai_gptoss"))
    client.refuse(CHAT, ASKED | {"thinking_token_budget": 3}, "thinking_token_budget", "gpt-oss", "max_tokens")
    client.refuse(CHAT, ASKED | {"thinking_token_budget": -2}, "thinking_token_budget")
    client.ask(MESSAGES, **ASKED | {"thinking": {"type": "enabled", "budget_tokens": 3}})
