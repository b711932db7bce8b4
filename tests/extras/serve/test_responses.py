"""`/v1/responses`: the chat's answer in items, whole or as events that add up to the whole.

The oracles: the chat of the same conversation, and how a scripted answer was made.
"""

import json
import re
from typing import get_args

import pytest
from test_structured import ADD, CALL, FORMAT, MESSAGES, NUMBER, SCHEMA, TEMPLATE, WEATHER

from nanovllm_extras.serve.messages.responses_protocol import ResponseTool
from tests.extras.serve.conftest import named_events

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
FLAT_ADD = {"type": "function", **ADD["function"]}
FLAT_WEATHER = {"type": "function", **WEATHER["function"]}
NAMESPACES = [
    {"type": "namespace", "name": "one", "description": "First.", "tools": [{"type": "custom", "name": "x"}, FLAT_ADD]},
    {"type": "namespace", "name": "two", "description": "Second.", "tools": [FLAT_ADD]},
    FLAT_ADD,
]
TEXT_FORMAT = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}


def ask(client, **body):
    return client.ask(PATH, **{"input": "What?", "max_output_tokens": 400, **body})


def stream(client, **body):
    """The events, whose names and numbers are checked."""
    events = named_events(client.post(PATH, {"input": "What?", "max_output_tokens": 400, **body, "stream": True}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def add_up(events):
    """Return the items that a client builds only from deltas."""
    items = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind == "content_part.added":
            items[-1]["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[-1]["content"][0]["text"] += event["delta"]
            items[-1]["content"][0].get("logprobs", []).extend(event.get("logprobs", []))
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == items[-1]["content"][0]["text"]
        elif kind == "content_part.done":
            assert event["part"] == items[-1]["content"][0]
        elif kind == "function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (items[-1]["arguments"], items[-1]["name"])
        elif kind == "output_item.done":
            items[-1]["status"] = event["item"]["status"]
            assert event["item"] == items[-1]
        if "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
    return items


def without_ids(items):
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def scripted(client, text, stream_it=False, **body):
    body = {"structured_outputs": {"grammar": f"start: {json.dumps(text)}"}, **body}
    if not stream_it:
        return ask(client, **body)
    events = stream(client, **body)
    response = events[-1]["response"]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response." + response["status"]
    assert add_up(events) == response["output"]
    return response


def test_the_answer_is_the_chats(client):
    fields = {"temperature": 0, "ignore_eos": True}
    answer = ask(client, max_output_tokens=12, **fields)
    chat = client.ask(CHAT, messages=MESSAGES, max_tokens=12, **fields)
    (item,) = answer["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == 12
    assert answer["usage"]["total_tokens"] == chat["usage"]["total_tokens"]
    assert (answer["object"], answer["model"], answer["store"]) == ("response", "tiny", True)
    assert answer["id"].startswith("resp_")


@pytest.mark.parametrize("stream_it", [False, True])
def test_thoughts_text_and_calls_are_items(client, stream_it):
    text = "<think>\nI must add.\n</think>\n\nLet me see.\n" + CALL + "\n" + CALL
    response = scripted(client, text, stream_it, tools=[FLAT_ADD])
    thought, message, *calls = response["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "I must add."}])
    assert (message["type"], message["content"][0]["text"]) == ("message", "Let me see.")
    assert [(call["type"], call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("function_call", "add", {"a": 1})
    ] * 2
    assert len({item["id"] for item in response["output"]} | {call["call_id"] for call in calls}) == 6
    assert {item["status"] for item in response["output"]} == {response["status"]} == {"completed"}
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len("I must add.")}, "a token is a byte"


@pytest.mark.parametrize("stream_it", [False, True])
def test_a_call_that_is_cut_off_is_incomplete(client, stream_it):
    response = scripted(client, CALL, stream_it, tools=[FLAT_ADD], max_output_tokens=50)
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["name"] == "add"
    body = {"tools": [FLAT_ADD], "tool_choice": {"type": "function", "name": "add"}, "max_output_tokens": 100}
    for stop, kind in (('"a"', "function_call"), ('name"', "message")):
        fields = body | {"stop": stop}
        response = stream(client, **fields)[-1]["response"] if stream_it else ask(client, **fields)
        (item,) = response["output"]
        assert (item["type"], item["status"], response["status"]) == (kind, "incomplete", "incomplete")
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}, "OpenAI's types have none for it"


def test_a_stream_is_the_whole(client):
    body = {"text": TEXT_FORMAT, "seed": 3, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    ask(client, **body)  # from now on the prompt is in the prefix cache, so both requests compute the same chunk
    whole = ask(client, **body)
    events = stream(client, **body)
    assert without_ids(add_up(events)) == without_ids(whole["output"])
    assert events[-1]["response"]["usage"] | {"input_tokens_details": 0} == whole["usage"] | {"input_tokens_details": 0}
    (part,) = whole["output"][0]["content"]
    told = [byte for entry in part["logprobs"] for byte in entry["bytes"]]
    assert bytes(told).startswith(part["text"].encode())
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}


def test_formats_and_forced_calls(client):
    for text in (TEXT_FORMAT, {"format": {"type": "json_object"}}):
        response = ask(client, text=text, seed=3)
        if response["status"] == "completed":
            value = json.loads(response["output"][0]["content"][0]["text"])
            assert text is not TEXT_FORMAT or value.keys() == {"kind", "size"}
    tools = [FLAT_WEATHER, FLAT_ADD]
    only_add = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    for choice in ({"type": "function", "name": "add"}, only_add):
        response = ask(client, tools=tools, tool_choice=choice, seed=1, parallel_tool_calls=False)
        assert [item["name"] for item in response["output"]] == ["add"]
        assert (response["tools"][1]["name"], response["tools"][1]["parameters"]) == ("add", NUMBER)
    assert response["tool_choice"] == only_add


def test_the_conversation_is_the_chats(client, llm, monkeypatch):
    """All kinds of items; the template writes what it is told, and each character is a token."""
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", TEMPLATE)
    items = [
        {"role": "developer", "content": "Dev."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "W"},
                                                        {"type": "input_text", "text": "hat?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Se", "annotations": []},
                     {"type": "refusal", "refusal": "e:"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "d", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    text = 'system:Sys.|system:Dev.|user:What?|assistant:See:add{"a": 1}add{"a": 2}|tool:2|user:And?|'
    wanted = client.ask("/v1/completions", prompt=text, max_tokens=5, temperature=0)
    answer = ask(client, input=items, instructions="Sys.", max_output_tokens=5, temperature=0)
    assert answer["usage"]["input_tokens"] == wanted["usage"]["prompt_tokens"]
    assert answer["output"][0]["content"][0]["text"] == wanted["choices"][0]["text"]
    thinking = client.ask(PATH, input="What?", max_output_tokens=1, chat_template_kwargs={"open": True})
    plain = client.ask(PATH, input="What?", max_output_tokens=1)
    assert thinking["usage"]["input_tokens"] == plain["usage"]["input_tokens"] + len("<think>")


REFUSED = [  # (body, the field that is named, a word of the message)
    ({"input": []}, "input", ""),
    ({"input": 5}, "input", ""),
    ({"input": [{"type": "message", "role": "user"}] * 5000}, "input", "5000"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input", "not ignored"),
    ({"input": None}, "input", "previous_response_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input.0"),
    ({"input": [{"role": "user", "content": "a"}, {"type": "function_call"}]}, "input", "input.1"),
    ({"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}, "input", "assistant"),
    ({"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "input", "input.0.content.0"),
    ({"input": [{"type": ["a"]}]}, "input", "input.0.type"),
    ({"input": "\ud800"}, "input", ""),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not found"),
    ({"conversation": "c"}, "conversation", "whole conversation"),
    ({"prompt": {"id": "p"}}, "prompt", "instructions"),
    ({"truncation": "always"}, "truncation", ""),
    ({"n": 2}, "n", ""),
    ({"response_format": FORMAT}, "response_format", "text.format"),
    ({"text": {"format": {"type": "json_schema"}}}, "text", "schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text", "text"),
    ({"tools": [{"type": "elephant"}]}, "tools", "'function'"),
    ({"tools": [{"type": "function"}]}, "tools", "name"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "function"),
    ({"tools": [FLAT_ADD, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice", ""),
    (
        {
            "tools": [FLAT_ADD],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        },
        "tool_choice",
        "function",
    ),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "tools"),
    ({"reasoning": {"effort": "most"}}, "reasoning", "max"),
    ({"text": {"verbosity": "mute"}}, "text", "low"),
    ({"tools": [FLAT_ADD], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "add"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"max_output_tokens": 10**7}, "max_output_tokens", "max_output_tokens"),
    ({"input": "a" * 10**5}, "input", ""),
    ({"temperature": -1}, "temperature", ""),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", ""),
    ({"include": ["elephant"]}, "include", "reasoning.encrypted_content"),
    ({"model": "another"}, "model", ""),
    ({"tools": [*NAMESPACES, FLAT_ADD | {"name": "one.add"}]}, "tools", "one.add"),
    ({"tools": [{"type": "namespace", "name": "a b", "tools": []}]}, "tools", "name"),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools", "tools"),
    (
        {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "namespace", "name": "b", "tools": []}]}]},
        "tools",
        "type",
    ),
]


def test_what_is_refused_names_the_field_of_a_response(client):
    for body, param, word in REFUSED:
        status = 404 if param == "model" else 400
        error = client.refuse(PATH, {"input": "What?", **body}, param, word, status=status)
        assert not re.search("max_completion_tokens|response_format:|messages", error["message"])


# ---- what Codex sends (version 0.169.0, with shorter texts)

CLOSE_AGENT = {"type": "function", "name": "close_agent", "strict": False, "parameters": NUMBER}
GET_GOAL = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
CODEX = {
    "tools": [
        {**FLAT_ADD, "name": "exec_command", "description": "Runs a command in a PTY.", "strict": False},
        {"type": "namespace", "name": "multi_agent_v1", "description": "Sub-agents.", "tools": [CLOSE_AGENT]},
        {"type": "function", "name": "get_goal", "description": "Get it.", "strict": False, "parameters": GET_GOAL},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"a\""}},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "max", "summary": "auto"},
    "text": {"verbosity": "low"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a21233-8b77-73c3-90cd-7d0101d842e8",
    "client_metadata": {"x-codex-installation-id": "104855e4-82ce-46c8-baba-f118283a5888"},
}  # fmt: skip
CODEX_TURN = [
    {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "You are."}]},
    {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "What?"}]},
]
CODEX_HISTORY = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}],
     "encrypted_content": None},
    {"type": "function_call", "status": "completed", "id": "fc_1", "name": "exec_command", "arguments": '{"a": 1}',
     "call_id": "c1"},
    {"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": "Output:\nhi"},
]  # fmt: skip
CODEX_COMPACTION = {"tools": [], "parallel_tool_calls": False}


