"""Calls as models of several families write them, whatever the pieces of the text are.

The oracle is how the text was made: each family's spelling is written here a second time, from its chat template.
"""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parsers import PLACES, cut, read_tools
from test_structured import ADD, CHAT, SCHEMAS, WEATHER, add_up, ask, check_calls
from transformers.utils.chat_parsing import parse_response

from nanovllm_extras.answer_parts.events import CallArguments
from nanovllm_extras.answer_parts.reasoning import DeepSeekR1, Gemma4Reasoning, ReasoningParser, find_call
from nanovllm_extras.answer_parts.token_bytes import TokenBytes
from nanovllm_extras.options import all_options
from nanovllm_extras.serve.answer import Answer, merge
from nanovllm_extras.serve.messages.protocol import ChatCompletionRequest, Function
from nanovllm_extras.serve.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS, Parsers
from tests.conftest import every_second, examples

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


def gemma(calls):
    def value(one):
        if isinstance(one, str):
            return f'<|"|>{one}<|"|>'
        if isinstance(one, dict):
            return "{" + ",".join(f"{key}:{value(each)}" for key, each in one.items()) + "}"
        return "[" + ",".join(map(value, one)) + "]" if isinstance(one, list) else json.dumps(one)

    return "".join(f"<|tool_call>call:{name}{value(arguments)}<tool_call|>" for name, arguments in calls)


SPELLED = {
    "hermes": hermes,
    "qwen3_coder": qwen,
    "llama3_json": llama,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "gemma4": gemma,
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


@pytest.mark.parametrize("form", SPELLED)
@pytest.mark.examples
@settings(max_examples=examples(56), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), ARGUMENTS), min_size=1, max_size=3), PLACES)
def test_calls_come_out_as_they_went_in(form, calls, places):
    text = SPELLED[form](calls)
    # a parameter's own newlines next to a tag cannot be told from the form's
    before = "" if form.startswith("llama") else "Let me see. "
    content, found, _ = read_tools(cut(before + text, places), TOOL_PARSERS[form](FUNCTIONS))
    assert content == before.strip()
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


SHARDS = ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=text>", "</parameter>"]
SHARDS += [B, E, BB, EE, SEP, "function", "```json\n", "\n```", "f", "{", "}", ";", " ", "\n"]
SHARDS += ['{"name": "f", "parameters": {"a": 1}}', "<|python_tag|>", "<|python", "<", ">", '"', "a"]
SHARDS += ['{"name": "f", "arguments": {"a": [1, "}"]}}', '{"name": "g"', "</", "tool_call>", "\\", ":", "12", "é"]
SHARDS += ["<|tool_call>", "<tool_call|>", '<|"|>', "call:f{", "a:", ",", "[", "]", "null", "1.5"]


@pytest.mark.parametrize("form", SPELLED)
@pytest.mark.examples
@settings(max_examples=examples(160), deadline=None)
@given(st.lists(st.sampled_from(SHARDS), max_size=12).map("".join), PLACES)
def test_any_pieces_of_any_text_are_the_whole(form, text, places):
    whole = read_tools([text], TOOL_PARSERS[form](FUNCTIONS))
    assert read_tools(cut(text, places), TOOL_PARSERS[form](FUNCTIONS)) == whole
    assert read_tools(list(text), TOOL_PARSERS[form](FUNCTIONS)) == whole
    if "deepseek" not in form and "python" not in text and not whole[1]:  # whose tags around calls are in no part
        assert "".join(whole[0].split()) == "".join(text.split())


