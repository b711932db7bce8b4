"""What clients and operators of vLLM expect: names of requests, paths of a proxy, TLS, `/ping`, shorter prompts."""

import asyncio
import json
import logging
import ssl
import subprocess
import urllib.request

import pytest

from nanovllm_extras import TINY_QWEN3, SamplingParams
from nanovllm_extras.bench.workloads import make_random
from nanovllm_extras.options.chat_options import check_chat_template
from nanovllm_extras.serve import serve_settings
from nanovllm_extras.serve.commands import serve_command as launch
from nanovllm_extras.serve.routes.server import listen
from nanovllm_extras.serve.state import ServerOptions
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
    caplog.set_level(logging.INFO, "nanovllm_extras")
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


@pytest.fixture
def no_start(monkeypatch):
    """A command line that is not refused ends with status 0 instead of a server."""
    monkeypatch.setattr(launch, "serve", lambda *_: 0)


STRING_OPTIONS = ("host", "trace", "served-model-name", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "model")


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("name", [*STRING_OPTIONS, "api-key", "forwarded-allow-ips", "allowed-origins", "ray-address"])
@pytest.mark.parametrize("value", ["", " "])
def test_empty_values_are_refused(capsys, name, value):
    """A shell makes them of variables that are not set; an empty key would let everyone in, an empty host listens
    everywhere."""
    with pytest.raises(SystemExit, match="2"):
        launch.main([f"--{name}", value])
    error = capsys.readouterr().err.splitlines()[-1]
    assert name.replace("-", "_") in error.replace("-", "_")
    assert "load" not in error


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("value", ["", " "])
def test_empty_names_of_the_model_and_of_the_environment_are_refused(capsys, monkeypatch, value):
    with pytest.raises(SystemExit, match="2"):
        launch.main([value])
    assert "argument MODEL: must not be empty" in capsys.readouterr().err
    monkeypatch.setenv(serve_settings.API_KEY_VARIABLE, value)
    with pytest.raises(SystemExit, match="2"):
        launch.main([])
    assert f"{serve_settings.API_KEY_VARIABLE} must have at least one key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api_keys": ("a", "")}, "key 2 of 2"),
        ({"api_keys": ("secret\n",)}, "--api-key"),
        ({"api_keys": ("sec\rret",)}, "--api-key"),
        ({"api_keys": ("secret\udcff",)}, "UTF-8"),
        ({"model_names": ()}, "--served-model-name"),
        ({"model_names": ("a", "\t")}, "--served-model-name"),
        ({"allowed_origins": ("example.com",)}, "--allowed-origins"),
        ({"allowed_origins": ("https://example.com/",)}, "--allowed-origins"),
        ({"forwarded_allow_ips": ("10.0.0.1", "proxy")}, "--forwarded-allow-ips"),
        ({"forwarded_allow_ips": ("10.0.0.1/8",)}, "10.0.0.1/8"),
        ({"root_path": "/a b"}, "--root-path"),
    ],
)
def test_values_that_could_never_match_are_refused(options, words):
    with pytest.raises(ValueError, match="--") as refused:
        ServerOptions(**{"model_names": ("m",), **options})
    assert words in str(refused.value)
    assert "secret" not in str(refused.value)


def test_values_that_match():
    ServerOptions(("m",), ("kéy",), allowed_origins=("*", "null", "http://localhost:3000", "app://x"),
                  forwarded_allow_ips=("*", "::1", "10.0.0.0/8"), root_path="/llm/v2")  # fmt: skip