def test_codex_is_answered(client, llm, monkeypatch):
    """Its turns and the compaction of its history. Oracle: the prompt as the template writes it, functions only."""
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", TEMPLATE)
    functions = "[exec_command][multi_agent_v1.close_agent][get_goal]"
    turn = "system:You are.|user:What?|"
    for items, others, prompt in (
        (CODEX_TURN, {}, functions + turn),
        (CODEX_TURN + CODEX_HISTORY, {}, functions + turn + 'assistant:exec_command{"a": 1}|tool:Output:\nhi|'),
        ([*CODEX_TURN, CODEX_TURN[1]], CODEX_COMPACTION, turn + "user:What?|"),
    ):
        response = stream(client, **{**CODEX, "input": items, "max_output_tokens": 2, **others})[-1]["response"]
        assert response["usage"]["input_tokens"] == len(prompt)
        names = [] if others else ["exec_command", "multi_agent_v1", "get_goal"]
        assert [tool["name"] for tool in response["tools"]] == names


@pytest.mark.parametrize("stream_it", [False, True])
def test_functions_in_namespaces_are_called_by_both_names(client, stream_it):
    """Codex 0.169 runs such a call only if the item has `namespace` and the function's own name."""
    text = "\n".join(CALL.replace("add", name) for name in ("two.add", "add", "one.add"))
    response = scripted(client, text, stream_it, tools=NAMESPACES)
    names = [(call.get("namespace"), call["name"], call["arguments"]) for call in response["output"]]
    assert names == [("two", "add", '{"a": 1}'), (None, "add", '{"a": 1}'), ("one", "add", '{"a": 1}')]
    assert "namespace" not in response["output"][1]
    shown = [(tool["type"], [one["name"] for one in tool.get("tools", [])]) for tool in response["tools"]]
    assert shown == [("namespace", ["add"]), ("namespace", ["add"]), ("function", [])]


