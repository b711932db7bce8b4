"""Formats, tools and thoughts over HTTP: random weights say what the form allows, and scripted ones what is written.

The oracles: `jsonschema`, and how a scripted answer was made.
"""

import json
import re

import jsonschema
import pytest

from nanovllm_extras.serve.messages.protocol import Function
from nanovllm_extras.serve.parsers.hermes import Hermes
from nanovllm_extras.serve.structured_outputs import call_grammar

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "What?"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "blue"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}


def with_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}


def named(name):
    return {"type": "function", "function": {"name": name}}


FORMAT = with_schema(SCHEMA)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"City": {"enum": ["Oslo", "Rome (☀)"]}},
        },
    },
}
NUMBER = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "parameters": NUMBER}}
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in (WEATHER, ADD)}


def ask(client, path=CHAT, **body):
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "What?"}
    return client.ask(path, **{**prompt, "max_tokens": 400, "temperature": 1, **body})["choices"]


def add_up(events):
    """The messages of a stream's chunks, by index, and their reasons to finish."""
    messages, reasons = {}, {}
    for event in events:
        for choice in event["choices"]:
            message = messages.setdefault(choice["index"], {"content": ""})
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    calls = message.setdefault("tool_calls", [])
                    for part in value:
                        if part["index"] == len(calls):
                            calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
                        else:
                            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
                elif name != "role":
                    message[name] = message.get(name, "") + value
            reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"])
    return messages, reasons


# ---- formats


@pytest.mark.parametrize("strict", [True, None])
def test_objects_are_closed_strict_or_not(client, strict):
    schema = {key: value for key, value in SCHEMA.items() if key != "additionalProperties"}
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": strict}}
    for choice in ask(client, response_format=form, n=3, seed=1):
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
    for choice in ask(client, tools=[tool], tool_choice=named("f"), n=3, seed=1):
        jsonschema.validate(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]), SCHEMA)


