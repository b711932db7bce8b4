"""Streams of random requests, folded together as a client folds them, are the whole answers.

The oracle is the answer of the same request without a stream: text, reasoning, calls, log-probabilities, token ids,
the reason of the end and the usage. `add_up` of each protocol's own test reads its events.

Seen to fail when broken: log-probabilities of a response that depend on how many tokens each output adds, `end_turn`
instead of `stop_sequence` in a stream of messages, and the usage of such a stream, or of a chat's.
"""

import json
import math
import random
from collections import Counter

import pytest
from test_messages_route import ADD_TOOL, WEATHER_TOOL
from test_messages_route import add_up as blocks_of
from test_responses import FLAT_ADD, FLAT_WEATHER, NAMESPACES, TEXT_FORMAT
from test_responses import add_up as items_of
from test_structured import ADD, CALL, FORMAT, SCHEMA, WEATHER
from test_structured import add_up as choices_of

from nanovllm_extras.serve.routes.messages_blocks import SIGNATURE
from tests.extras.serve.conftest import named_events

OFTEN = ("/v1/messages", "/v1/responses")
PATHS = (*OFTEN, *OFTEN, "/v1/chat/completions", "/v1/completions")
QUESTIONS = ("What?", "Add 1 and 2.", "Grüße, 世界 🙂", "x" * 30)
PARTS = ("Yes.", "\n", "Grüße 🙂", "<think>", "</think>", "<tool_call>", "{", "世界", "a < b", " and so on, and so on")
DEEP_CALL = CALL.replace('{"a": 1}', '{"a": 1, "b": [1, {"c": "ü \\" }"}], "d": 2.5}')
CALLS = (CALL, DEEP_CALL, CALL.replace("add", "no_such"))