def test_calls_of_functions_in_namespaces_come_back(client, llm, monkeypatch):
    """Oracle: the prompt as the template writes it."""
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", TEMPLATE)
    history = [
        {"role": "user", "content": "What?"},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "namespace": "two", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3", "namespace": "two"},
    ]
    prompt = "[one.add][two.add][add]user:What?|assistant:two.add{}|tool:3|"
    answer = ask(client, input=history, tools=NAMESPACES, max_output_tokens=1)
    assert answer["usage"]["input_tokens"] == len(prompt)


def test_a_namespace_can_be_chosen(client):
    one = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "one"}]}
    for choice, called in (
        ("required", {("one", "add"), ("two", "add"), (None, "add")}),
        ({"type": "function", "name": "two.add"}, {("two", "add")}),
        (one, {("one", "add")}),
    ):
        answer = ask(client, tools=NAMESPACES, tool_choice=choice, parallel_tool_calls=False, seed=1)
        (call,) = answer["output"]
        assert (call.get("namespace"), call["name"]) in called


def test_tools_that_cannot_run_here_are_skipped(client, llm, monkeypatch):
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", TEMPLATE)
    names = {
        one for kind in get_args(ResponseTool)[0].__args__ for one in get_args(kind.model_fields["type"].annotation)
    }
    others = [{"type": name, "name": 5, "parameters": "x"} for name in sorted(names - {"function", "namespace"})]
    assert len(others) > 10
    body = {"max_output_tokens": 1, "temperature": 0}
    plain, with_add = ask(client, **body), ask(client, **body, tools=[FLAT_ADD])
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [*others[:2], {"type": "function", "name": "add"}]}
    for fields, expected in (
        ({"tools": others}, plain),
        ({"tools": others, "tool_choice": "auto"}, plain),
        ({"tools": []}, plain),
        ({"tools": [], "tool_choice": "none"}, plain),
        ({"tools": [*others, FLAT_ADD]}, with_add),
        ({"tools": [*others, FLAT_ADD], "tool_choice": allowed}, with_add),
        ({"tools": [*others, FLAT_ADD], "tool_choice": allowed | {"tools": others[:2]}}, plain),
    ):
        assert ask(client, **body, **fields)["usage"]["input_tokens"] == expected["usage"]["input_tokens"], fields
    (call,) = ask(client, tools=[*others, FLAT_ADD], tool_choice="required", parallel_tool_calls=False)["output"]
    assert call["name"] == "add"


def test_a_step_that_fails_ends_the_stream_with_a_failure(client, llm, monkeypatch):
    def fail(*_):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(llm.engine.runner, "run", fail)
    events = stream(client)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert "on purpose" not in json.dumps(events)
    assert client.post(PATH, {"input": "What?"}).status_code == 500