@pytest.fixture(scope="module")
def pems(tmp_path_factory):
    """Two certificates with their keys, the first key with a password, and files that are none of these."""
    folder = tmp_path_factory.mktemp("pems")
    for name in ("a", "b"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt", "-days", "2", "-subj", f"/CN={name}"],
            check=True, capture_output=True,
        )  # fmt: skip
    secret = [
        "openssl",
        "pkey",
        "-in",
        folder / "a.key",
        "-aes128",
        "-passout",
        "pass:x",
        "-out",
        folder / "secret.key",
    ]
    subprocess.run(secret, check=True, capture_output=True)
    key, certificate = (folder / "a.key").read_bytes(), (folder / "a.crt").read_bytes()
    (folder / "both.pem").write_bytes(key + certificate)
    (folder / "cut.crt").write_bytes(certificate[:300])
    (folder / "empty").touch()
    return folder


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"certfile": "a.crt", "keyfile": "b.key"}, ("--ssl-keyfile must be the key of --ssl-certfile", "b.key")),
        ({"certfile": "a.crt", "keyfile": "secret.key"}, ("--ssl-keyfile", "without a password", "secret.key")),
        ({"certfile": "a.crt", "keyfile": "empty"}, ("--ssl-keyfile must be a private key", "empty")),
        ({"certfile": "a.crt", "keyfile": "a.crt"}, ("--ssl-keyfile must be a private key", "a.crt")),
        ({"certfile": "a.crt"}, ("--ssl-keyfile is missing", "a.crt")),
        ({"certfile": "a.key", "keyfile": "a.key"}, ("--ssl-certfile must be", "a.key")),
        ({"certfile": "cut.crt", "keyfile": "a.key"}, ("--ssl-certfile must be", "cut.crt")),
        ({"certfile": "both.pem", "ca_certs": "a.key"}, ("--ssl-ca-certs must be", "a.key")),
    ],
)
def test_files_of_https_are_checked_before_the_model_is_loaded(pems, names, words, capsys):
    flags = [word for name, file in names.items() for word in (f"--ssl-{name.replace('_', '-')}", str(pems / file))]
    with pytest.raises(SystemExit, match="2"):
        launch.main(flags)
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    good = {"certfile": "both.pem", "ca_certs": "b.crt"}
    args = [word for name, file in good.items() for word in (f"--ssl-{name.replace('_', '-')}", str(pems / file))]
    assert serve_settings.tls_options(serve_settings.make_parser().parse_args(args))["ssl_cert_reqs"] == 0


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages", "end of template"),
        ("{% for m in messages %}\n{{ m | no_filter }}{% endfor %}", "line 2"),
        ("{% jump %}", "jump"),
        ("/no/such/template", "/no/such/template"),
        ("x" * 300, "must be a file"),
        (b"", "must not be empty"),
        (b"\xff{{ messages }}", "UTF-8"),
        (b"{% if %}", "line 1"),
    ],
)
def test_the_chat_template_is_checked_before_the_model_is_loaded(template, words, capsys, tmp_path):
    if isinstance(template, bytes):
        (tmp_path / "file").write_bytes(template)
        template = str(tmp_path / "file")
    with pytest.raises(SystemExit, match="2"):
        launch.main(["--chat-template", template])
    error = capsys.readouterr().err
    assert "error: chat_template must" in error
    assert words in error


def test_a_byte_order_mark_is_not_part_of_a_template(tmp_path):
    """Editors of Windows write it. In the template, it would begin every prompt."""
    text = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (tmp_path / "file").write_text(text, encoding="utf-8-sig")
    assert check_chat_template(str(tmp_path / "file")) == text


def test_templates_that_need_more_than_messages_are_allowed(tmp_path):
    for text in (
        "{{ raise_exception('no') }}",
        "{% generation %}{{ 1 // 0 }}{% endgeneration %}",
        "{{ no.such.name }}",
    ):
        (tmp_path / "file").write_text(text)
        args = serve_settings.make_parser().parse_args(["--chat-template", str(tmp_path / "file")])
        assert serve_settings.settings_of(args)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("port", ["70000", "-1", "65536", "http", "1.5"])
def test_ports_are_checked(port, capsys):
    with pytest.raises(SystemExit, match="2"):
        launch.main(["--port", port])
    assert f"argument --port: must be an integer from 0 to 65535, got '{port}'" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["no.such.invalid", "x" * 100, "a..b", "127.0.0.1"])
def test_an_address_that_cannot_be_used_is_named(host):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on --host {host} --port {port}: "):
            listen(host, port)


def test_options_reach_the_server():
    arguments = ["--root-path", "/llm", "--disable-log-requests", "--tool-call-parser", "llama3_json"]
    arguments += ["--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice", "--timeout-keep-alive", "90.5"]
    args = serve_settings.make_parser().parse_args(arguments)
    args.model = TINY_QWEN3
    options = serve_settings.server_options(args)
    assert (options.root_path, options.log_requests, options.timeout_keep_alive_s) == ("/llm", False, 90.5)
    assert ServerOptions(("m",)).timeout_keep_alive_s > 60, "proxies keep connections for 60 s"
    assert [parser.__name__ for parser in options.parsers[:2]] == ["LlamaJson", "DeepSeekR1"]


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