class Case:
    """A random request. fields: those of its route, without `stream`."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.path = PATHS[seed % len(PATHS)]
        self.kind = self.path.rpartition("/")[2] if self.path != "/v1/chat/completions" else "chat"
        self.text = self.script() if self.chance.random() < 0.6 else ""
        self.sampling = self._sampling()
        self.fields = self.sampling | getattr(self, f"_{self.kind}")()
        if self.kind == "responses":
            self.fields["max_output_tokens"] = self.fields.pop("max_tokens")

    def maybe(self, probability=0.5, **fields):
        return fields if self.chance.random() < probability else {}

    def script(self):
        """What a model may write: reasoning, text, calls, and parts of their tags."""
        thought = "".join(self.chance.choices(PARTS[:3], k=self.chance.randint(0, 3)))
        text = f"<think>\n{thought}\n</think>\n\n" if self.chance.random() < 0.4 else ""
        for _ in range(self.chance.randint(1, 3)):
            text += self.chance.choice(CALLS) if self.chance.random() < 0.4 else self.chance.choice(PARTS)
        return text

    def _sampling(self):
        chance, length = self.chance, len(self.text.encode())
        most = chance.randint(1, length + 20) if length and chance.random() < 0.3 else length + 20 if length else 16
        fields = {"max_tokens": most, "seed": chance.randrange(1000), "temperature": chance.choice([0, 0.7, 1.5])}
        if self.text:
            fields["structured_outputs"] = {"grammar": f"start: {json.dumps(self.text)}"}
        else:
            fields |= self.maybe(top_k=chance.randint(1, 50)) | self.maybe(top_p=0.9) | self.maybe(0.2, min_p=0.05)
            fields |= self.maybe(ignore_eos=True) | self.maybe(0.2, repetition_penalty=1.2)
        return fields

    def samples(self):
        return self.maybe(n=2) if self.sampling["temperature"] else {}

    def stops(self):
        """Stop strings, some of which end the text."""
        strings, text = self.chance.choices("abcdeé{<", k=2), self.text
        if text:
            start = self.chance.randrange(len(text))
            strings.append(text[start : start + self.chance.randint(1, 4)])
        return [one for one in strings if one.strip()]

    def tools(self, one, other, **forced):
        """Tools and their choice; those that force a call only without a script. forced: choice -> its JSON."""
        if self.chance.random() < 0.3:
            return {}
        tools = {"tools": self.chance.choice([[one], [one, other]])}
        if self.text:
            return tools
        choice = forced[self.chance.choice(sorted(forced))]
        return tools | self.maybe(0.5, tool_choice=choice, max_tokens=80)

    def _chat(self):
        named = {"type": "function", "function": {"name": "add"}}
        fields = {"messages": self._conversation(), **self.samples()}
        fields |= self.tools(ADD, WEATHER, any="required", auto="auto", none="none", named=named)
        fields |= self.maybe(stop=self.stops()) | self.maybe(return_token_ids=True)
        fields |= self.maybe(0.3, logprobs=True, top_logprobs=self.chance.randint(0, 3))
        if not self.text and "tool_choice" not in fields:
            fields |= self.maybe(0.2, response_format=FORMAT, max_tokens=80)
        return fields | self.maybe(0.2, parallel_tool_calls=False)

    def _completions(self):
        prompts = self.chance.sample(QUESTIONS, k=self.chance.randint(1, 2))
        fields = {"prompt": prompts, **self.samples(), **self.maybe(stop=self.stops())}
        fields |= self.maybe(logprobs=self.chance.randint(0, 3)) | self.maybe(echo=True)
        return fields | self.maybe(return_token_ids=True)

    def _conversation(self):
        messages = [{"role": "user", "content": self.chance.choice(QUESTIONS)}]
        return messages + [{"role": "assistant", "content": "Why?"}, *messages] * (self.chance.random() < 0.3)

    def _messages(self):
        named = {"type": "tool", "name": "add"}
        single = {"type": self.chance.choice(["any", "auto"]), "disable_parallel_tool_use": True}
        fields = {"messages": self._conversation(), **self.maybe(system="Be brief.")}
        fields |= self.maybe(stop_sequences=self.stops())
        choices = {"any": {"type": "any"}, "none": {"type": "none"}, "named": named, "single": single}
        fields |= self.tools(ADD_TOOL, WEATHER_TOOL, **choices)
        thinking = [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}]
        fields |= self.maybe(thinking=self.chance.choice(thinking))
        if not self.text and "tool_choice" not in fields:
            schema = {"format": {"type": "json_schema", "schema": SCHEMA}}
            fields |= self.maybe(0.2, output_config=schema, max_tokens=80)
        return fields

    def _responses(self):
        named = {"type": "function", "name": "add"}
        conversation = self._conversation()
        fields = {"input": conversation if len(conversation) > 1 else conversation[0]["content"]}
        fields |= self.maybe(instructions="Be brief.") | self.maybe(store=False) | self.maybe(0.3, stop=self.stops())
        fields |= self.maybe(0.3, include=["message.output_text.logprobs"], top_logprobs=self.chance.randint(0, 3))
        fields |= self.maybe(0.2, truncation="auto") | self.maybe(0.2, metadata={"a": "b"})
        fields |= self.tools(FLAT_ADD, FLAT_WEATHER, any="required", none="none", named=named, auto="auto")
        if self.text and "tools" in fields:
            fields |= self.maybe(0.2, tools=NAMESPACES) | self.maybe(0.2, parallel_tool_calls=False)
        if not self.text and "tool_choice" not in fields:
            fields |= self.maybe(0.2, text=TEXT_FORMAT, max_tokens=80)
        return fields


# ---- the whole and the folded answer of each protocol, in one form


def read_messages(case, whole, events):
    start, *inner, delta, stop = [event for event in events if event["type"] != "ping"]
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    assert start["message"]["usage"]["input_tokens"] == delta["usage"]["input_tokens"]
    folded = start["message"] | {"content": blocks_of(inner)} | delta["delta"] | {"usage": delta["usage"]}
    for block in folded["content"]:
        if block["type"] == "tool_use":
            block["input"] = read_complete(block["input"])
    assert {block["signature"] for block in whole["content"] if block["type"] == "thinking"} <= {SIGNATURE}
    for answer in (whole, folded):
        answer["content"] = without(answer["content"], "id")
    return without([whole, folded], "id")


def read_complete(text):
    """The arguments of a call that are complete: the longest beginning that is JSON when its brackets are closed."""
    for stop in range(len(text), 0, -1):
        for closing in ("", "}", "]}", "}]}"):
            try:
                return json.loads(text[:stop].rstrip(", ") + closing)
            except ValueError:
                continue
    return {}


def read_responses(case, whole, events):
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    folded = events[-1]["response"]
    assert events[-1]["type"] == "response." + folded["status"]
    assert items_of(events) == folded["output"]
    for answer in (whole, folded):
        assert (answer["completed_at"] is None) == (answer["status"] != "completed")
        answer["output"] = without(answer["output"], "id", "call_id")
    return without([whole, folded], "id", "created_at", "completed_at")


def read_choices(case, whole, events):
    """Chats and completions: each field of a choice that grows is a text or a list."""
    *chunks, last = events
    assert last["choices"] == []
    folded = {"usage": last["usage"], "choices": []}
    messages = choices_of(chunks)[0] if case.kind == "chat" else {}
    for i in range(len(whole["choices"])):
        folded["choices"].append({"index": i} | ({"message": messages[i]} if messages else {}))
    for chunk in chunks:
        counts = chunk["usage"]["completion_tokens"]
        assert counts <= last["usage"]["completion_tokens"]
        for part in chunk["choices"]:
            grow(folded["choices"][part["index"]], {name: part[name] for name in part.keys() - {"index", "delta"}})
        if "prompt_token_ids" in chunk:
            folded["prompt_token_ids"] = chunk["prompt_token_ids"]
    whole = {name: whole[name] for name in folded}
    for choice in [*whole["choices"], *folded["choices"]] if case.kind == "chat" else []:
        message = choice["message"]
        message["role"], message["content"] = "assistant", message["content"] or None
        if "tool_calls" in message:
            message["tool_calls"] = without(message["tool_calls"], "id")
    return [whole, folded]


def grow(value, new):
    for name, part in new.items():
        old = value.get(name)
        if isinstance(old, dict) and part is not None:
            grow(old, part)
        elif old is None or name == "index":
            value[name] = part
        elif part is not None:
            value[name] = old + part


def without(values, *names):
    return [{key: value for key, value in one.items() if key not in names} for one in values]


def are_same(value, other):
    """Log-probabilities may differ by rounding: two prompts may be computed in one step or in two."""
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-3, abs_tol=1e-3)
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(are_same(value[name], other[name]) for name in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(are_same, value, other))
    return value == other


READERS = {"messages": read_messages, "responses": read_responses, "chat": read_choices, "completions": read_choices}


def compare(client, seed):
    """Ask for a random answer, whole and as a stream, and return what kind of answer it was."""
    case = Case(seed)
    fields = {"cache_salt": f"salt {seed}"} | case.fields
    is_cached = case.chance.random() < 0.2
    if is_cached:  # from now on both requests have the same hits, and compute the same chunk
        client.ask(case.path, **fields)
    whole = client.ask(case.path, **fields)
    fields |= {"stream": True} | ({} if is_cached else {"cache_salt": f"salt {seed} of the stream"})
    if case.path in OFTEN:
        events = named_events(client.post(case.path, fields))
    else:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = client.events(case.path, **fields, stream_options=options)
    if case.kind == "responses":
        stored = client.get(f"{case.path}/{whole['id']}")
        assert (stored.json() == whole) if whole["store"] else (stored.status_code == 404)
    told, folded = READERS[case.kind](case, whole, events)
    assert are_same(folded, told), (seed, fields, folded, told)
    kinds = [one["type"] for one in told.get("content", told.get("output", []))]
    return case.path, str(told.get("stop_reason") or told.get("status")), *sorted({*kinds, "cached" * is_cached} - {""})


def test_a_few_streams_are_the_whole_answers(client):
    for seed in range(20):
        compare(client, seed)


@pytest.mark.slow
def test_500_streams_are_the_whole_answers(client, capsys):
    seen = Counter(compare(client, seed) for seed in range(1000, 1500))
    with capsys.disabled():
        print("\n" + "\n".join(f"{number:4} {' '.join(kind)}" for kind, number in sorted(seen.items())))
    for path, reasons in (
        ("/v1/messages", {"end_turn", "max_tokens", "stop_sequence", "tool_use"}),
        ("/v1/responses", {"completed", "incomplete"}),
    ):
        assert {kind[1] for kind in seen if kind[0] == path} >= reasons
