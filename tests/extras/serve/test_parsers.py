"""Answers in parts: whatever the pieces of a text are, its parts are those of the whole text.

The oracle of the whole is how the text was made: of contents and calls, of thoughts and an answer.
"""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_extras.answer_parts.reasoning import ReasoningParser
from nanovllm_extras.serve.parsers.hermes import Hermes
from nanovllm_extras.serve.parsers.tool_parser import CallArguments, CallStart, Content
from tests.conftest import examples


def read_tools(pieces, parser=None):
    """(content, [(name, arguments)], in which order they came)"""
    parser = parser or Hermes()
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    content, names, arguments, order = "", [], {}, []
    for event in events:
        if isinstance(event, Content):
            assert event.text
            content += event.text
            order += ["text"] if order[-1:] != ["text"] else []
        elif isinstance(event, CallStart):
            assert event.index == len(names)
            names.append(event.name)
            arguments[event.index] = ""
            order.append("call")
        else:
            assert isinstance(event, CallArguments)
            assert event.index == len(names) - 1
            arguments[event.index] += event.text
    assert parser.num_calls == len(names)
    return content, [(name, arguments[i]) for i, name in enumerate(names)], order


def read_reasoning(pieces, starts_inside=False):
    parser = ReasoningParser(starts_inside)
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


def cut(text, places):
    """`text` in pieces, some of which may be empty."""
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


PLACES = st.lists(st.integers(0, 10**6), max_size=12)
# what tags are made of, and what surrounds them
SHARDS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<", "</", "tool_call>", "think>", " ", "\n", "a", "é"]
SHARDS += ['{"name": "f", "arguments": {"a": [1, "}"]}}', '{"name": "g"', "{", "}", '"', "\\", ":", ",", "[", "]", "12"]
NOISE = st.lists(st.sampled_from(SHARDS), max_size=14).map("".join)


@pytest.mark.examples
@settings(max_examples=examples(480), deadline=None)
@given(NOISE, PLACES, st.booleans())
def test_any_pieces_of_any_text_give_the_thoughts_of_the_whole(text, places, starts_inside):
    whole = read_reasoning([text], starts_inside)
    assert read_reasoning(cut(text, places), starts_inside) == whole
    assert read_reasoning(list(text), starts_inside) == whole
    # the model: what an expression says of the whole text
    pattern = r"\s*<think>(.*?)(?:</think>(.*))?$" if not starts_inside else r"(?:\s*<think>)?(.*?)(?:</think>(.*))?$"
    found = re.match(pattern, text, re.DOTALL)
    expected = (found[1].strip(), (found[2] or "").lstrip()) if found else ("", text)
    assert whole == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab<>/{}[]"\\\n é', max_size=8) | st.just("</tool_call>"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"}', max_size=3), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.fixed_dictionaries(
    {
        "name": st.text("abc_\"é}", min_size=1, max_size=6),
        "arguments": st.dictionaries(st.text("ab\"}", max_size=4), JSON, max_size=3),
        "comes_first": st.booleans(),
        "indent": st.sampled_from([None, 0, 2]),
        "ascii": st.booleans(),
        "key": st.sampled_from(["arguments", "parameters"]),
        "as_text": st.booleans(),
        "extra": st.booleans(),
    }
)  # fmt: skip
TEXTS = st.text("ab <>\né", max_size=8).map(str.strip).filter(lambda text: text and not text.endswith("<"))


def spell(call):
    spelled = json.dumps(call["arguments"], indent=call["indent"], ensure_ascii=call["ascii"])
    arguments = json.dumps(spelled) if call["as_text"] else spelled
    members = [f'"name": {json.dumps(call["name"])}', f'"{call["key"]}" : {arguments}']
    members += ['"id":12.5e3'] if call["extra"] else []
    members = members[::-1] if call["comes_first"] else members
    return "<tool_call>\n{" + " ,\n".join(members) + " }\n</tool_call>", spelled


@pytest.mark.examples
@settings(max_examples=examples(240), deadline=None)
@given(st.lists(st.one_of(TEXTS, CALLS), max_size=5), PLACES, st.sampled_from(["", "\n", " \n "]))
def test_calls_and_contents_come_out_as_they_went_in(parts, places, gap):
    merged = []  # two contents side by side are one
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    text = gap.join(part if isinstance(part, str) else spell(part)[0] for part in merged)
    content, calls, order = read_tools(cut(text, places))
    assert content == "".join(part for part in merged if isinstance(part, str))
    wanted = [part for part in merged if not isinstance(part, str)]
    assert [name for name, _ in calls] == [call["name"] for call in wanted]
    assert [arguments for _, arguments in calls] == [spell(call)[1] for call in wanted], "in the model's own spelling"
    assert [json.loads(arguments) for _, arguments in calls] == [call["arguments"] for call in wanted]
    assert order == ["text" if isinstance(part, str) else "call" for part in merged]


def test_arguments_come_as_they_are_written():
    parser = Hermes()
    assert parser.feed('See: <tool_call>{"name": "f", "argu') == [Content("See:"), CallStart(0, "f")]
    assert parser.feed('ments": {"city": "Os') == [CallArguments(0, '{"city": "Os')]
    assert parser.feed('lo"}') == [CallArguments(0, 'lo"}')]
    assert parser.feed("}\n</tool_") == []
    assert parser.feed("call>\n") == []
    assert parser.finish() == []


ODD = [  # (the answer, its content, its calls)
    ("a <tool_call> b", "a <tool_call> b", []),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ('<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),  # cut off by max_tokens
    ('<tool_call>{"name": "f"', "", [("f", "")]),
    ('<tool_call>{"na', '<tool_call>{"na', []),
    ("x <tool_ca", "x <tool_ca", []),
    ('<tool_call>{"name": "f"} <tool_call>{"name": "g"} y', "y", [("f", "{}"), ("g", "{}")]),  # no closing tags
]


def test_what_is_no_call_is_text_and_what_is_cut_off_stays():
    for text, content, calls in ODD:
        assert read_tools([text])[:2] == (content, calls), text


def test_long_answers_take_time_in_proportion():
    """Arguments of 60,000 characters in pieces of 4; and tags that never become calls. Together they take 0.1 s."""
    start = time.thread_time()
    long = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 60_000 + '"}}</tool_call>'
    _, calls, _ = read_tools([long[i : i + 4] for i in range(0, len(long), 4)])
    assert len(calls[0][1]) > 60_000
    assert read_tools(["<tool_call>" * 10_000])[1] == []
    assert time.thread_time() - start < 5
