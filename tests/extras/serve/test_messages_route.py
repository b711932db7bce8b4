"""`/v1/messages`: the chat's answer in blocks, whole or as events that add up to the whole.

The oracles: the chat of the same conversation, how a scripted answer was made, and the prompt that the template writes.
"""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parsers import CALLS, PLACES, TEXTS, cut, spell
from test_structured import ADD, CALL, MESSAGES, NUMBER, SCHEMA, TEMPLATE, WEATHER

from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from nanovllm_extras.serve.answer import Answer
from nanovllm_extras.serve.async_llm import QueueFullError
from nanovllm_extras.serve.messages.protocol import ChatCompletionRequest
from nanovllm_extras.serve.parsers.parser_registry import Parsers
from nanovllm_extras.serve.routes import messages_route
from nanovllm_extras.serve.routes.messages_blocks import SIGNATURE, ContentBlocks
from tests.conftest import examples
from tests.extras.serve.conftest import named_events

PATH, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"


def to_tool(tool, **others):
    function = tool["function"]
    return {"name": function["name"], "input_schema": function["parameters"], **others}


ADD_TOOL, WEATHER_TOOL = to_tool(ADD), to_tool(WEATHER, type="custom", description="The weather.")


def body_of(**body):
    return {"messages": MESSAGES, "max_tokens": 400, **body}


def ask(client, **body):
    return client.ask(PATH, **body_of(**body))


def stream(client, **body):
    """The events without pings. Names and order are checked."""
    events = named_events(client.post(PATH, body_of(**body, stream=True)))
    assert events[1] == {"type": "ping"}
    return [event for event in events if event != {"type": "ping"}]


def add_up(events):
    """The blocks that a client makes of the events after `message_start`. Their order is checked."""
    blocks, is_open, arguments = [], False, ""
    for event in events:
        kind = event["type"]
        assert is_open == (kind != "content_block_start")
        if kind == "content_block_start":
            is_open, arguments = True, ""
            blocks.append(dict(event["content_block"]))
        elif kind == "content_block_stop":
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                assert blocks[-1]["input"] == {}
                blocks[-1]["input"] = arguments
        else:
            assert kind == "content_block_delta"
            (name,) = [name for name in event["delta"] if name != "type"]
            assert event["delta"]["type"] == f"{name.removeprefix('partial_').replace('json', 'input_json')}_delta"
            if name == "partial_json":
                arguments += event["delta"][name]
            else:
                blocks[-1][name] += event["delta"][name]
        assert event["index"] == len(blocks) - 1
    assert not is_open
    return blocks


def message_of(events):
    """The message that a client makes of a stream. The arguments of calls must be complete."""
    start, *inner, delta, stop = events
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    blocks = add_up(inner)
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    return start["message"] | {"content": blocks} | delta["delta"] | {"usage": delta["usage"]}


def scripted(client, text, stream_it=False, **body):
    """The answer of a model that says `text`."""
    body = {"structured_outputs": {"grammar": f"start: {json.dumps(text)}"}, **body}
    return message_of(stream(client, **body)) if stream_it else ask(client, **body)


# ---- answers


