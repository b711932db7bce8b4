"""The server, as the clients see it that people have: `openai`, `langchain-openai`, `curl`, `schemathesis`.

Oracles: an engine of its own, offline, greedy, for the words of every answer; the clients' own checks of what they get;
the JSON schema for structured output; the engine's count of free blocks.

Seen to fail when broken: a stream without its last piece; usage missing, or told though it was not asked for; an error
whose field is not named, or whose status is another; cached tokens that are not told.
"""

import asyncio
import json
import shutil
import subprocess
from collections import Counter
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from nanovllm_extras import TINY_QWEN3, SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM
from tests.extras.serve.real_server import QUESTIONS, Offline, in_thread

KEY = "a key"


@pytest.fixture(scope="module")
def bundled():
    with AsyncLLM(TINY_QWEN3, device="cpu", num_kv_blocks=2048) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(bundled):
    with in_thread(bundled, api_keys=(KEY,)) as server:
        yield server


@pytest.fixture(scope="module")
def offline():
    offline = Offline()
    yield offline
    offline.llm.shutdown()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    (model,) = client.models.list().data
    return model.id


def messages(question):
    return [{"role": "user", "content": question}]


def chat_options(model, question, **options):
    return {"model": model, "messages": messages(question), "temperature": 0, "max_completion_tokens": 60, **options}


# ---- openai


def test_a_chat_is_the_offline_answer(client, model, offline):
    completion = client.chat.completions.create(**chat_options(model, QUESTIONS[0]))
    (choice,) = completion.choices
    expected = offline.chat(QUESTIONS[0], max_tokens=60)
    assert choice.message.content == expected.outputs[0].text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert completion.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert completion.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


@pytest.mark.parametrize("with_usage", [True, False])
def test_a_streamed_chat_adds_up(client, model, offline, with_usage):
    extra = {"stream_options": {"include_usage": True}} if with_usage else {}
    chunks = list(client.chat.completions.create(**chat_options(model, QUESTIONS[1]), stream=True, **extra))
    expected = offline.chat(QUESTIONS[1], max_tokens=60)
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(piece.delta.content or "" for piece in pieces) == expected.outputs[0].text
    assert pieces[0].delta.role == "assistant"
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [expected.outputs[0].finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1
    told = [chunk.usage for chunk in chunks if chunk.usage]
    assert [usage.completion_tokens for usage in told] == [len(expected.outputs[0].token_ids)] * with_usage


def test_a_second_turn_finds_the_first_in_the_prefix_cache(client, model):
    first = client.chat.completions.create(**chat_options(model, QUESTIONS[2]))
    turns = [*messages(QUESTIONS[2]), {"role": "assistant", "content": first.choices[0].message.content}]
    options = chat_options(model, "") | {"messages": [*turns, *messages("Why?")]}
    second = client.chat.completions.create(**options)
    whole = first.usage.prompt_tokens + first.usage.completion_tokens
    assert whole - 32 <= second.usage.prompt_tokens_details.cached_tokens <= whole


def test_completions_of_text_and_of_ids(client, model, offline):
    """A list of prompts, as text and as token ids, with log-probabilities."""
    texts = ["The KV cache", "A block table"]
    options = {"model": model, "temperature": 0, "max_tokens": 12, "logprobs": 2}
    by_text = client.completions.create(prompt=texts, **options)
    ids = [offline.llm.get_tokenizer().encode(text) for text in texts]
    by_ids = client.completions.create(prompt=ids, **options)
    expected = offline.llm.generate(texts, SamplingParams(temperature=0, max_tokens=12, logprobs=2), use_tqdm=False)
    for completion in (by_text, by_ids):
        assert [choice.index for choice in completion.choices] == [0, 1]
        for choice, output in zip(completion.choices, expected, strict=True):
            one = output.outputs[0]
            assert choice.text == one.text
            truth = [table[token_id].logprob for table, token_id in zip(one.logprobs, one.token_ids, strict=True)]
            assert choice.logprobs.token_logprobs == pytest.approx(truth, abs=1e-4)
            assert "".join(choice.logprobs.tokens) == one.text


def test_samples_and_stop_strings(client, model, offline):
    options = chat_options(model, QUESTIONS[0], temperature=0.8, seed=5, n=3, stop=["."])
    completion = client.chat.completions.create(**options)
    expected = offline.chat(QUESTIONS[0], temperature=0.8, seed=5, n=3, stop=["."], max_tokens=60)
    assert [choice.message.content for choice in completion.choices] == [one.text for one in expected.outputs]
    assert {choice.finish_reason for choice in completion.choices} == {"stop"}


def test_async_streams_side_by_side(server, model, offline):
    async def answer(client, question):
        text = ""
        async for chunk in await client.chat.completions.create(**chat_options(model, question), stream=True):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        return text

    async def answer_all():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY) as client:
            return await asyncio.gather(*(answer(client, question) for question in QUESTIONS))

    expected = [offline.chat(question, max_tokens=60).outputs[0].text for question in QUESTIONS]
    assert asyncio.run(answer_all()) == expected


