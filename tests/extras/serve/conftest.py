"""A server without a socket: requests go to the application itself."""

import asyncio
import json
import time

import httpx
import pytest
from fastapi import FastAPI

from nanovllm_extras import TINY_QWEN3
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.server_options import ServerOptions
from tests.extras.serve.real_server import Offline, in_thread

CHAT_TEMPLATE = (
    "{%- for m in messages %}{{ m.role + ':' + m.content + '|' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant:' }}{%- endif %}"
)
NUM_BLOCKS = 512


def named_events(response):
    """The events of a stream whose events have names, which are checked."""
    assert response.status_code == 200, response.text
    *blocks, nothing = response.text.split("\n\n")
    assert nothing == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


class Client:
    """Calls an application; each call is an event loop of its own."""

    def __init__(self, app, headers=None):
        self.app, self.headers = app, headers or {}
        self.server = app.state.server

    def request(self, method, path, **others):
        async def send():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=self.headers) as client:
                return await client.request(method, path, timeout=30, **others)

        return asyncio.run(send())

    def get(self, path, **others):
        return self.request("GET", path, **others)

    def post(self, path, body=None, headers=None, **others):
        """body: sent as JSON, in which half of a surrogate pair is an escape."""
        if body is not None:
            headers, others["content"] = {"Content-Type": "application/json", **(headers or {})}, json.dumps(body)
        return self.request("POST", path, headers=headers, **others)

    def refuse(self, path, body, param, *words, status=400):
        """A request is refused with an error that names the field and has the words -> the error."""
        response = self.post(path, body)
        error = response.json()["error"]
        told = response.status_code, error["param"], [word for word in words if word not in error["message"]]
        assert told == (status, param, []), (body, error)
        return error

    def ask(self, path, **body):
        """The answer of a request that is served."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path, **body):
        """The chunks of a stream, whole: all come before this returns."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, end, nothing = response.text.split("\n\n")
        assert (end, nothing) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture(scope="session", autouse=True)
def _make_each_schema_once():
    """FastAPI needs 75 ms to describe an application, and most tests make one."""
    describe, known = FastAPI.openapi, {}

    def look_up(app):
        routes = tuple(getattr(route, "path", None) for route in app.routes)
        if routes not in known:
            known[routes] = json.dumps(describe(app))
        return json.loads(known[routes])  # a copy, in a tenth of the time that `deepcopy` takes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastAPI, "openapi", look_up)
        yield


@pytest.fixture(scope="session")
def bundled():
    """The bundled model, for clients whose answers are compared with those of `offline`."""
    with AsyncLLM(TINY_QWEN3, device="cpu", num_kv_blocks=2048) as llm:
        yield llm


@pytest.fixture(scope="session")
def offline():
    offline = Offline()
    yield offline
    offline.llm.shutdown()


@pytest.fixture(scope="module")
def bundled_server(bundled):
    with in_thread(bundled) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def llm(with_tokenizer):
    """The random model with its tokenizer of single bytes, and a chat template."""
    with AsyncLLM(with_tokenizer, dtype="float32", num_kv_blocks=NUM_BLOCKS, block_size=4) as llm:
        llm.engine.tokenizer.chat_template = CHAT_TEMPLATE
        yield llm
        give_up = time.monotonic() + 60
        while (found := state_of(llm.get_stats())) != (NUM_BLOCKS, 0, 0):  # the engine's thread ends what clients left
            assert time.monotonic() < give_up, found
            time.sleep(0.01)


def state_of(stats):
    return stats.num_free_blocks, stats.num_running, stats.num_waiting


@pytest.fixture
def new_client(llm):
    """A client of an application with options of its own."""

    def make(headers=None, **options):
        return Client(make_app(ServerOptions(**{"model_names": ("tiny", "alias"), **options}), llm), headers)

    return make


@pytest.fixture
def client(new_client):
    return new_client()