@pytest.mark.parametrize("stream_it", [False, True])
def test_the_answer_is_the_chats(client, stream_it):
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "top_k": 3, "top_p": 0.9}
    chat = client.ask(CHAT, messages=MESSAGES, **fields)
    answer = message_of(stream(client, **fields)) if stream_it else ask(client, **fields)
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    usage, told = answer["usage"], chat["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == told["prompt_tokens"]
    assert usage["output_tokens"] == told["completion_tokens"] == 12
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert answer["id"].startswith("msg_")
    assert client.ask(COUNT, messages=MESSAGES) == {"input_tokens": told["prompt_tokens"]}


@pytest.mark.parametrize("stream_it", [False, True])
def test_thoughts_text_and_calls_are_blocks(client, stream_it):
    text = "<think>\nI must add.\n</think>\n\nLet me see.\n" + CALL + "\n" + CALL
    answer = scripted(client, text, stream_it, tools=[ADD_TOOL], thinking={"type": "adaptive"})
    thought, said, *calls = answer["content"]
    assert thought == {"type": "thinking", "thinking": "I must add.", "signature": SIGNATURE}
    assert said == {"type": "text", "text": "Let me see."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [("tool_use", "add", {"a": 1})] * 2
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].startswith("toolu_") for call in calls)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize("stream_it", [False, True])
def test_why_an_answer_ends(client, llm, stream_it):
    most = llm.engine.parts.max_model_len
    for body, reason, sequence, last in (
        ({}, "end_turn", None, {"type": "text", "text": "Hello. Bye."}),
        ({"stop_sequences": ["no", ". B"]}, "stop_sequence", ". B", {"type": "text", "text": "Hello"}),
        ({"max_tokens": 5}, "max_tokens", None, {"type": "text", "text": "Hello"}),
        ({"max_tokens": 1, "stop_sequences": ["H"]}, "stop_sequence", "H", None),
    ):
        answer = scripted(client, "Hello. Bye.", stream_it, **body)
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
        assert answer["content"] == ([last] if last else [])
    long = body_of(messages=[{"role": "user", "content": "x" * (most - 30)}], ignore_eos=True, max_tokens=most)
    answer = message_of(stream(client, **long)) if stream_it else ask(client, **long)
    assert answer["stop_reason"] == "model_context_window_exceeded"


def test_a_call_that_is_cut_off_has_the_arguments_that_are_complete(client):
    text = CALL.replace('{"a": 1}', '{"a": 1, "b": [1, 2], "c": "xyz"}')
    for stop, complete in (('yz"', {"a": 1, "b": [1, 2]}), ('"a"', {})):
        answer = scripted(client, text, tools=[ADD_TOOL], stop_sequences=[stop])
        (call,) = answer["content"]
        assert (call["input"], answer["stop_reason"], answer["stop_sequence"]) == (complete, "stop_sequence", stop)
    events = stream(client, structured_outputs={"grammar": f"start: {json.dumps(text)}"}, tools=[ADD_TOOL],
                    stop_sequences=['yz"'])  # fmt: skip
    (call,) = add_up(events[1:-2])
    assert call["input"] == '{"a": 1, "b": [1, 2], "c": "x', "a client parses what there is"


@pytest.mark.examples
@settings(max_examples=examples(200), deadline=None)
@given(TEXTS, st.lists(st.one_of(TEXTS, CALLS), max_size=5), PLACES)
def test_any_pieces_of_an_answer_are_the_blocks_of_the_whole(thought, parts, places):
    text = f"<think>{thought}</think>" + "".join(part if isinstance(part, str) else spell(part)[0] for part in parts)
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = ChatCompletionRequest.model_validate({"messages": MESSAGES, "tools": tools})

    def read(pieces):
        answer = Answer(body, {"prompt": "", "prompt_token_ids": []}, Parsers(), TokenBytes(None))
        content, events = ContentBlocks(), []
        for i, piece in enumerate(pieces):
            events += content.feed(answer.feed(piece, [], i == len(pieces) - 1))
        events += content.finish()
        blocks = add_up(events)
        for block, told in zip(blocks, content.blocks, strict=True):
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["input"])
            assert block == told
            block.pop("id", None)
        return blocks

    whole = read([text])
    assert read(cut(text, places)) == read(list(text)) == whole
    calls = [(call["name"], call["input"]) for call in whole if call["type"] == "tool_use"]
    assert calls == [(part["name"], part["arguments"]) for part in parts if not isinstance(part, str)]
    assert [one["thinking"] for one in whole if one["type"] == "thinking"] == [thought.strip()] * bool(thought.strip())


