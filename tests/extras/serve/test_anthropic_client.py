"""`/v1/messages` as the package `anthropic` sees it: its types over every event, its helpers, and its errors.

Oracles: an engine of its own, offline, greedy; how a scripted answer was made; the package's own types.
"""

import asyncio
import json
from typing import Literal

import pytest
from pydantic import BaseModel

from nanovllm_extras import SamplingParams
from nanovllm_extras.serve.routes.messages_blocks import SIGNATURE
from tests.extras.serve.real_server import QUESTIONS, in_thread

pytestmark = pytest.mark.slow  # the import of the package takes as long as all tests of test_messages.py
anthropic = pytest.importorskip("anthropic")

KEY = "a key"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
NUMBER = {"enum": [1, 2]}
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
}


@pytest.fixture(scope="module")
def server(bundled):
    with in_thread(bundled, api_keys=(KEY,)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def options(question=QUESTIONS[1], sampling=(), **more):
    """sampling: fields that the package does not have, from version 2 on also the temperature."""
    messages = [{"role": "user", "content": question}]
    extra = {"temperature": 0, **dict(sampling)}
    return {"model": "tiny-qwen3", "messages": messages, "max_tokens": 60, "extra_body": extra} | more


RANDOM = {"temperature": 1, "seed": 1}


def scripted(text):
    grammar = {"structured_outputs": {"grammar": f"start: {json.dumps(text)}"}}
    return options(sampling=grammar, max_tokens=400, tools=[ADD])


def checked(value):
    """A value of the package, which builds its values unchecked, after a check of all its fields by its type."""
    return type(value).model_validate(value.to_dict())


def test_a_message_is_the_offline_answer_whole_and_streamed(client, offline):
    expected = offline.chat(QUESTIONS[1], max_tokens=60)
    message = client.messages.create(**options())
    assert message._request_id
    (block,) = checked(message).content
    assert block.text == expected.outputs[0].text
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(expected.prompt_token_ids)
    assert usage.output_tokens == len(expected.outputs[0].token_ids)
    asked = {name: one for name, one in options().items() if name in ("model", "messages")}
    assert client.messages.count_tokens(**asked).input_tokens == len(expected.prompt_token_ids)
    with client.messages.stream(**options()) as stream:
        assert "".join(stream.text_stream) == block.text
        final = checked(stream.get_final_message())
    assert ([one.text for one in final.content], final.stop_reason) == ([block.text], message.stop_reason)
    assert final.usage.output_tokens == usage.output_tokens


def test_every_event_has_its_type(client):
    text = "<think>\nHm.\n</think>\n\nSee.\n" + CALL + "\n" + CALL
    events = [checked(event) for event in client.messages.create(**scripted(text), stream=True)]
    types = anthropic.types
    known = (
        types.RawMessageStartEvent,
        types.RawContentBlockStartEvent,
        types.RawContentBlockDeltaEvent,
        types.RawContentBlockStopEvent,
        types.RawMessageDeltaEvent,
        types.RawMessageStopEvent,
    )
    assert {type(event) for event in events} == set(known)
    deltas = {type(event.delta) for event in events if isinstance(event, types.RawContentBlockDeltaEvent)}
    assert deltas == {types.ThinkingDelta, types.SignatureDelta, types.TextDelta, types.InputJSONDelta}
    with client.messages.stream(**scripted(text)) as stream:
        message = checked(stream.get_final_message())
    thought, said, *calls = message.content
    assert (thought.thinking, thought.signature, said.text) == ("Hm.", SIGNATURE, "See.")
    assert [(call.name, call.input) for call in calls] == [("add", {"a": 1, "b": 2})] * 2
    assert message.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "3"} for call in calls]
    turns = [*options()["messages"], message.to_param(), {"role": "user", "content": results}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    again = checked(client.messages.create(**options(messages=turns, tools=[ADD], thinking=thinking)))
    assert again.usage.output_tokens > 0, "what it has said, with its thoughts, can be given back"


def test_a_budget_ends_the_reasoning(client, bundled, offline, monkeypatch):
    tokenizer = bundled.engine.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + "{{ '<think>\\n' }}")
    asked = options(thinking={"type": "enabled", "budget_tokens": 7})
    with client.messages.stream(**asked) as stream:
        thoughts = [event.thinking for event in stream if event.type == "thinking"]
        message = checked(stream.get_final_message())
    thought, text = message.content
    assert "".join(thoughts) == thought.thinking
    prompt = f"<|im_start|>user\n{QUESTIONS[1]}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    plain = SamplingParams(temperature=0, max_tokens=7)
    (first,) = offline.llm.generate([prompt], plain, use_tqdm=False)
    (rest,) = offline.llm.generate(
        [prompt + first.outputs[0].text + "</think>"], SamplingParams(temperature=0, max_tokens=60), use_tqdm=False
    )
    assert thought.thinking == first.outputs[0].text.strip()
    assert text.text
    assert rest.outputs[0].text.lstrip().startswith(text.text)
    again = checked(client.messages.create(**asked))
    assert [block.type for block in again.content] == ["thinking", "text"]
    assert (again.content[0].thinking, again.content[1].text) == (thought.thinking, text.text)


