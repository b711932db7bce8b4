"""The server of the page: its own page may ask, and no other page; a bad question harms nothing."""

import http.client
import json
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanovllm_extras.trace import view
from nanovllm_extras.what_if.answer import answer
from nanovllm_extras.what_if.recording_file import read
from nanovllm_extras.what_if.server import MAX_BODY, WhatIfServer
from nanovllm_extras.what_if.view_command import main

RECORDING = Path(__file__).resolve().parents[3] / "docs" / "book" / "recordings" / "fragmentation.jsonl"
QUESTION = {"recording": RECORDING.name, "options": {"block_size": 32}}


@contextmanager
def serve(path, **options):
    with WhatIfServer(path, *read(path), **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server():
    with serve(RECORDING) as server:
        yield server


def send(server, method, path, headers, body=None):
    """Return (status, headers, body) of a request with exactly these headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in headers.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, response.headers, content


def ask(server, body, path="ask", **changes):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Host": server.host, "Origin": f"http://{server.host}", "Content-Type": "application/json",
               "Content-Length": str(len(body))}  # fmt: skip
    status, _, content = send(server, "POST", server.root + path, {**headers, **changes}, body)
    return status, content.decode()


def test_the_page_is_served_and_a_question_is_answered(server):
    status, headers, page = send(server, "GET", server.root, {"Host": server.host})
    assert status == 200
    assert headers["X-Frame-Options"] == "DENY"
    assert b'data-name="fragmentation.jsonl"' in page
    status, content = ask(server, QUESTION)
    assert status == 200
    assert json.loads(content) == answer(*read(RECORDING), {"options": {"block_size": 32}})
    for question in ({**QUESTION, "recording": "other.jsonl"}, {"options": {}}):
        assert "about fragmentation.jsonl only" in json.loads(ask(server, question)[1])["error"]
    status, content = ask(server, {**QUESTION, "options": {"block_size": -1}})
    assert (status, list(json.loads(content))) == (200, ["error"])


def test_no_other_page_and_no_other_name_of_the_machine_is_answered(server):
    own = f"http://{server.host}"
    for origin in ("https://example.com", "null", None, own.replace("127.0.0.1", "localhost"), own + "0"):
        status, content = ask(server, QUESTION, Origin=origin)
        assert (status, "only the page" in content) == (403, True), origin
    for host in ("example.com", f"localhost:{server.server_port}", "127.0.0.1", None):
        assert ask(server, QUESTION, Host=host)[0] == 403, host
        assert send(server, "GET", server.root, {"Host": host})[0] == 403, host
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):  # what a form of another page can send
        status, _ = ask(server, QUESTION, **{"Content-Type": kind})
        assert status == 415, kind
    _, headers, _ = send(server, "GET", server.root, {"Host": server.host, "Origin": "https://example.com"})
    assert "Access-Control-Allow-Origin" not in headers
    for path in ("/", "/ask", server.root + "other", "/.." + server.root, server.root.upper()):
        assert send(server, "GET", path, {"Host": server.host})[0] == 404, path
    assert ask(server, QUESTION, path="../ask")[0] == 404


def test_bad_questions_are_refused_and_the_server_goes_on(server):
    assert ask(server, b"{")[0] == 400
    assert ask(server, b"[" * 50_000)[0] == 400
    assert ask(server, b"\xff\xfe")[0] == 400
    assert ask(server, [1])[0] == 400
    assert ask(server, b"", **{"Content-Length": str(MAX_BODY + 1)})[0] == 413
    assert ask(server, b"", **{"Content-Length": "9" * 5000})[0] == 413
    for length in ("-1", "²", "1_0", None):
        assert ask(server, b"", **{"Content-Length": length})[0] == 411, length
    assert send(server, "PUT", server.root, {"Host": server.host})[0] == 501
    with socket.create_connection(("127.0.0.1", server.server_port)) as silent:  # it blocks no other question
        silent.sendall(b"POST ")
        assert ask(server, QUESTION)[0] == 200


def test_a_run_that_takes_too_long_is_stopped():
    with serve(RECORDING, max_seconds=0.0) as server:
        status, content = ask(server, QUESTION)
    assert status == 200
    assert "it took too long" in json.loads(content)["error"]


def test_view_serves_the_page_until_it_is_interrupted(monkeypatch, capsys):
    opened = []

    def serve_forever(self):
        assert self.url == opened[-1]
        raise KeyboardInterrupt

    monkeypatch.setattr(view.webbrowser, "open", opened.append)
    monkeypatch.setattr(WhatIfServer, "serve_forever", serve_forever)
    assert main([str(RECORDING)]) == 0
    assert main([]) == 0, "the recording that comes with the package"
    assert [url.startswith("http://127.0.0.1:") for url in opened] == [True, True]
    assert opened[0] in capsys.readouterr().out


def test_view_opens_a_file_if_the_core_cannot_make_the_run(monkeypatch, capsys, tmp_path):
    opened = []
    monkeypatch.setattr(view.webbrowser, "open", opened.append)
    monkeypatch.setattr(view.tempfile, "tempdir", str(tmp_path))
    assert main([str(RECORDING.with_name("states.jsonl"))]) == 0
    assert opened[0].startswith("file://")
    said = capsys.readouterr().out
    assert "The page has no what-if. " in said
    assert "it has recurrent states" in said
