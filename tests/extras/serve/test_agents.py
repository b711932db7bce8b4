"""Agents that call a tool in each of five turns: OpenAI's Agents SDK and Microsoft's Agent Framework.

Oracle: the tool has been called once in each turn, and the prompts grow by the earlier turns.
"""

import asyncio
from typing import Literal

import pytest

from tests.extras.serve.real_server import in_thread

pytestmark = pytest.mark.slow  # importing them takes seconds
KEY = "a key"
NUM_TURNS = 5


@pytest.fixture(scope="module")
def server(bundled):
    with in_thread(bundled, api_keys=(KEY,)) as server:
        yield server


@pytest.fixture
def weather():
    """A tool, and the cities for which it has been called."""

    def get_weather(city: Literal["Rome", "Oslo"]) -> str:
        """Return the weather of a city."""
        get_weather.cities.append(city)
        return f"Sunny in {city}."

    get_weather.cities = []
    return get_weather


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
def test_openais_agents_sdk(server, weather, is_stored, is_stream):
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    options = agents.ModelSettings(
        tool_choice="required", max_tokens=700, parallel_tool_calls=False, temperature=1, extra_body={"seed": 1}
    )

    async def talk():
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY) as client:
            model = agents.OpenAIResponsesModel("tiny-qwen3", client)
            agent = agents.Agent(
                "a",
                instructions="Be brief.",
                model=model,
                tools=[agents.function_tool(weather)],
                model_settings=options,
            )
            history, last, lengths = [], None, []
            for turn in range(NUM_TURNS):
                given = [*history, {"role": "user", "content": f"How is the weather, {turn}?"}]
                if is_stream:
                    result = agents.Runner.run_streamed(agent, given, previous_response_id=last)
                    async for _ in result.stream_events():
                        pass
                else:
                    result = await agents.Runner.run(agent, given, previous_response_id=last)
                if is_stored:
                    last = result.last_response_id
                else:
                    history = result.to_input_list()
                lengths += [answer.usage.input_tokens for answer in result.raw_responses]
            return lengths

    lengths = asyncio.run(talk())
    assert len(lengths) == 2 * NUM_TURNS
    assert lengths == sorted(set(lengths)), "each prompt has all turns before it"
    assert len(weather.cities) == NUM_TURNS


@pytest.mark.parametrize("is_stored", [False, True])
def test_agent_framework(server, weather, is_stored):
    framework = pytest.importorskip("agent_framework")
    openai = pytest.importorskip("agent_framework_openai")
    options = {"max_tokens": 700, "tool_choice": {"mode": "required"}, "allow_multiple_tool_calls": False}
    options |= {"temperature": 1.0, "store": is_stored}

    async def talk():
        client = openai.OpenAIChatClient(base_url=server.url + "/v1", api_key=KEY, model="tiny-qwen3")
        agent = framework.Agent(client=client, instructions="Be brief.", tools=[weather])
        session, lengths = agent.create_session(), []
        for turn in range(NUM_TURNS):
            question = f"How is the weather, {turn}?"
            if turn % 2:
                stream = agent.run(question, session=session, stream=True, options=options)
                async for _ in stream:
                    pass
                result = await stream.get_final_response()
            else:
                result = await agent.run(question, session=session, options=options)
            lengths.append(result.usage_details["input_token_count"])
        return session.service_session_id, lengths

    name, lengths = asyncio.run(talk())
    assert (name is not None) == is_stored
    assert lengths == sorted(set(lengths))
    assert len(weather.cities) == NUM_TURNS