def test_a_stream_that_is_left_frees_its_blocks(client, model, server):
    with client.chat.completions.create(**chat_options(model, QUESTIONS[0]), stream=True) as stream:
        next(iter(stream))
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"top_p": 2}, openai.BadRequestError, "top_p"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_completion_tokens": 0}, openai.BadRequestError, "max_completion_tokens"),
        ({"model": "another"}, openai.NotFoundError, "model"),
    ],
)
def test_errors_are_the_clients_own(client, model, change, error, param):
    with pytest.raises(error) as raised:
        client.chat.completions.create(**chat_options(model, "a") | change)
    assert raised.value.param == param
    assert raised.value.type
    assert "Traceback" not in str(raised.value)


def test_a_wrong_key_is_refused(server, model):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="another", max_retries=0) as client:  # noqa: SIM117
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(**chat_options(model, "a"))


# ---- openai: tools and structured output


class Person(BaseModel):
    """So narrow that a model that has never seen JSON comes to an end."""

    name: Literal["Ann", "Bob"]
    is_old: bool


LOOSE = {"temperature": 1, "seed": 1, "max_completion_tokens": 500}  # greedily, the model never ends the white space


def test_parse_gives_an_object(client, model):
    completion = client.chat.completions.parse(**chat_options(model, "Who?", **LOOSE), response_format=Person)
    assert completion.choices[0].finish_reason == "stop"
    assert isinstance(completion.choices[0].message.parsed, Person)


def test_parse_gives_an_object_of_a_stream(client, model):
    with client.chat.completions.stream(**chat_options(model, "Who?", **LOOSE), response_format=Person) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


def test_vllms_choice_is_taken_too(client, model):
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    completion = client.chat.completions.create(**chat_options(model, "Is it?"), extra_body=extra)
    assert completion.choices[0].message.content in ("yes", "no")


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


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_a_tool_is_called(client, model, tool_choice):
    options = chat_options(model, "How is the weather?", tools=[WEATHER], tool_choice=tool_choice)
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


def test_a_response_is_the_offline_answer(client, model, offline):
    response = client.responses.create(**response_options(model, QUESTIONS[0]))
    expected = offline.chat(QUESTIONS[0], max_tokens=60)
    assert response.output_text == expected.outputs[0].text
    assert response.status == {"stop": "completed", "length": "incomplete"}[expected.outputs[0].finish_reason]
    assert response.usage.output_tokens == len(expected.outputs[0].token_ids)


def test_a_streamed_response_adds_up(client, model, offline):
    expected = offline.chat(QUESTIONS[1], max_tokens=200).outputs[0]
    text = ""
    with client.responses.stream(**response_options(model, QUESTIONS[1], max_output_tokens=200)) as stream:
        for event in stream:
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert expected.finish_reason == "stop"
        assert stream.get_final_response().output_text == text == expected.text


def test_responses_go_on_with_what_was_said(client, model):
    first = client.responses.create(**response_options(model, QUESTIONS[3], max_output_tokens=200))
    turns = [{"role": "user", "content": QUESTIONS[3]}, *(item.model_dump() for item in first.output)]
    second = client.responses.create(**response_options(model, [*turns, {"role": "user", "content": "What for?"}]))
    whole = first.usage.input_tokens + first.usage.output_tokens
    assert whole - 32 <= second.usage.input_tokens_details.cached_tokens <= whole
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**response_options(model, "What for?", previous_response_id=first.id))
    assert raised.value.param == "previous_response_id"


def test_responses_parse_and_call(client, model):
    loose = {"temperature": 1, "max_output_tokens": 500, "extra_body": {"seed": 1}}
    parsed = client.responses.parse(**response_options(model, "Who?", **loose), text_format=Person)
    assert isinstance(parsed.output_parsed, Person)
    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    options = response_options(model, "How is the weather?", tools=[tool], tool_choice="required")
    called = client.responses.create(**options, parallel_tool_calls=False)
    (call,) = called.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    with client.responses.stream(**options, parallel_tool_calls=False) as stream:
        events = list(stream)
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == call.arguments


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


# ---- curl


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl_streams(server, model, offline):
    body = json.dumps(chat_options(model, QUESTIONS[0], stream=True))
    command = ["curl", "-sSN", f"{server.url}/v1/chat/completions", "-H", f"Authorization: Bearer {KEY}"]
    # curl -d sends it as a form, as people do who forget the header of JSON
    result = subprocess.run(
        [*command, "-H", "Content-Type: application/json", "-d", body], capture_output=True, text=True
    )
    *events, done = [line.removeprefix("data: ") for line in result.stdout.splitlines() if line]
    assert done == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == offline.chat(QUESTIONS[0], max_tokens=60).outputs[0].text


# ---- schemathesis


def check_schema(max_examples):
    """What a machine makes of the served schema, half of it wrong on purpose: no answer is a 5xx, none drops out."""
    with (
        AsyncLLM(TINY_QWEN3, device="cpu", max_model_len=32, num_kv_blocks=64) as llm,
        in_thread(llm, max_choices=4) as server,
    ):
        return check_operations(server, max_examples)


def check_operations(server, max_examples):
    from schemathesis import GenerationMode, openapi

    schema = openapi.from_url(server.url + "/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize"} <= {operation.path for operation in operations}
    statuses = Counter()
    for operation in operations:
        can_be_wrong = operation.method == "post"
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


@pytest.mark.slow
def test_nothing_that_a_machine_invents_breaks_the_server():
    check_schema(40)