ODD = [  # (the form, the answer, its content, its calls)
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("llama3_json", 'See {"name": "f", "parameters": {}}', 'See {"name": "f", "parameters": {}}', []),
        ("llama3_json", '{"a": 1} {"name": "f"}', '{"a": 1} {"name": "f"}', []),
        ("llama3_json", "Plain.", "Plain.", []),
        ("deepseek_v3", f"{BB}{B}function{SEP}f\n```json\n{{\"a\": 1", "", [("f", '{"a": 1')]),
        ("deepseek_v31", f"{BB}{B}f{SEP}{E}{EE}", "", [("f", "{}")]),
        ("deepseek_v31", f"a {B} b", f"a {B} b", []),
        ("deepseek_v31", f"{B}f{SEP} \n{E}", "", [("f", "{}")]),
        ("deepseek_v3", f"{B}function{SEP}f\n```json\n \n```{E}", "", [("f", "{}")]),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
        ("qwen3_coder", "<tool_call><function=f><parameter=count>True</parameter></tool_call> x", "x",
         [("f", '{"count": true}')]),
        ("qwen3_coder", "<tool_call><function=f><parameter=text>\n1\n</parameter>", "", [("f", '{"text": "1"')]),
        ("qwen3_coder", "<tool_call><function=g><parameter=x>1</parameter></function>", "", [("g", '{"x": "1"}')]),
        ("qwen3_coder", "<tool_call> b", "<tool_call> b", []),
        ("qwen3_coder", "<tool_call><function=f><parameter=text>\nx</function>\n</function>\n</tool_call> Done.",
         "Done.", [("f", '{"text": "x</function>"}')]),  # no </parameter>
        ("qwen3_coder", "<tool_call><function=f><parameter=size>1e999</parameter><parameter=items>[-1e999]</parameter>"
         "<parameter=more>{}</parameter></function></tool_call>", "",
         [("f", '{"size": "1e999", "items": "[-1e999]", "more": {}}')]),  # JSON has no infinity
        ("gemma4", "<|tool_call>call:f{}<tool_call|>", "", [("f", "{}")]),
        ("gemma4", "<|tool_call>call: f {a:1,b:<|\"|>}<x<|\"|>}<tool_call|>y", "y", [("f", '{"a": 1, "b": "}<x"}')]),
        ("gemma4", '<|tool_call>call:f{a:[<|"|>x<tool_call|> y <|"|>', 'y <|"|>', [("f", '{"a": ["x"]}')]),  # no quote
        ("gemma4", '<|tool_call>call:f{<|"|>x<tool_call|><|tool_call>call:g{a:<|"|>}<tool_call|>', "",
         [("f", "{}"), ("g", '{"a": "}"}')]),
        ("gemma4", "<|tool_call>call:f{a:1,b:[true,{c:None", "", [("f", '{"a": 1, "b": [true, {')]),  # cut off
        ("gemma4", "<|tool_call>call:f{a:{b:[1<tool_call|> x", "x", [("f", '{"a": {"b": [1]}}')]),  # no brackets
        ("gemma4", "<|tool_call>call:f{a:Oslo b,c:,d,e:01,f:10:30,g:NaN}", "",
         [("f", '{"a": "Oslo b", "c": null, "e": "01", "f": "10:30", "g": "NaN"}')]),  # no quotes, no value, no key
        ("gemma4", '<|tool_call>call:f{<|"|>a:b<|"|>:<|"|>"\\\n<|"|>}', "", [("f", json.dumps({"a:b": '"\\\n'}))]),
        ("gemma4", "<|tool_call>call:f<tool_call|>", "<|tool_call>call:f<tool_call|>", []),
        ("gemma4", "a <|tool_call> b", "a <|tool_call> b", []),
]  # fmt: skip


def test_odd_answers():
    for form, text, *wanted in ODD:
        for pieces in ([text], list(text)):
            assert list(read_tools(pieces, TOOL_PARSERS[form](FUNCTIONS))[:2]) == wanted, (form, text)


def test_many_calls_at_once_take_time_in_proportion():
    """Without a stream, a parser gets the whole answer at once. All of this takes 0.1 s."""
    start = time.thread_time()
    parser = TOOL_PARSERS["deepseek_v31"](FUNCTIONS)
    arguments = [one.text for one in parser.feed(deepseek_v31([("f", {})] * 10_000)) if isinstance(one, CallArguments)]
    assert (parser.num_calls, "".join(arguments)) == (10_000, "{}" * 10_000)
    text = "<tool_call> " * 100_000
    assert find_call(text, ("<tool_call>", "<function=")) == (len(text) - len("<tool_call> "), False)
    assert time.thread_time() - start < 3


def test_thoughts_without_a_first_tag():
    for text in ("It is 4.\n</think>\nFour.", "<think>It is 4.</think>Four."):
        parser = DeepSeekR1()
        parts = [parser.feed(piece) for piece in text] + [parser.finish()]
        assert "".join(part.reasoning for part in parts) == "It is 4."
        assert "".join(part.content for part in parts) == "Four."
    assert (TOOL_PARSERS["qwen3_xml"], TOOL_PARSERS["llama4_json"]) == (
        TOOL_PARSERS["qwen3_coder"], TOOL_PARSERS["llama3_json"],
    )  # fmt: skip
    assert {"qwen3", "deepseek_r1", "deepseek_v3", "gemma4", "openai_gptoss"} == REASONING_PARSERS.keys()
    assert set(all_options.REASONING_PARSERS) == REASONING_PARSERS.keys()


# ---- reasoning of Gemma 4, and calls within reasoning

GEMMA_SHARDS = ["<|channel>", "<channel|>", "thought", "\n", " ", "a", "<", "tho", "ful", "<|tool_call>", "call:"]
CALL_OF_GEMMA = ("<|tool_call>", "call:")