def test_the_tool_runner_goes_three_rounds(client):
    """It first asks the server to store the conversation, and after the refusal sends the whole conversation."""
    sums = []

    @anthropic.beta_tool
    def add(a: Literal[1, 2], b: Literal[1, 2]) -> str:
        """Add two numbers."""
        sums.append(a + b)
        if len(sums) == 2:
            raise ValueError("it is broken")  # becomes a result with `is_error`
        return str(a + b)

    choice = {"type": "any", "disable_parallel_tool_use": True}
    for stream_it in (False, True):
        sums.clear()
        asked = options(sampling=RANDOM, max_tokens=100, tool_choice=choice)
        runner = client.beta.messages.tool_runner(**asked, tools=[add], stream=stream_it)
        reasons = []
        for one in runner:
            message = checked(one.get_final_message() if stream_it else one)
            reasons.append(message.stop_reason)
            if len(reasons) == 3:
                last = {"tool_choice": {"type": "none"}, "max_tokens": 20}
                runner.set_messages_params(lambda params, last=last: {**params, **last})
        assert reasons[:3] == ["tool_use"] * 3
        assert reasons[3:] in (["end_turn"], ["max_tokens"])
        assert len(sums) == 3


class Person(BaseModel):
    """So narrow that a model that has never seen JSON comes to an end."""

    name: Literal["Ann", "Bob"]
    is_old: bool


def test_parse_gives_an_object(client):
    asked = options("Who?", sampling=RANDOM, max_tokens=500)
    assert isinstance(client.messages.parse(**asked, output_format=Person).parsed_output, Person)
    with client.messages.stream(**asked, output_format=Person) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Person)


def test_async_streams_and_a_client_that_leaves(server, offline):
    async def main():
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:

            async def read(question):
                async with client.messages.stream(**options(question)) as stream:
                    return "".join([text async for text in stream.text_stream])

            answers = await asyncio.gather(*map(read, QUESTIONS))
            async with client.messages.stream(**options(max_tokens=1500, sampling={"ignore_eos": True})) as stream:
                async for _ in stream.text_stream:
                    break
            await asyncio.to_thread(server.wait_until_idle, 2)  # by itself the request would take longer than this
            return answers

    assert asyncio.run(main()) == [offline.chat(one, max_tokens=60).outputs[0].text for one in QUESTIONS]


def test_errors_are_the_packages_own(client, server):
    for change, error in (
        ({"sampling": {"temperature": -1}}, anthropic.BadRequestError),
        ({"model": "another"}, anthropic.NotFoundError),
        ({"system": "x" * 17 * 2**20}, anthropic.RequestTooLargeError),
    ):
        with pytest.raises(error) as raised:
            client.messages.create(**options(**change))
        if error is not anthropic.RequestTooLargeError:  # the package has no type for its documented type
            checked(anthropic.types.ErrorResponse.construct(**raised.value.body))
        assert raised.value.request_id == raised.value.body["request_id"]
    with anthropic.Anthropic(base_url=server.url, api_key="another", max_retries=0) as stranger:  # noqa: SIM117
        with pytest.raises(anthropic.AuthenticationError):
            stranger.messages.create(**options())
    old = {"x-api-key": KEY, "Authorization": anthropic.Omit()}  # as versions before 2 send it
    assert client.messages.create(**options(max_tokens=1), extra_headers=old).content