def test_tokens_of_the_prefix_cache_are_told(client):
    body = {"messages": [{"role": "user", "content": "p" * 40}], "max_tokens": 1, "cache_salt": "messages"}
    first, second = ask(client, **body)["usage"], ask(client, **body)["usage"]
    assert (first["cache_read_input_tokens"], first["cache_creation_input_tokens"]) == (0, 0)
    assert second["cache_read_input_tokens"] == (first["input_tokens"] - 1) // 4 * 4, "all full blocks"
    assert second["input_tokens"] == first["input_tokens"] - second["cache_read_input_tokens"]
    start, *_, delta, _ = stream(client, **body)
    for usage in (start["message"]["usage"], delta["usage"]):
        assert usage["cache_read_input_tokens"] == second["cache_read_input_tokens"]


def test_a_stream_that_waits_for_its_first_token_sends_pings(client, llm, monkeypatch):
    run, wait_s = llm.engine.runner.run, 0.1

    def run_slowly(*arguments):
        time.sleep(wait_s)
        return run(*arguments)

    monkeypatch.setattr(messages_route, "PING_S", 0.02)
    monkeypatch.setattr(llm.engine.runner, "run", run_slowly)
    names = []
    while wait_s < 10 and names[:3] != ["message_start", "ping", "ping"]:  # a busy machine needs more time
        response = client.post(PATH, body_of(max_tokens=1, stream=True))
        names = [block.split("\n")[0].removeprefix("event: ") for block in response.text.split("\n\n")[:-1]]
        wait_s *= 4
    assert names[:3] == ["message_start", "ping", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert names.count("message_start") == 1


# ---- the conversation


def count(client, **body):
    return client.ask(COUNT, **{"messages": MESSAGES, **body})["input_tokens"]


THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE}
RESULTS = [
    {"type": "tool_result", "tool_use_id": "c", "content": "2"},
    {"type": "tool_result", "tool_use_id": "d", "is_error": True,
     "content": [{"type": "text", "text": "No"}, {"type": "text", "text": "net"}]},
    {"type": "tool_result", "tool_use_id": "e"},
]  # fmt: skip
CONVERSATION = [
    {"role": "user", "content": [{"type": "text", "text": "W", "cache_control": {"type": "ephemeral"}},
                                 {"type": "text", "text": "hat?"}]},
    {"role": "user", "content": "Now."},
    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, THOUGHT,
                                      {"type": "text", "text": "See:"},
                                      {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
                                      {"type": "tool_use", "id": "d", "name": "add", "input": {}}]},
    {"role": "user", "content": [*RESULTS, {"type": "text", "text": "And?"}]},
]  # fmt: skip
THINKING_TEMPLATE = TEMPLATE.replace("{{ m.role", "{{ (m.reasoning or '') + m.role") + (
    "{{ '+' if enable_thinking else '-' }}{{ reasoning_effort or '' }}"
)
PROMPT = (
    "[add]system:Sys.\nMore.|user:W\nhat?\nNow.|"
    'Hm.assistant:See:add{"a": 1}add{}|tool:2|tool:Error: No\nnet|tool:|user:And?|-'
)
SYSTEM = [{"type": "text", "text": "Sys."}, {"type": "text", "text": "More.", "cache_control": {"type": "ephemeral"}}]
BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=00000;"