def read_parts(parser, pieces):
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.examples
@settings(max_examples=examples(480), deadline=None)
@given(st.lists(st.sampled_from(GEMMA_SHARDS), max_size=9).map("".join), PLACES, st.booleans())
def test_any_pieces_of_any_text_give_the_thoughts_of_gemma(text, places, starts_inside):
    whole = read_parts(Gemma4Reasoning(starts_inside, CALL_OF_GEMMA), [text])
    assert read_parts(Gemma4Reasoning(starts_inside, CALL_OF_GEMMA), cut(text, places)) == whole
    assert read_parts(Gemma4Reasoning(starts_inside, CALL_OF_GEMMA), list(text)) == whole
    # the model: expressions on the whole text
    found = re.match(r"\s*<\|channel>(.*)" if not starts_inside else r"(?:\s*<\|channel>)?(.*)", text, re.DOTALL)
    if found is None:
        assert whole == ("", text)
        return
    inside = re.sub(r"^thought(?=\n|<channel\|>|\Z)", "", found[1].lstrip())
    end = re.search(r"<channel\|>|(?=<\|tool_call>\s*call:)", inside)
    reasoning, content = (inside, "") if end is None else (inside[: end.start()], inside[end.end() :])
    assert whole == (reasoning.strip(), content.lstrip())


def test_prompts_of_gemma():
    for prompt, is_open in (
        ("<|turn>user\nHi<turn|>\n<|turn>model\n", False),  # enable_thinking: the model opens the channel
        ("<|turn>model\n<|channel>thought\n<channel|>", False),  # the template has closed it
        ("<|turn>model\n<|channel>thought\n", True),
        ("<|turn>model\n<|channel>", True),
        ("a thought\n", False),
    ):
        assert Gemma4Reasoning.is_open(prompt) == is_open, prompt
    assert ReasoningParser.is_open("<|im_start|>assistant\n<think>\n")
    assert not ReasoningParser.is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_tags_that_are_special_tokens_stay_in_the_text():
    question = {"messages": [{"role": "user", "content": "?"}]}
    plain, with_tools = (ChatCompletionRequest.model_validate(question | one) for one in ({}, {"tools": [ADD]}))
    for tools, reasoning, kept in (
        ("gemma4", "gemma4", [True, True]),
        ("gemma4", "qwen3", [False, True]),
        ("qwen3_coder", "qwen3", [False, False]),
    ):
        parsers = Parsers(TOOL_PARSERS[tools], REASONING_PARSERS[reasoning])
        assert [parsers.keeps_special_tokens(plain), parsers.keeps_special_tokens(with_tools)] == kept


THOUGHT = "I must call <tool_call> now.\n"


@pytest.mark.parametrize(("closes", "has_tools"), [(True, True), (False, True), (False, False)])
def test_a_call_within_the_reasoning_of_qwen(closes, has_tools):
    """Qwen3.5's template opens the reasoning, and the model may not close it before a call."""
    call = qwen([("add", {"a": 1})])
    text = THOUGHT + ("</think>\n\n" if closes else "") + call
    fields = {"messages": [{"role": "user", "content": "?"}], **({"tools": [ADD]} if has_tools else {})}
    body, parsers = ChatCompletionRequest.model_validate(fields), Parsers(TOOL_PARSERS["qwen3_coder"])
    for pieces in ([text], list(text), [text[:40], text[40:]]):
        prompt = {"prompt": "<|im_start|>assistant\n<think>\n", "prompt_token_ids": []}
        answer = Answer(body, prompt, parsers, TokenBytes(None))
        fed = [answer.feed(piece, [], i == len(pieces) - 1) for i, piece in enumerate(pieces)]
        message = merge([delta for deltas in fed for delta in deltas])
        if has_tools:
            assert [one["function"]["arguments"] for one in message["tool_calls"]] == ['{"a": 1}']
            assert message["reasoning"] == THOUGHT.strip()
        else:
            assert message["reasoning"] == (THOUGHT.strip() if closes else text)
            assert message["content"] == (call if closes else "")


# what transformers' parser needs to know of Gemma's format
RESPONSE = {
    "start_anchor": "<|turn>model\n",
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"name": "{name}", "arguments": "{content}"},
        },
        "content": {"close": "<turn|>"},
    },
}


@pytest.mark.examples
@settings(max_examples=examples(96), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), ARGUMENTS), max_size=3), PLACES, st.booleans())
def test_the_parser_of_transformers_agrees_on_gemma(calls, places, thinks):
    text = ("<|channel>thought\nI look.<channel|>" if thinks else "") + gemma(calls) + ("" if calls else "Plain.")
    expected = parse_response(text, RESPONSE, prefix="<|turn>model\n")
    parser, tools = Gemma4Reasoning(), TOOL_PARSERS["gemma4"](FUNCTIONS)
    reasoning, rest = read_parts(parser, cut(text, places))
    content, found, _ = read_tools(cut(rest, places), tools)
    assert (reasoning, content) == (expected.get("thinking", ""), expected.get("content", ""))
    told = [{"name": name, "arguments": json.loads(arguments)} for name, arguments in found]
    assert told == expected.get("tool_calls", [])


# ---- over HTTP


@pytest.mark.parametrize("form", every_second(["qwen3_coder", "deepseek_v3", "gemma4"]))
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
@pytest.mark.parametrize("form", SPELLED)
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
            answer = Answer(body, {"prompt": "", "prompt_token_ids": []}, parsers, TokenBytes(None))
            message = merge(answer.feed(text[:end], [], is_last=True))
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
