"""What clients and operators of vLLM expect: names of requests, paths of a proxy, TLS, `/ping`, shorter prompts."""

import json
import logging
import ssl
import subprocess
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanovllm_extras import TINY_QWEN3
from nanovllm_extras.options.chat_options import check_chat_template
from nanovllm_extras.serve import serve_settings
from nanovllm_extras.serve.commands import serve_command as launch
from nanovllm_extras.serve.routes.server import listen
from nanovllm_extras.serve.server_options import ServerOptions
from tests.extras.serve.real_server import in_thread

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "What?"}]


NAMED = [  # (path, body, the id of its answer)
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "stream": True}, "chatcmpl-my/id:1"),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 2}, "cmpl-my/id:1"),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2, "store": False}, "resp_my/id:1"),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}, "msg_my/id:1"),
    ("/v1/embeddings", {"input": "a"}, "embd-my/id:1"),
]


def test_a_request_keeps_its_name(client, caplog):
    caplog.set_level(logging.INFO)
    for path, body, name in NAMED:
        response = client.post(path, body, headers={"X-Request-Id": "my/id:1"})
        assert response.headers["x-request-id"] == "my/id:1"
        text = response.text.split("data: ")[1] if body.get("stream") else response.text
        assert json.loads(text)["id"] == name
        assert name in caplog.text


def test_options_of_a_server_without_a_log_and_behind_a_proxy(new_client, caplog):
    caplog.set_level(logging.INFO, "nanovllm_extras")
    client, key = new_client(root_path="/llm", api_keys=("k",), log_requests=False), {"Authorization": "Bearer k"}
    for prefix in ("", "/llm"):  # a proxy may take it away, or leave it
        assert client.get(prefix + "/health").status_code == 200
        assert client.get(prefix + "/v1/models").status_code == 401
        assert client.post(prefix + CHAT, {"messages": MESSAGES, "max_tokens": 2}, headers=key).status_code == 200
    assert "tokens in" not in caplog.text
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200


def test_names_are_given_kept_in_errors_and_may_be_used_twice(client, new_client):
    assert len(client.get("/health").headers["x-request-id"]) == 32
    assert client.post(CHAT, {}, headers={"x-request-id": "a"}).headers["x-request-id"] == "a"
    refused = new_client(api_keys=("k",)).post(CHAT, {}, headers={"x-request-id": "b"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "b")
    for bad in ("", "a b", "x" * 129):
        response = client.get("/health", headers={"x-request-id": bad})
        assert len(response.headers["x-request-id"]) == 32, "another one is made up"

    def ask(_):
        body = {"messages": MESSAGES, "max_tokens": 30, "ignore_eos": True}
        return client.post(CHAT, body, headers={"x-request-id": "same"}).status_code

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(ask, range(2))) == [200, 200]


def test_a_suffix_is_refused(client):
    client.refuse(COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "fill a gap")
    assert client.post(COMPLETIONS, {"prompt": "a", "suffix": "", "max_tokens": 1}).status_code == 200


def check_refused(capsys, arguments, *words):
    """The command line ends with status 2 and one error that has these words."""
    with pytest.raises(SystemExit, match="2"):
        launch.main(arguments)
    error = capsys.readouterr().err.splitlines()[-1]
    assert [word for word in words if word not in error] == [], error


@pytest.mark.usefixtures("no_start")
def test_bad_options_are_named(capsys):
    for arguments, words in (
        (["--ssl-keyfile", "x"], "needs --ssl-certfile"),
        (["--ssl-certfile", "/no/file"], "must be a file"),
        (["--ssl-certfile", __file__, "--ssl-cert-reqs", "2"], "--ssl-ca-certs"),
        (["--root-path", "llm/"], "--root-path"),
        (["--tool-call-parser", "llama"], "llama3_json"),
        (["--reasoning-parser", "none"], "deepseek_r1"),
        *(
            (["--port", port], f"--port: must be an integer from 0 to 65535, got '{port}'")
            for port in ("65536", "-1", "x")
        ),
    ):
        check_refused(capsys, arguments, words)


@pytest.fixture
def no_start(monkeypatch):
    """A command line that is not refused ends with status 0 instead of a server."""
    monkeypatch.setattr(launch, "serve", lambda *_: 0)


STRING_OPTIONS = [
    "host",
    "trace",
    "served-model-name",
    "ssl-keyfile",
    "ssl-certfile",
    "ssl-ca-certs",
    "model",
    "api-key",
]
STRING_OPTIONS += ["forwarded-allow-ips", "allowed-origins", "ray-address"]


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("value", ["", " "])
def test_empty_values_are_refused(capsys, monkeypatch, value):
    """A shell makes them of variables that are not set; an empty key would let everyone in, an empty host listens
    everywhere."""
    for name in STRING_OPTIONS:
        with pytest.raises(SystemExit, match="2"):
            launch.main([f"--{name}", value])
        error = capsys.readouterr().err.splitlines()[-1]
        assert name.replace("-", "_") in error.replace("-", "_")
        assert "load" not in error
    check_refused(capsys, [value], "argument MODEL: must not be empty")
    monkeypatch.setenv(serve_settings.API_KEY_VARIABLE, value)
    check_refused(capsys, [], f"{serve_settings.API_KEY_VARIABLE} must have at least one key")


