"""LoRA adapters over HTTP: the model's name selects one, as in vLLM. The oracle is the engine with `lora_request`."""

import asyncio
import contextlib
import json
import re

import httpx
import pytest

from nanovllm import TINY_QWEN3
from nanovllm_extras import LLM, LoRARequest, SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.serve_settings import make_parser, settings_of
from nanovllm_extras.serve.served_adapters import ServedAdapters
from nanovllm_extras.serve.server_options import ServerOptions
from tests.extras.lora.peft_adapters import make_adapter
from tests.extras.serve.conftest import CHAT_TEMPLATE, Client

PROMPT = "What is a block table?"
OPTIONS = {"enable_lora": True, "max_loras": 1, "dtype": "float32", "num_kv_blocks": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    for seed, name in enumerate(("first", "second")):
        make_adapter(root / name, seed, scale=0.6)
    return root


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(**options):
            llm = stack.enter_context(AsyncLLM(TINY_QWEN3, **OPTIONS))
            return Client(make_app(ServerOptions(model_names=("tiny",), **options), llm))

        yield start


def text(client, model, path="/v1/completions", **body):
    answer = client.ask(path, model=model, max_tokens=8, temperature=0, ignore_eos=True, **body)
    assert answer["model"] == model
    return answer["choices"][0].get("text")


def test_the_name_selects_the_adapter(serve, folders):
    adapters = tuple(LoRARequest(name, i, folders / name) for i, name in enumerate(("first", "second"), 1))
    client = serve(lora_modules=adapters)
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["tiny", "first", "second"]
    shown = client.get("/v1/models/second").json()
    assert (shown["root"], shown["parent"]) == (str(folders / "second"), "tiny")
    found = [text(client, name, prompt=PROMPT) for name in ("tiny", "first", "second")]
    with LLM(TINY_QWEN3, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate([PROMPT] * 3, params, use_tqdm=False, lora_request=[None, *adapters])
    assert found == [output.outputs[0].text for output in outputs]
    assert len(set(found)) == 3
    client.ask("/v1/chat/completions", model="first", messages=[{"role": "user", "content": "a"}], max_tokens=1)
    vectors = [
        client.ask("/v1/embeddings", model=name, input="a")["data"][0]["embedding"] for name in ("tiny", "first")
    ]
    assert vectors[0] != vectors[1]
    assert client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "y"}).status_code == 404


def test_adapters_are_loaded_and_unloaded_if_that_is_allowed(serve, folders):
    client = serve(allow_runtime_lora_updating=True)
    body = {"lora_name": "late", "lora_path": str(folders / "first")}
    before = text(client, "tiny", prompt=PROMPT)
    for bad, status in (({**body, "lora_path": str(folders)}, 400), ({**body, "lora_name": "tiny"}, 400)):
        assert client.post("/v1/load_lora_adapter", json=bad).status_code == status
    assert client.post("/v1/completions", json={"model": "late", "prompt": "a"}).status_code == 404
    assert client.post("/v1/load_lora_adapter", json=body).text == "Success: LoRA adapter 'late' added successfully."
    assert client.post("/v1/load_lora_adapter", json=body).status_code == 400
    first = text(client, "late", prompt=PROMPT)
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 200
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 404
    assert client.post("/v1/completions", json={"model": "late", "prompt": "a"}).status_code == 404
    client.post("/v1/load_lora_adapter", json={**body, "lora_path": str(folders / "second")})
    second = text(client, "late", prompt=PROMPT)  # neither the matrices nor the blocks of the first of this name
    assert len({before, first, second}) == 3
    assert text(client, "tiny", prompt=PROMPT) == before


def test_the_command_line_names_adapters(monkeypatch):
    def options(*arguments):
        return settings_of(make_parser().parse_args(["--enable-lora", *arguments])).options

    made = options("--lora-modules", "a=/x=y", '{"name": "b", "path": "/z"}')
    assert [(one.name, one.lora_int_id, one.path) for one in made.lora_modules] == [("a", 1, "/x=y"), ("b", 2, "/z")]
    assert not made.allow_runtime_lora_updating
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    assert options().allow_runtime_lora_updating
    for bad, message in (("a", "NAME=PATH"), ("=b", "NAME=PATH"), ('{"name": "a"}', "name and path")):
        with pytest.raises(ValueError, match=message):
            options("--lora-modules", bad)
    with pytest.raises(TypeError, match="lora_name must be a str"):
        options("--lora-modules", '{"name": ["a"], "path": "b"}')
    with pytest.raises(ValueError, match="--lora-modules needs --enable-lora"):
        settings_of(make_parser().parse_args(["--lora-modules", "a=b"]))


def test_numbers_of_new_adapters_are_above_all_others():
    assert ServedAdapters([LoRARequest("a", 5, "x"), LoRARequest("b", 2, "y")], print).take_number() == 6


def loaded(client):
    """The number of adapters in the memory of the engine's runner."""
    llm = client.server.llm
    return llm.thread.call(lambda: len(llm.engine.runner.adapters._packed)).result()