def test_the_conversation_is_what_the_template_writes(client, llm, monkeypatch):
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", THINKING_TEMPLATE)
    body = {"messages": CONVERSATION, "tools": [ADD_TOOL], "max_tokens": 5, "temperature": 0}
    wanted = client.ask("/v1/completions", prompt=PROMPT, max_tokens=5, temperature=0)
    for system in (SYSTEM, "Sys.\nMore.", [{"type": "text", "text": BILLING}, *SYSTEM], BILLING + "\nSys.\nMore."):
        answer = ask(client, **body, system=system)
        assert [block["text"] for block in answer["content"]] == [wanted["choices"][0]["text"]]
        usage = answer["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(PROMPT)
    assert count(client, messages=CONVERSATION, tools=[ADD_TOOL], system=SYSTEM) == len(PROMPT)


def test_thinking_effort_and_no_tools_are_told_to_the_template(client, llm, monkeypatch):
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", THINKING_TEMPLATE + "{{ 'yes' if enable_thinking }}")
    plain = count(client)
    for body, more in (
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "yes"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "yeshigh"),
        ({"thinking": {"type": "disabled"}}, ""),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "yes"),
        ({"tools": [ADD_TOOL]}, "[add]"),
        ({"tools": [ADD_TOOL], "tool_choice": {"type": "none"}}, ""),
        ({"system": [{"type": "text", "text": BILLING}]}, ""),
    ):
        assert count(client, **body) == plain + len(more), body


def test_a_last_message_of_the_assistant_is_continued(client):
    said = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    chat = client.ask(CHAT, messages=said, continue_final_message=True, max_tokens=5, temperature=0)
    answer = ask(client, messages=said, max_tokens=5, temperature=0)
    assert answer["content"][0]["text"] == chat["choices"][0]["message"]["content"]


# ---- tools and formats


def test_tools_are_chosen(client):
    both = {"tools": [WEATHER_TOOL, ADD_TOOL]}
    for choice, names in (
        ({"type": "any", "disable_parallel_tool_use": True}, {"add", "get_weather"}),
        ({"type": "tool", "name": "add"}, {"add"}),
    ):
        (call,) = ask(client, **both, tool_choice=choice, seed=1)["content"]
        assert call["name"] in names
    calls = [ask(client, **both, tool_choice={"type": "any"}, seed=seed)["content"] for seed in range(4)]
    assert max(map(len, calls)) > 1, "several at once"
    for call in sum(calls, []):
        assert call["type"] == "tool_use"
    for body in ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {}):
        answer = scripted(client, CALL + "\n" + CALL, tools=[ADD_TOOL], **body)
        assert len(answer["content"]) == 2 - bool(body)
    answer = scripted(client, CALL, tools=[ADD_TOOL], tool_choice={"type": "none"})
    assert (answer["content"][0]["text"], answer["stop_reason"]) == (CALL, "end_turn")


def test_a_schema_is_kept(client):
    answer = ask(client, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, seed=3)
    assert answer["stop_reason"] == "end_turn"
    assert json.loads(answer["content"][0]["text"]).keys() == {"kind", "size"}


# ---- errors


def with_block(**block):
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, block]}]}