def test_a_json_object_and_plain_text(client):
    for choice in ask(client, response_format={"type": "json_object"}, n=3, seed=2, max_tokens=100):
        assert choice["finish_reason"] in ("stop", "length")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
    plain = ask(client, max_tokens=9, temperature=0)
    assert ask(client, max_tokens=9, temperature=0, response_format={"type": "text"}) == plain


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_vllms_structured_outputs(client, path):
    def text(**form):
        (choice,) = ask(client, path, structured_outputs=form, seed=3)
        assert choice["finish_reason"] == "stop"
        return choice["text"] if path == COMPLETIONS else choice["message"]["content"]

    assert text(choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch(r"[a-c]{3}\d", text(regex=r"[a-c]{3}\d"))
    assert text(grammar='start: "x" "y"') == "xy"
    jsonschema.validate(json.loads(text(json=SCHEMA, disable_any_whitespace=True)), SCHEMA)


def test_a_stream_of_a_format(client):
    body = {"messages": MESSAGES, "response_format": FORMAT, "max_tokens": 200, "n": 2, "seed": 5}
    messages, reasons = add_up(client.events(CHAT, **body))
    assert reasons == {0: "stop", 1: "stop"}
    whole = client.ask(CHAT, **body)["choices"]
    assert [messages[i]["content"] for i in range(2)] == [choice["message"]["content"] for choice in whole]


def with_parameters(schema):
    return {"type": "function", "function": {"name": "a", "parameters": schema}}


REFUSED = [  # (body, the field that is named, a word of the message)
    ({"response_format": {"type": "xml"}}, "response_format", ""),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": with_schema({"type": "elephant"})}, "response_format", "elephant"),
    ({"response_format": with_schema({"not": {}})}, "response_format", "not"),
    ({"response_format": with_schema({"not": {}}), "tools": [WEATHER]}, "response_format", "response_format: "),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed"),
    ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs", ""),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "regexp"),
    ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs", "excludes"),
    ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice", ""),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "tools"),
    ({"tools": [WEATHER], "tool_choice": named("f")}, "tool_choice", "get_weather"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", ""),
    ({"tools": [with_parameters({"not": {}})], "tool_choice": "required"}, "tools", "not"),
    ({"tools": [ADD], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs", ""),
]


def test_what_cannot_be_demanded_is_a_400_that_names_it(client):
    for body, param, word in REFUSED:
        client.refuse(CHAT, {"messages": MESSAGES, "max_tokens": 5, **body}, param, word)


def test_the_tool_whose_schema_is_refused_is_named(client):
    plain = with_parameters({"type": "object", "properties": {"a": {"type": "string"}}})["function"]
    for refused in ({"not": {}}, {"$ref": "#/properties/b"}):
        functions = [plain | {"name": f"tool_{i}"} for i in range(30)]
        functions[17] |= {"parameters": {"properties": {"a": refused, "b": {"uniqueItems": True}}}}
        tools = [{"type": "function", "function": one} for one in functions]
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
        error = client.refuse(CHAT, body, "tools", "Unimplemented")
        assert error["message"].startswith("tools: function 'tool_17': ")


# ---- calls of tools


def check_calls(message, allowed):
    assert message["content"] is None
    for call in message["tool_calls"]:
        assert re.fullmatch(r"call_[0-9a-f]{24}", call["id"])
        assert call["type"] == "function"
        assert call["function"]["name"] in allowed
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return message["tool_calls"]


def test_required_calls(client):
    choices = ask(client, tools=[WEATHER, ADD], tool_choice="required", n=8, seed=1, max_tokens=300)
    calls = [
        check_calls(choice["message"], {"get_weather", "add"})
        for choice in choices
        if choice["finish_reason"] != "length"
    ]
    assert len(calls) >= 4
    assert {call["function"]["name"] for one in calls for call in one} == {"get_weather", "add"}
    assert {choice["finish_reason"] for choice in choices} <= {"tool_calls", "length"}
    single = ask(client, tools=[WEATHER, ADD], tool_choice="required", parallel_tool_calls=False, n=3, seed=1)
    assert [len(check_calls(choice["message"], {"get_weather", "add"})) for choice in single] == [1] * 3
    for choice in ask(client, tools=[WEATHER, ADD], tool_choice=named("add"), n=2, seed=1):
        assert (len(check_calls(choice["message"], {"add"})), choice["finish_reason"]) == (1, "tool_calls")


CLOSED = {"type": "object", "properties": {}, "additionalProperties": False}
NO_PARAMETERS = [
    {},
    {"parameters": None},
    {"parameters": {}},
    {"parameters": {"type": "object"}},
    {"parameters": {"type": "object", "title": "Nothing", "required": []}},
    {"parameters": {"type": "object", "properties": {}}},
]


def test_a_tool_without_parameters_gets_an_empty_object(client, llm):
    """The model would rather begin a key; a tool that closes its object explicitly has the same grammar."""
    (quote,) = llm.engine.tokenizer.encode('"')
    likes_keys = {"logit_bias": {str(quote): 100}, "max_tokens": 80}
    tools = [{"type": "function", "function": {"name": "f", **one}} for one in NO_PARAMETERS]
    for choice in (named("f"), "required"):
        (answer,) = ask(client, tools=tools[:1], tool_choice=choice, parallel_tool_calls=False, **likes_keys)
        (call,) = answer["message"]["tool_calls"]
        assert (call["function"]["arguments"], answer["finish_reason"]) == ("{}", "tool_calls")
    closed, *grammars = [
        call_grammar([Function(name="f", **one)], Hermes.spelling, True, None)
        for one in ({"parameters": CLOSED}, *NO_PARAMETERS)
    ]
    assert grammars == [closed] * len(grammars)


def allowed(mode, *names):
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools(client, llm, monkeypatch):
    for choice in ask(client, tools=[WEATHER, ADD], tool_choice=allowed("required", "add"), n=4, seed=1):
        check_calls(choice["message"], {"add"}) if choice["finish_reason"] != "length" else None
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", TEMPLATE)
    body = {"messages": MESSAGES, "tools": [WEATHER, ADD], "max_tokens": 1}
    told = client.ask(CHAT, **body, tool_choice=allowed("auto", "add"))["usage"]["prompt_tokens"]
    assert told == client.ask(CHAT, **body | {"tools": [ADD]})["usage"]["prompt_tokens"]
    client.refuse(CHAT, {**body, "tool_choice": allowed("auto", "f")}, "tool_choice")


def test_calls_or_the_format(client):
    """With tools and a response_format the answer is either; random weights reach both."""
    kinds = set()
    for choice in ask(client, tools=[ADD], response_format=FORMAT, n=16, seed=1, temperature=50, max_tokens=150):
        if choice["finish_reason"] == "tool_calls":
            check_calls(choice["message"], {"add"})
        elif choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        kinds.add(choice["finish_reason"])
    assert {"stop", "tool_calls"} <= kinds


# ---- scripted answers: the form forces every character


def scripted(client, text, stream=False, **body):
    """The answer of a model that says `text`."""
    grammar = f"start: {json.dumps(text)}"
    fields = {"structured_outputs": {"grammar": grammar}, "max_tokens": 400, **body}
    if not stream:
        (choice,) = ask(client, **fields)
        return choice
    messages, reasons = add_up(client.events(CHAT, messages=MESSAGES, **fields))
    return {"message": messages[0], "finish_reason": reasons[0]}


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_calls_and_content(client, stream):
    text = "<think>\nI must add.\n</think>\n\nLet me see.\n" + CALL + "\n" + CALL
    choice = scripted(client, text, stream, tools=[ADD])
    message = choice["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("I must add.", "I must add.")
    assert message["content"] == "Let me see."
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"a": 1}] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"
    one = scripted(client, CALL + "\n" + CALL, stream, tools=[ADD], parallel_tool_calls=False)
    assert len(one["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(("others", "stream"), [({}, True), ({"tools": [ADD], "tool_choice": "none"}, False)])
def test_a_call_of_no_tool_is_content(client, stream, others):
    plain = scripted(client, "<think>\nI must add.\n</think>\n\nLet me see.\n" + CALL, stream, **others)
    assert plain["message"]["content"] == "Let me see.\n" + CALL
    assert "tool_calls" not in plain["message"]
    assert plain["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off(client, stream):
    cut = scripted(client, CALL, stream, tools=[ADD], max_tokens=50)
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"]["name"] == "add"
    thought = scripted(client, "<think>It is long.", stream, max_tokens=12)
    assert thought["finish_reason"] == "length"
    assert thought["message"]["reasoning"] == "It is"[: len(thought["message"]["reasoning"])]
    assert thought["message"]["content"] == ""


def test_a_stop_string_within_a_forced_call_is_no_call(client):
    """`test_parser_forms.py` cuts calls everywhere."""
    body = {"messages": MESSAGES, "tools": [ADD], "tool_choice": named("add"), "max_tokens": 100, "stop": '"a"'}
    (choice,) = client.ask(CHAT, **body)["choices"]
    messages, reasons = add_up(client.events(CHAT, **body))
    for message, reason in ((choice["message"], choice["finish_reason"]), (messages[0], reasons[0])):
        assert (message["tool_calls"][0]["function"]["arguments"], reason) == ("{", "stop")


# ---- what the template is told

TEMPLATE = (
    "{%- for tool in tools or [] %}{{ '[' + tool.function.name + ']' }}{%- endfor %}"
    "{%- for m in messages %}{{ m.role + ':' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ call.function.name + (call.function.arguments | tojson) }}{%- endfor %}|"
    "{%- endfor %}{%- if open %}<think>\n{%- endif %}"
)


def test_templates_get_tools_and_calls(client, llm, monkeypatch):
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", TEMPLATE)
    conversation = [
        *MESSAGES,
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]  # fmt: skip
    text = 'user:What?|assistant:add{"a": 1}|tool:2|'
    for others, prefix in (({"tools": [ADD, WEATHER]}, "[add][get_weather]"), ({}, ""),
                           ({"tools": [ADD], "tool_choice": "none"}, "")):  # fmt: skip
        answer = client.ask(CHAT, messages=conversation, max_tokens=1, **others)
        wanted = client.ask(COMPLETIONS, prompt=prefix + text, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]


def test_a_template_may_open_the_thoughts(client, llm, monkeypatch):
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", TEMPLATE)
    choice = scripted(client, "Two.</think>\n\nFour.", chat_template_kwargs={"open": True})
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Two.", "Four.")
