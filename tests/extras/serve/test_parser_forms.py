"""Calls as models of several families write them, whatever the pieces of the text are.

The oracle is how the text was made: each family's spelling is written here a second time, from its chat template.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parsers import PLACES, cut, read_tools
from test_structured import ADD, CHAT, SCHEMAS, WEATHER, add_up, ask, check_calls

from nanovllm.extras.serve.answer import Answer, merge
from nanovllm.extras.serve.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS, Parsers
from nanovllm.extras.serve.parsers.reasoning import DeepSeekR1
from nanovllm.extras.serve.protocol import ChatCompletionRequest, Function
from tests.conftest import examples

B, E = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
BB, EE, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"


def hermes(calls):
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {json.dumps(a)}}}\n</tool_call>' for n, a in calls)


def llama(calls):
    return "; ".join(f'{{"name": "{n}", "parameters": {json.dumps(a)}}}' for n, a in calls)


def deepseek_v3(calls):
    return BB + "\n".join(f"{B}function{SEP}{n}\n```json\n{json.dumps(a)}\n```{E}" for n, a in calls) + EE


def deepseek_v31(calls):
    return BB + "".join(f"{B}{n}{SEP}{json.dumps(a)}{E}" for n, a in calls) + EE


def qwen(calls):
    def value(one):
        return one if isinstance(one, str) else json.dumps(one)

    def spell(name, arguments):
        inner = "".join(f"<parameter={key}>\n{value(one)}\n</parameter>\n" for key, one in arguments.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    return "\n".join(spell(*call) for call in calls)


SPELLED = {
    "hermes": hermes,
    "qwen3_coder": qwen,
    "qwen3_xml": qwen,
    "llama3_json": llama,
    "llama4_json": llama,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "more": {"type": "object"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "kind": {"enum": ["1", "true"]},
    },
}
FUNCTIONS = [Function(name=name, parameters=PARAMETERS) for name in ("f", "get_weather")]
WORDS = st.text('ab {}[]"<>/\\;é\n', max_size=8)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": WORDS,
        "count": st.integers(-99, 99),
        "size": st.sampled_from([0.5, 1e20, -2]),
        "flag": st.booleans(),
        "items": st.lists(WORDS | st.integers(0, 9), max_size=2),
        "more": st.dictionaries(st.sampled_from("ab"), WORDS, max_size=2),
        "maybe": st.none() | st.integers(0, 9),
        "kind": st.sampled_from(["1", "true"]),
    },
)


def test_all_names_are_tested():
    assert SPELLED.keys() == TOOL_PARSERS.keys()


@pytest.mark.parametrize("form", SPELLED)
@pytest.mark.examples
@settings(max_examples=examples(120), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), ARGUMENTS), min_size=1, max_size=3), PLACES)
def test_calls_come_out_as_they_went_in(form, calls, places):
    text = SPELLED[form](calls)
    # a parameter's own newlines next to a tag cannot be told from the form's
    before = "" if form.startswith("llama") else "Let me see. "
    content, found, _ = read_tools(cut(before + text, places), TOOL_PARSERS[form](FUNCTIONS))
    assert content == before.strip()
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


SHARDS = [
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "</function>",
    "<parameter=text>",
    "</parameter>",
    B,
    E,
    BB,
    EE,
]
SHARDS += [
    SEP,
    "function",
    "```json\n",
    "\n```",
    "f",
    "{",
    "}",
    '{"name": "f", "parameters": {"a": 1}}',
    ";",
    " ",
    "\n",
]
SHARDS += ["<|python_tag|>", "<|python", "<", ">", '"', "a"]


@pytest.mark.parametrize("form", SPELLED)
@pytest.mark.examples
@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.sampled_from(SHARDS), max_size=12).map("".join), PLACES)
def test_any_pieces_of_any_text_are_the_whole(form, text, places):
    whole = read_tools([text], TOOL_PARSERS[form](FUNCTIONS))
    assert read_tools(cut(text, places), TOOL_PARSERS[form](FUNCTIONS)) == whole
    assert read_tools(list(text), TOOL_PARSERS[form](FUNCTIONS)) == whole
    if "deepseek" not in form and "python" not in text and not whole[1]:  # whose tags around calls are in no part
        assert "".join(whole[0].split()) == "".join(text.split())


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("llama3_json", 'See {"name": "f", "parameters": {}}', 'See {"name": "f", "parameters": {}}', []),
        ("llama3_json", '{"a": 1} {"name": "f"}', '{"a": 1} {"name": "f"}', []),
        ("llama3_json", "Plain.", "Plain.", []),
        ("deepseek_v3", f"{BB}{B}function{SEP}f\n```json\n{{\"a\": 1", "", [("f", '{"a": 1')]),
        ("deepseek_v31", f"{BB}{B}f{SEP}{E}{EE}", "", [("f", "{}")]),
        ("deepseek_v31", f"a {B} b", f"a {B} b", []),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
        ("qwen3_coder", "<tool_call><function=f><parameter=count>True</parameter></tool_call> x", "x",
         [("f", '{"count": true}')]),
        ("qwen3_coder", "<tool_call><function=f><parameter=text>\n1\n</parameter>", "", [("f", '{"text": "1"')]),
        ("qwen3_coder", "<tool_call><function=g><parameter=x>1</parameter></function>", "", [("g", '{"x": "1"}')]),
        ("qwen3_coder", "<tool_call> b", "<tool_call> b", []),
    ],
)  # fmt: skip
def test_odd_answers(form, text, content, calls):
    assert read_tools([text], TOOL_PARSERS[form](FUNCTIONS))[:2] == (content, calls)
    assert read_tools(list(text), TOOL_PARSERS[form](FUNCTIONS))[:2] == (content, calls)


def test_thoughts_without_a_first_tag():
    for text in ("It is 4.\n</think>\nFour.", "<think>It is 4.</think>Four."):
        parser = DeepSeekR1()
        parts = [parser.feed(piece) for piece in text] + [parser.finish()]
        assert "".join(part.reasoning for part in parts) == "It is 4."
        assert "".join(part.content for part in parts) == "Four."
    assert {"qwen3", "deepseek_r1", "deepseek_v3"} == REASONING_PARSERS.keys()


# ---- over HTTP


@pytest.mark.parametrize(
    "form", ["qwen3_coder", "llama3_json", "deepseek_v31", pytest.param("deepseek_v3", marks=pytest.mark.slow)]
)
def test_forced_calls_and_written_ones(new_client, form):
    client = new_client(parsers=Parsers(TOOL_PARSERS[form], REASONING_PARSERS["deepseek_r1"]))
    body = {"tools": [WEATHER, ADD], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    for choice in ask(client, **body, n=2):
        assert choice["finish_reason"] == "tool_calls"
        check_calls(choice["message"], SCHEMAS)
    text = SPELLED[form]([("add", {"a": 1})])
    scripted = {"tools": [ADD], "structured_outputs": {"grammar": f"start: {json.dumps(text, ensure_ascii=False)}"}}
    (choice,) = ask(client, **scripted, max_tokens=500)
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [json.loads(call["arguments"]) for call in calls] == [{"a": 1}]
    messages, _ = add_up(
        client.events(CHAT, messages=[{"role": "user", "content": "What?"}], max_tokens=500, **scripted)
    )
    assert [call["function"] for call in messages[0]["tool_calls"]] == calls


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("form", sorted(SPELLED))
def test_an_answer_that_stops_within_a_call_has_not_called(form, choice):
    """A stop string may cut the text anywhere. Oracle: whether `json` reads the arguments of each call that is told."""
    parsers = Parsers(TOOL_PARSERS[form])
    forced = "hermes" if choice == "required" and parsers.tools.spelling is None else form
    text = SPELLED[forced]([("get_weather", {"city": "Oslo"}), ("add", {"a": [1, {}]})])
    for is_parallel in (True, False):
        body = ChatCompletionRequest.model_validate(
            {"messages": [{"role": "user", "content": "?"}], "tools": [WEATHER, ADD], "tool_choice": choice,
             "parallel_tool_calls": is_parallel}
        )  # fmt: skip
        reasons = set()
        for end in range(len(text) + 1):
            answer = Answer(body, "", parsers)
            message = merge(answer.feed(text[:end], is_last=True))
            calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
            is_whole = bool(calls) and all(map(is_json, calls)) and not (choice == "required" and message["content"])
            reasons.add(answer.finish_reason("stop"))
            assert answer.finish_reason("stop") == ("tool_calls" if is_whole else "stop"), text[:end]
            assert answer.is_cut_off == (not is_whole if choice == "required" else bool(calls) and not is_whole)
            assert answer.finish_reason("length") == "length"
        assert reasons == {"stop", "tool_calls"}


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
