"""What clients and operators of vLLM expect: names of requests, paths of a proxy, TLS, `/ping`, shorter prompts."""

import asyncio
import json
import logging
import ssl
import subprocess
import urllib.request

import pytest

from nanovllm import TINY_QWEN3, SamplingParams
from nanovllm.extras.bench.workloads import make_random
from nanovllm.extras.serve import serve_command as launch
from nanovllm.extras.serve import serve_settings
from tests.extras.serve.real_server import in_process

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "What?"}]


@pytest.mark.parametrize(
    ("path", "body", "id"),
    [
        (CHAT, {"messages": MESSAGES, "max_tokens": 2}, "chatcmpl-my/id:1"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 2, "stream": True}, "chatcmpl-my/id:1"),
        (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 2}, "cmpl-my/id:1"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2}, "resp_my/id:1"),
        ("/v1/embeddings", {"input": "a"}, "embd-my/id:1"),
    ],
)
def test_a_request_keeps_its_name(client, caplog, path, body, id):
    caplog.set_level(logging.INFO)
    response = client.post(path, body, headers={"X-Request-Id": "my/id:1"})
    assert response.headers["x-request-id"] == "my/id:1"
    text = response.text.split("data: ")[1] if body.get("stream") else response.text
    assert json.loads(text)["id"] == id
    assert id in caplog.text


def test_names_are_given_kept_in_errors_and_may_be_used_twice(client, new_client):
    assert len(client.get("/health").headers["x-request-id"]) == 32
    assert client.post(CHAT, {}, headers={"x-request-id": "a"}).headers["x-request-id"] == "a"
    refused = new_client(api_keys=("k",)).post(CHAT, {}, headers={"x-request-id": "b"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "b")
    for bad in ("", "a b", "x" * 129):
        response = client.post(CHAT, {"messages": MESSAGES}, headers={"x-request-id": bad})  # ignored
        assert response.status_code == 200
        name = response.headers["x-request-id"]
        assert len(name) == 32, "another one is made up"
        assert name != bad

    async def ask_twice():
        return await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(2)))

    def ask():
        body = {"messages": MESSAGES, "max_tokens": 30, "ignore_eos": True}
        return client.post(CHAT, body, headers={"x-request-id": "same"}).status_code

    assert asyncio.run(ask_twice()) == [200, 200]


def test_ping_and_suffix(client, new_client):
    assert [client.get("/ping").status_code, client.post("/ping").status_code] == [200, 200]
    assert new_client(api_keys=("k",)).get("/ping").status_code == 200
    refused = client.post(COMPLETIONS, {"prompt": "a", "suffix": "b"}).json()["error"]
    assert (refused["param"], "fill a gap" in refused["message"]) == ("suffix", True)
    assert client.post(COMPLETIONS, {"prompt": "a", "suffix": "", "max_tokens": 1}).status_code == 200


def test_no_line_for_each_request(new_client, caplog):
    caplog.set_level(logging.INFO, "nanovllm")
    body = {"messages": MESSAGES, "max_tokens": 2}
    new_client(log_requests=False).ask(CHAT, **body)
    assert "tokens in" not in caplog.text
    new_client().ask(CHAT, **body)
    assert "tokens in" in caplog.text


def test_the_path_of_a_proxy(new_client):
    client = new_client(root_path="/llm", api_keys=("k",))
    for prefix in ("", "/llm"):  # a proxy may take it away, or leave it
        assert client.get(prefix + "/health").status_code == 200
        assert client.get(prefix + "/v1/models").status_code == 401
        assert client.get(prefix + "/v1/models", headers={"Authorization": "Bearer k"}).status_code == 200


def test_the_end_of_a_prompt(client, llm):
    async def generate(prompt, **params):
        params = SamplingParams(temperature=0, max_tokens=3, **params)
        return [output async for output in llm.generate(prompt, params)][-1]

    short, cut = (
        asyncio.run(generate(prompt, **params))
        for prompt, params in (([9, 10, 11], {}), ([5, 6, 7, 8, 9, 10, 11], {"truncate_prompt_tokens": 3}))
    )
    assert cut.prompt_token_ids == [9, 10, 11]
    assert cut.outputs[0].token_ids == short.outputs[0].token_ids
    body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 2, "truncate_prompt_tokens": 2}
    assert client.ask(COMPLETIONS, **body)["usage"]["prompt_tokens"] == 2
    refused = client.post(COMPLETIONS, body | {"truncate_prompt_tokens": 0}).json()["error"]
    assert refused["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ssl-keyfile", "x"], "needs --ssl-certfile"),
        (["--ssl-certfile", "/no/file"], "must be a file"),
        (["--ssl-certfile", __file__, "--ssl-cert-reqs", "2"], "--ssl-ca-certs"),
        (["--root-path", "llm/"], "--root-path"),
        (["--tool-call-parser", "llama"], "llama3_json"),
        (["--reasoning-parser", "none"], "deepseek_r1"),
    ],
)
def test_bad_options_are_named(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        launch.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_options_reach_the_server():
    arguments = ["--root-path", "/llm", "--disable-log-requests", "--tool-call-parser", "llama3_json"]
    arguments += ["--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice"]
    args = serve_settings.make_parser().parse_args(arguments)
    args.model = TINY_QWEN3
    options = serve_settings.server_options(args)
    assert (options.root_path, options.log_requests) == ("/llm", False)
    assert [parser.__name__ for parser in options.parsers] == ["LlamaJson", "DeepSeekR1"]


@pytest.mark.slow
def test_https(tmp_path, monkeypatch):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(cafile=str(cert))
    with in_process("--ssl-keyfile", key, "--ssl-certfile", cert, tls=context) as server:
        with urllib.request.urlopen(server.url + "/v1/models", context=context, timeout=30) as response:
            assert response.status == 200
        with pytest.raises(OSError):  # noqa: PT011
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=30)


def test_chats_of_a_load_have_a_tokenizers_tokens():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_QWEN3)
    for work in make_random(5, 40, 3, range_ratio=0.5):
        assert len(tokenizer.encode(work.text_for(tokenizer))) == len(work.prompt_token_ids)
        assert work.text_for(None) == work.text
