"""LoRA adapters over HTTP: the model's name selects one, as in vLLM. The oracle is the engine with `lora_request`."""

import contextlib

import pytest

from nanovllm import TINY_QWEN3
from nanovllm_extras import LLM, LoRARequest, SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.serve_settings import make_parser, settings_of
from nanovllm_extras.serve.server_options import ServerOptions
from tests.extras.lora.peft_adapters import make_adapter
from tests.extras.serve.conftest import Client

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
    with pytest.raises(ValueError, match="need --enable-lora"):
        settings_of(make_parser().parse_args(["--lora-modules", "a=b"]))