FORMAT = {"format": {"type": "json_schema", "schema": {"not": {}}}}
REFUSED = [  # (body, words of the message)
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**7}, "max_tokens must be at most"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
    (
        with_block(type="image", source={"type": "url", "url": "x"}),
        "messages.0.content.1.image: blocks of the type image",
    ),
    (with_block(type="document", source={}), "blocks of the type document"),
    (with_block(type="tool_result", tool_use_id="c", content=[{"type": "image"}]), "blocks of the type image"),
    (with_block(type="thinking", thinking="a"), "content.1.type"),
    (with_block(type="elephant"), "elephant"),
    ({"messages": CONVERSATION[:3]}, "tool_result must follow"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "prompt is too long"),
    ({"messages": MESSAGES * 600}, "prompt is too long"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools of the type web_search_20250305"),
    ({"tools": [{"name": "a b", "input_schema": NUMBER}]}, "tools.0.name"),
    ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
    ({"tools": [ADD_TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice must name one of the tools add"),
    ({"tools": [ADD_TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"output_config": FORMAT}, "output_config: "),
    ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    ({"stop": ["a"]}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"response_format": {"type": "text"}}, "output_config.format"),
    ({"n": 2}, "n must be 1"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
]


def check_error(response, status, kind, *words):
    body = response.json()
    told = response.status_code, body["type"], body["error"]["type"], [w for w in words if w not in str(body["error"])]
    assert told == (status, "error", kind, []), body
    assert body.keys() == {"type", "error", "request_id"}
    assert body["error"].keys() == {"type", "message"}
    assert response.headers["request-id"] == response.headers["x-request-id"] == body["request_id"]


def test_what_is_refused_is_named(client):
    for body, word in REFUSED:
        check_error(client.post(PATH, body_of(**body)), 400, "invalid_request_error", word)
    check_error(client.post(PATH, {"messages": MESSAGES}), 400, "invalid_request_error", "max_tokens: Field required")
    check_error(client.post(COUNT, {}), 400, "invalid_request_error", "messages: Field required")
    error = client.post(PATH, body_of(thread={"type": "create"})).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_what_has_no_meaning_here_is_accepted(client):
    ignored = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "mcp_servers": [],
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14,a"}
    response = client.post(PATH + "?beta=true", body_of(max_tokens=2, temperature=0, **ignored), headers=headers)
    assert response.json()["content"] == ask(client, max_tokens=2, temperature=0)["content"]


def test_errors_have_the_form_of_this_api_only_on_its_paths(client, new_client, llm, monkeypatch):
    check_error(client.post(PATH, body_of(model="another")), 404, "not_found_error", "another")
    check_error(client.post(PATH + "/batches", {}), 404, "not_found_error", "/v1/messages/batches")
    check_error(client.post("/v1" + PATH, {}), 404, "not_found_error", "without /v1")
    check_error(client.get(PATH), 405, "invalid_request_error")
    check_error(client.post(PATH, content=b"{"), 400, "invalid_request_error")
    large = new_client(max_request_bytes=100).post(PATH, body_of(system="x" * 100))
    check_error(large, 413, "request_too_large")
    limited = new_client(max_requests_per_minute=1)
    limited.post(PATH, body_of(max_tokens=1))
    check_error(limited.post(COUNT, {}), 429, "rate_limit_error", "per minute")
    assert "param" in limited.post(CHAT, {}).json()["error"]

    async def refuse(*_):
        raise QueueFullError("100 requests are already waiting")

    monkeypatch.setattr(llm, "submit", refuse)
    check_error(client.post(PATH, body_of()), 529, "overloaded_error", "waiting")
    assert client.post(CHAT, {"messages": MESSAGES}).status_code == 429
    client.server.is_draining = True
    check_error(client.post(PATH, body_of()), 503, "overloaded_error", "shutting down")


def test_a_key_may_be_in_either_header(new_client):
    client = new_client(api_keys=("one", "two"))
    right, wrong = {"x-api-key": "two"}, {"x-api-key": "three"}
    bearer = {"Authorization": "Bearer one"}
    for headers in ({}, wrong, {"x-api-key": ""}, {"Authorization": "two"}, wrong | {"Authorization": "Basic one"}):
        check_error(client.post(PATH, body_of(), headers=headers), 401, "authentication_error")
    for headers in (right, bearer, right | {"Authorization": "Bearer x"}, wrong | bearer):
        assert client.post(COUNT, {"messages": MESSAGES}, headers=headers).status_code == 200, headers
    limited = new_client(api_keys=("one", "two"), max_requests_per_minute=1)
    statuses = [limited.post(COUNT, {"messages": MESSAGES}, headers=one).status_code for one in (right, right, bearer)]
    assert statuses == [200, 429, 200], "each key has its own rate"


def test_a_step_that_fails_ends_the_stream_with_an_error(client, llm, monkeypatch):
    def fail(*_):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(llm.engine.runner, "run", fail)
    check_error(client.post(PATH, body_of()), 500, "api_error")
    response = client.post(PATH, body_of(stream=True))
    name, data = response.text.strip().split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (name, error["type"], error["error"]["type"]) == ("event: error", "error", "api_error")
    assert error["request_id"] == response.headers["request-id"]
    assert "on purpose" not in response.text
