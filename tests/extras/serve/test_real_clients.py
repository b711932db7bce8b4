"""The server, as the clients see it that people have: `openai`, `langchain-openai`, `schemathesis`.

Oracles: an engine of its own, offline, greedy, for the words of every answer; the clients' own checks of what they get;
the engine's count of free blocks.

Seen to fail when broken: a stream without its last piece; usage missing; an error whose field is not named, or whose
status is another.
"""

import json
from collections import Counter
from typing import Literal

import pytest
from pydantic import BaseModel

from nanovllm_extras import TINY_QWEN3
from nanovllm_extras.serve.async_llm import AsyncLLM
from tests.extras.serve.real_server import QUESTIONS, in_thread

KEY = "a key"


@pytest.fixture(scope="module")
def server(bundled):
    with in_thread(bundled, api_keys=(KEY,)) as server:
        yield server


@pytest.fixture(scope="module")
def openai():
    """The package, whose import takes a second: here, so that only the process that runs these tests imports it."""
    import openai

    return openai


@pytest.fixture(scope="module")
def client(openai, server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    (model,) = client.models.list().data
    return model.id


def chat_options(model, question, **options):
    messages = [{"role": "user", "content": question}]
    return {"model": model, "messages": messages, "temperature": 0, "max_completion_tokens": 60, **options}


# ---- openai


def test_a_chat_is_the_offline_answer_whole_and_streamed(client, model, offline):
    options, expected = chat_options(model, QUESTIONS[1]), offline.chat(QUESTIONS[1], max_tokens=60)
    completion = client.chat.completions.create(**options)
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.outputs[0].text)
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert completion.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert completion.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(piece.delta.content or "" for piece in pieces) == expected.outputs[0].text
    assert pieces[0].delta.role == "assistant"
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [expected.outputs[0].finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1
    told = [chunk.usage for chunk in chunks if chunk.usage]
    assert [usage.completion_tokens for usage in told] == [len(expected.outputs[0].token_ids)]


def test_errors_are_the_clients_own(openai, client, server, model):
    for change, error, param in (
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_completion_tokens": 0}, openai.BadRequestError, "max_completion_tokens"),
        ({"model": "another"}, openai.NotFoundError, "model"),
    ):
        with pytest.raises(error) as raised:
            client.chat.completions.create(**chat_options(model, "a") | change)
        assert raised.value.param == param
        assert raised.value.type
    with openai.OpenAI(base_url=server.url + "/v1", api_key="another", max_retries=0) as stranger:  # noqa: SIM117
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(**chat_options(model, "a"))


# ---- openai: tools and structured output


class Person(BaseModel):
    """So narrow that a model that has never seen JSON comes to an end."""

    name: Literal["Ann", "Bob"]
    is_old: bool


LOOSE = {"temperature": 1, "seed": 1, "max_completion_tokens": 500}  # greedily, the model never ends the white space


def test_parse_gives_an_object_of_a_whole_answer_and_of_a_stream(client, model):
    completion = client.chat.completions.parse(**chat_options(model, "Who?", **LOOSE), response_format=Person)
    assert completion.choices[0].finish_reason == "stop"
    assert isinstance(completion.choices[0].message.parsed, Person)
    with client.chat.completions.stream(**chat_options(model, "Who?", **LOOSE), response_format=Person) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


def test_embeddings_are_the_engines(client, model, offline):
    answer = client.embeddings.create(model=model, input=["The KV cache", "A block table"])
    expected = offline.llm.embed(["The KV cache", "A block table"], use_tqdm=False)
    for one, truth in zip(answer.data, expected, strict=True):
        assert one.embedding == pytest.approx(list(truth.outputs.embedding), abs=1e-4)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def test_a_tool_is_called(client, model):
    options = chat_options(model, "How is the weather?", tools=[WEATHER], tool_choice=NAMED)
    completion = client.chat.completions.create(**options)
    call = completion.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    streamed = {"name": "", "arguments": ""}
    for chunk in client.chat.completions.create(**options, stream=True):
        for piece in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            if piece.index == 0:
                streamed["name"] += piece.function.name or ""
                streamed["arguments"] += piece.function.arguments or ""
    assert streamed == {"name": call.function.name, "arguments": call.function.arguments}


# ---- openai: responses


def response_options(model, question, **options):
    return {"model": model, "input": question, "temperature": 0, "max_output_tokens": 60, **options}


def test_responses_add_up_parse_and_call(client, model, offline):
    loose = {"temperature": 1, "max_output_tokens": 500, "extra_body": {"seed": 1}}
    expected = offline.chat(QUESTIONS[1], max_tokens=200).outputs[0]
    with client.responses.stream(**response_options(model, QUESTIONS[1], max_output_tokens=200)) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == expected.text
    parsed = client.responses.parse(**response_options(model, "Who?", **loose), text_format=Person)
    assert isinstance(parsed.output_parsed, Person)
    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    options = response_options(model, "How is the weather?", tools=[tool], tool_choice="required")
    called = client.responses.create(**options, parallel_tool_calls=False)
    (call,) = called.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    with client.responses.stream(**options, parallel_tool_calls=False) as stream:
        arguments = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == call.arguments


def test_responses_in_the_background_are_polled_and_their_events_read_again(client, model, offline):
    expected = offline.chat(QUESTIONS[1], max_tokens=200).outputs[0].text
    options = response_options(model, QUESTIONS[1], max_output_tokens=200, background=True)
    response = client.responses.create(**options)
    assert response.status == "queued"
    while response.status in ("queued", "in_progress"):
        assert expected.startswith(response.output_text)
        response = client.responses.retrieve(response.id)
    assert (response.output_text, client.responses.cancel(response.id)) == (expected, response)
    with client.responses.create(**options, stream=True) as stream:
        begun = [next(stream) for _ in range(6)]  # then the connection ends
    name, last = begun[0].response.id, begun[-1].sequence_number
    with client.responses.retrieve(name, stream=True, starting_after=last) as stream:
        events = [*begun, *stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert events[-1].response == client.responses.retrieve(name)


# ---- langchain


@pytest.mark.slow  # its import takes as long as all other tests of this file
def test_langchain_invokes_and_streams(server, model, offline):
    import langchain_openai
    from langchain_core.exceptions import ContextOverflowError

    chat = langchain_openai.ChatOpenAI(
        base_url=server.url + "/v1", api_key=KEY, model=model, temperature=0, max_tokens=60
    )
    expected = offline.chat(QUESTIONS[0], max_tokens=60)
    answer = chat.invoke(QUESTIONS[0])
    assert answer.content == expected.outputs[0].text
    assert answer.usage_metadata["output_tokens"] == len(expected.outputs[0].token_ids)
    assert "".join(chunk.content for chunk in chat.stream(QUESTIONS[0])) == expected.outputs[0].text
    asked = chat.bind_tools([WEATHER], tool_choice="get_weather").invoke("How is the weather?")
    assert asked.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
    chat = langchain_openai.ChatOpenAI(
        base_url=server.url + "/v1", api_key=KEY, model=model, temperature=1, seed=1, max_tokens=500
    )
    assert isinstance(chat.with_structured_output(Person, method="json_schema").invoke("Who?"), Person)
    with pytest.raises(ContextOverflowError):  # its agents summarise the conversation then
        chat.invoke("block table " * 2000)


# ---- schemathesis


@pytest.mark.slow
def test_nothing_that_a_machine_invents_breaks_the_server():
    """What a machine makes of the served schema, half of it wrong on purpose: no answer is a 5xx, none drops out."""
    with (
        AsyncLLM(TINY_QWEN3, device="cpu", max_model_len=32, num_kv_blocks=64) as llm,
        in_thread(llm, max_choices=4) as server,
    ):
        check_operations(server, 15)


def check_operations(server, max_examples):
    from schemathesis import GenerationMode, openapi

    schema = openapi.from_url(server.url + "/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize"} <= {operation.path for operation in operations}
    statuses = Counter()
    for operation in operations:
        can_be_wrong = "requestBody" in operation.definition.raw
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)[: 1 + can_be_wrong]:
            statuses += check_operation(server, operation.as_strategy(generation_mode=mode), max_examples)
    assert {200, 400} <= set(statuses)
    server.wait_until_idle()


def check_operation(server, strategy, max_examples):
    from hypothesis import HealthCheck, given, settings

    statuses = Counter()

    @settings(max_examples=max_examples, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=strategy)
    def answers(case):
        response = case.call(base_url=server.url, timeout=60)
        assert response.status_code < 500, f"{response.status_code}, {response.text}: {case.as_curl_command()}"
        assert response.status_code != 422, f"OpenAI calls it 400: {case.as_curl_command()}"
        statuses[response.status_code] += 1

    answers()
    return statuses
