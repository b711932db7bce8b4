"""`nanovllm serve --ui`: off by default, behind the key, and what it streams is the recording of the engine."""

import asyncio
import json

import pytest

from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.routes.ui import LiveLines
from nanovllm_extras.serve.server_options import ServerOptions
from nanovllm_extras.trace.recording import Sinks, TraceFile, read_recording
from nanovllm_extras.trace.replay import Replay
from tests.extras.serve.conftest import CHAT_TEMPLATE, Client

MESSAGES = [{"role": "user", "content": "hello"}]


def replay_of(lines):
    replay = Replay(lines[0])
    for line in lines[1:]:
        for event in line.get("events", []):
            replay.apply(event)
    return replay


@pytest.fixture(scope="module")
def served(with_tokenizer, tmp_path_factory):
    """(client, live, path of the recording) of a server that has answered a chat, and whose engine has ended."""
    live, path = LiveLines(), tmp_path_factory.mktemp("ui") / "run.jsonl"
    options = {"dtype": "float32", "num_kv_blocks": 64, "block_size": 4}
    llm = AsyncLLM(with_tokenizer, trace=Sinks([live, TraceFile(path)]), **options)
    with llm:
        llm.engine.tokenizer.chat_template = CHAT_TEMPLATE
        app = make_app(ServerOptions(model_names=("tiny",), api_keys=("secret",)), llm, live)
        client = Client(app, {"Authorization": "Bearer secret"})
        client.ask("/v1/chat/completions", messages=MESSAGES, max_tokens=9, temperature=0, ignore_eos=True)
        client.num_steps = llm.get_stats().steps
        live.close()  # else the stream has no end
        client.events_text = client.get("/ui/events").text
        client.refused = Client(app).get("/ui/events")
    return client, path


def test_page_needs_no_key_and_its_events_do(served, new_client):
    client, _ = served
    assert [new_client().get(path).status_code for path in ("/ui", "/ui/events")] == [404, 404], "off by default"
    page = Client(client.app).get("/ui")
    assert page.status_code == 200
    assert "<body data-live>" in page.text
    assert "secret" not in page.text
    assert client.refused.status_code == 401
    assert client.refused.json()["error"]["code"] == "invalid_api_key"


def test_events_are_the_recording(served):
    client, path = served
    *events, end = client.events_text.split("\n\n")
    assert end == ""
    lines = [json.loads(event.removeprefix("data: ")) for event in events]
    assert lines == read_recording(path)
    replay = replay_of(lines)
    assert replay.step == client.num_steps > 8
    assert len(replay.seqs[1].tokens) - replay.seqs[1].num_prompt_tokens == 9


def collect(live, feed, num_lines):
    """What a reader gets until it has `num_lines`; `feed()` is called in another thread when it has the first."""

    async def read():
        got, feeding = [], None
        async for lines in live.follow():
            got += lines
            feeding = feeding or asyncio.get_running_loop().run_in_executor(None, feed)
            if len(got) >= num_lines:
                break
        await feeding
        return got

    return asyncio.run(asyncio.wait_for(read(), 20))


def test_reader_gets_each_line_once_over_the_borders_of_segments():
    live = LiveLines(max_lines=100)
    live.begin("header 0")

    def feed():
        for i in range(1, 500):
            live.write(f"line {i}")
            if live.is_full:
                live.begin(f"header {i}")
        live.close()

    got = collect(live, feed, 10**9)
    assert got[0] == "header 0"
    numbers = [int(line.split()[1]) for line in got if line.startswith("line")]
    headers = [int(line.split()[1]) for line in got if line.startswith("header")]
    for before, now in zip(numbers, numbers[1:], strict=False):
        assert now == before + 1 or now - 1 in headers, "none is lost but up to a header"
    assert numbers[-1] == 499


def test_late_reader_begins_with_the_newest_header_and_old_lines_are_given_up():
    live = LiveLines(max_lines=3)
    live.begin("header 0")
    for i in range(1, 9):
        live.write(f"line {i}")
        if live.is_full:
            live.begin(f"header {i}")
    live.write("line 9")
    live.close()
    got = collect(live, lambda: None, 10**9)
    assert got[0].startswith("header ")
    assert int(got[0].split()[1]) >= 6
    assert got[-1] == "line 9"