NEVER_MATCHING = [
    ({"api_keys": ("a", "")}, "key 2 of 2"),
    ({"api_keys": ("secret\n",)}, "--api-key"),
    ({"api_keys": ("secret\udcff",)}, "UTF-8"),
    ({"model_names": ()}, "--served-model-name"),
    ({"model_names": ("a", "\t")}, "--served-model-name"),
    ({"allowed_origins": ("example.com",)}, "--allowed-origins"),
    ({"allowed_origins": ("https://example.com/",)}, "--allowed-origins"),
    ({"forwarded_allow_ips": ("10.0.0.1", "proxy")}, "--forwarded-allow-ips"),
    ({"forwarded_allow_ips": ("10.0.0.1/8",)}, "10.0.0.1/8"),
    ({"root_path": "/a b"}, "--root-path"),
]


def test_values_that_could_never_match_are_refused():
    for options, words in NEVER_MATCHING:
        with pytest.raises(ValueError, match="--") as refused:
            ServerOptions(**{"model_names": ("m",), **options})
        assert words in str(refused.value)
        assert "secret" not in str(refused.value)
    ServerOptions(("m",), ("kéy",), allowed_origins=("*", "null", "http://localhost:3000", "app://x"),
                  forwarded_allow_ips=("*", "::1", "10.0.0.0/8"), root_path="/llm/v2")  # fmt: skip


@pytest.fixture(scope="module")
def pems(tmp_path_factory):
    """Two certificates with their keys, the first key with a password, and files that are none of these."""
    folder = tmp_path_factory.mktemp("pems")
    for name in ("a", "b"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt", "-days", "2", "-subj", f"/CN={name}",
             "-addext", "subjectAltName=IP:127.0.0.1"],
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


BAD_FILES = [
    ({"certfile": "a.crt", "keyfile": "b.key"}, ("--ssl-keyfile must be the key of --ssl-certfile", "b.key")),
    ({"certfile": "a.crt", "keyfile": "secret.key"}, ("--ssl-keyfile", "without a password", "secret.key")),
    ({"certfile": "a.crt", "keyfile": "empty"}, ("--ssl-keyfile must be a private key", "empty")),
    ({"certfile": "a.crt", "keyfile": "a.crt"}, ("--ssl-keyfile must be a private key", "a.crt")),
    ({"certfile": "a.crt"}, ("--ssl-keyfile is missing", "a.crt")),
    ({"certfile": "a.key", "keyfile": "a.key"}, ("--ssl-certfile must be", "a.key")),
    ({"certfile": "cut.crt", "keyfile": "a.key"}, ("--ssl-certfile must be", "cut.crt")),
    ({"certfile": "both.pem", "ca_certs": "a.key"}, ("--ssl-ca-certs must be", "a.key")),
]


def flags_of(pems, names):
    return [word for name, file in names.items() for word in (f"--ssl-{name.replace('_', '-')}", str(pems / file))]


@pytest.mark.usefixtures("no_start")
def test_files_of_https_are_checked_before_the_model_is_loaded(pems, capsys):
    for names, words in BAD_FILES:
        check_refused(capsys, flags_of(pems, names), *words)


def test_https(pems, llm):
    flags = flags_of(pems, {"certfile": "both.pem", "ca_certs": "b.crt"})
    tls = serve_settings.tls_options(serve_settings.make_parser().parse_args(flags))
    assert tls["ssl_cert_reqs"] == 0
    context = ssl.create_default_context(cafile=str(pems / "a.crt"))
    with in_thread(llm, tls=tls) as server:
        url = f"https://127.0.0.1:{server.port}/v1/models"
        with urllib.request.urlopen(url, context=context, timeout=30) as response:
            assert response.status == 200
        with pytest.raises(OSError):  # noqa: PT011
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=30)


@pytest.mark.usefixtures("no_start")
def test_the_chat_template_is_checked_before_the_model_is_loaded(capsys, tmp_path):
    for template, words in (
        ("{{ messages", "end of template"),
        ("{% for m in messages %}\n{{ m | no_filter }}{% endfor %}", "line 2"),
        ("/no/such/template", "/no/such/template"),
        ("x" * 300, "must be a file"),
        (b"", "must not be empty"),
        (b"\xff{{ messages }}", "UTF-8"),
        (b"{% if %}", "line 1"),
    ):
        if isinstance(template, bytes):
            (tmp_path / "file").write_bytes(template)
            template = str(tmp_path / "file")
        check_refused(capsys, ["--chat-template", template], "error: chat_template must", words)
    for text in (
        "{{ raise_exception('no') }}",
        "{% generation %}{{ 1 // 0 }}{% endgeneration %}",
        "{{ no.such.name }}",
    ):
        (tmp_path / "file").write_text(text, encoding="utf-8-sig")  # Editors of Windows write a byte order mark.
        assert check_chat_template(str(tmp_path / "file")) == text


def test_an_address_that_cannot_be_used_is_named():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        for host in ("no.such.invalid", "a..b", "127.0.0.1"):
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