def test_accepted_requests_keep_an_unloaded_adapter_and_its_memory_is_free_after_the_last(serve, folders):
    """One runs, one waits for its slot, and one is submitted only after the adapter was unloaded and loaded again."""
    client = serve(allow_runtime_lora_updating=True)
    server, llm = client.server, client.server.llm
    expected = {}
    for name in ("first", "second"):
        body = {"lora_name": "x", "lora_path": str(folders / name)}
        client.post("/v1/load_lora_adapter", body)
        expected[name] = text(client, "x", prompt=PROMPT)
        assert loaded(client) == 1
        client.post("/v1/unload_lora_adapter", {"lora_name": "x"})
        assert loaded(client) == 0
    client.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(folders / "first")})
    late_can_start = asyncio.Event()
    submit = llm.submit

    async def submit_late(requests, *others):
        if requests[0].priority == 7:
            await late_can_start.wait()
        return await submit(requests, *others)

    async def ask(http, path, **body):
        common = {"model": "x", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return (await http.post(path, json={**common, "prompt": PROMPT, **body})).json()

    async def run():
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            begun = [asyncio.create_task(ask(http, "/v1/completions", priority=i)) for i in (0, 0, 7)]
            while server.adapters._num_users.total() < 3:
                await asyncio.sleep(0.001)
            await http.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
            refused = await http.post("/v1/completions", json={"model": "x", "prompt": "a"})
            loaded_again = await http.post(
                "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(folders / "second")}
            )
            newer = await ask(http, "/v1/completions")
            await asyncio.gather(*begun[:2])
            late_can_start.set()
            return refused.status_code, loaded_again.status_code, newer, await asyncio.gather(*begun)

    llm.submit = submit_late
    status, status_again, newer, old = asyncio.run(run())
    assert (status, status_again) == (404, 200)
    assert newer["choices"][0]["text"] == expected["second"]
    assert [(one["model"], one["choices"][0]["text"]) for one in old] == [("x", expected["first"])] * 3
    assert loaded(client) == 1, "only the newer adapter"
    client.post("/v1/unload_lora_adapter", {"lora_name": "x"})
    assert loaded(client) == 0


def test_every_route_takes_the_name_of_an_adapter(serve, folders):
    """Answers have it, and they are not those of the model alone. Another name is answered with 404 by all routes."""
    client = serve(lora_modules=(LoRARequest("first", 1, folders / "first"),))
    llm = client.server.llm
    llm.engine.tokenizer.chat_template = CHAT_TEMPLATE
    turn = [{"role": "user", "content": PROMPT}]
    generated = {"temperature": 0}
    bodies = {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 8, **generated},
        "/v1/chat/completions": {"messages": turn, "max_tokens": 8, **generated},
        "/v1/messages": {"messages": turn, "max_tokens": 8, **generated},
        "/v1/messages/count_tokens": {"messages": turn},
        "/v1/responses": {"input": PROMPT, "max_output_tokens": 8, **generated},
        "/v1/responses/input_tokens": {"input": PROMPT},
        "/v1/embeddings": {"input": PROMPT},
        "/pooling": {"input": PROMPT},
        "/rerank": {"query": PROMPT, "documents": ["a page", "a slot"]},
        "/score": {"text_1": PROMPT, "text_2": "a page"},
        "/tokenize": {"prompt": PROMPT},
        "/detokenize": {"tokens": [5, 6]},
    }
    same = {"/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize"}
    for path, body in bodies.items():
        answers = {name: client.ask(path, model=name, **body) for name in ("tiny", "first")}
        contents = []
        for name, answer in answers.items():
            assert answer.pop("model", name) == name, path
            found = [answer.get(key) for key in ("choices", "content", "output", "data", "results") if key in answer]
            contents.append(re.sub(r'"(id|created)": "?[^",]*"?', "", json.dumps(found or answer)))
        assert (contents[0] == contents[1]) == (path in same), path
        response = client.post(path, {"model": "other", **body})
        assert response.status_code == 404, path
        assert "unknown model 'other'; this server has tiny, first" in response.text


def test_a_stored_response_is_continued_by_the_model_that_the_new_request_names(serve, folders):
    client = serve(lora_modules=(LoRARequest("first", 1, folders / "first"),))
    client.server.llm.engine.tokenizer.chat_template = CHAT_TEMPLATE
    options = {"max_output_tokens": 8, "temperature": 0}
    begun = client.ask("/v1/responses", model="first", input=PROMPT, **options)
    assert client.get(f"/v1/responses/{begun['id']}").json()["model"] == "first"
    more = {"previous_response_id": begun["id"], "input": "and then?", **options}
    texts = []
    for name in ("tiny", "first"):
        answer = client.ask("/v1/responses", model=name, **more)
        assert answer["model"] == name
        said = begun["output"][0]["content"][0]["text"]
        messages = [
            {"role": "user", "content": PROMPT},
            {"role": "assistant", "content": said},
            {"role": "user", "content": "and then?"},
        ]
        chat = client.ask("/v1/chat/completions", model=name, messages=messages, max_tokens=8, temperature=0)
        texts.append(answer["output"][0]["content"][0]["text"])
        assert texts[-1] == chat["choices"][0]["message"]["content"]
    assert texts[0] != texts[1]
