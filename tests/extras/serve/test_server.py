"""A real server on a real socket: its start, its end, and clients that misbehave."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from nanovllm_extras import LLM, TINY_QWEN3, TINY_QWEN3_5
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.commands import serve_command as launch
from nanovllm_extras.serve.routes import server as server_module
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.routes.server import DrainingServer, listen
from nanovllm_extras.serve.serve_settings import API_KEY_VARIABLE
from nanovllm_extras.serve.server_options import ServerOptions
from nanovllm_extras.trace.recording import read_recording
from nanovllm_extras.trace.replay import Replay

PATH = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
NUM_BLOCKS = 4096
CLIENT = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))  # `httpx.get` makes one each time


class RunningServer:
    """A server in a thread of its own, with its own engine."""

    def __init__(self, make_llm, **options):
        self.may_load = threading.Event()
        self.socket = listen("127.0.0.1", 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections hold little that is not read
        self.url = launch.url_of(self.socket, "http")
        self.llm = None
        self._make_llm = make_llm
        self._options = ServerOptions(model_names=("tiny",), **options)
        self._started = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()
        assert self._started.wait(20)

    async def _run(self):
        self.loop = asyncio.get_running_loop()
        self.server = DrainingServer(make_app(self._options))
        self._started.set()
        await self.server.run_until_signal(self.socket, self._load, lambda llm: None)

    def _load(self):
        assert self.may_load.wait(60)
        self.llm = self._make_llm()
        return self.llm

    def wait_until_ready(self):
        self.may_load.set()
        until(lambda: CLIENT.get(f"{self.url}/health").status_code == 200)
        return self

    def signal(self):
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.server.handle_exit, signal.SIGTERM, None)

    def post(self, **body):
        return CLIENT.post(f"{self.url}{PATH}", json={"prompt": "ab", "max_tokens": 4, **body})

    def connect(self):
        connection = socket.socket()
        connection.settimeout(60)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(self.socket.getsockname())
        return connection

    def send(self, **body):
        """A connection that has sent a request, and read nothing."""
        content = json.dumps({"prompt": "ab", "ignore_eos": True, **body}).encode()
        connection = self.connect()
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        return connection

    def talk(self, raw):
        """What the server answers to these bytes, until it closes the connection."""
        with self.connect() as connection, contextlib.suppress(ConnectionError):
            received = b""
            with contextlib.suppress(ConnectionError):
                connection.sendall(raw)
            while piece := connection.recv(65536):
                received += piece
        return received

    def is_idle(self):
        stats = self.llm.get_stats()
        return stats.num_free_blocks == NUM_BLOCKS and stats.num_running == stats.num_waiting == 0


def until(condition):
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


@pytest.fixture(scope="module")
def make_llm(with_tokenizer):
    return lambda: AsyncLLM(with_tokenizer, dtype="float32", num_kv_blocks=NUM_BLOCKS, block_size=4)


@pytest.fixture
def start(make_llm):
    running = []

    def start(**options):
        running.append(RunningServer(make_llm, **options))
        return running[-1]

    yield start
    for one in running:
        one.may_load.set()
        one.signal()
        one.signal()
        one.thread.join(60)
        assert not one.thread.is_alive()


@pytest.fixture(scope="module")
def shared(make_llm):
    server = RunningServer(make_llm).wait_until_ready()
    yield server
    server.signal()
    server.thread.join(60)


@pytest.fixture
def server(shared):
    """After each test it serves, and holds no blocks."""
    yield shared
    until(shared.is_idle)
    assert shared.post().status_code == 200
    until(lambda: shared.server.state.num_in_progress == 0)


# ---- start and end


def test_it_listens_while_the_model_is_loaded(start):
    server = start()
    for path in ("/health", "/v1/models"):
        response = CLIENT.get(f"{server.url}{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
    assert server.post().status_code == 503
    server.wait_until_ready()
    assert server.post().json()["usage"]["completion_tokens"] == 4


def test_what_cannot_be_loaded_ends_the_server(make_llm):
    def fail():
        raise ValueError("no such model")

    async def main():
        server = DrainingServer(make_app(ServerOptions(model_names=("tiny",))))
        await asyncio.wait_for(server.run_until_signal(listen("127.0.0.1", 0), fail, print), 60)

    with pytest.raises(ValueError, match="no such model"):
        asyncio.run(main())


def test_a_signal_lets_what_runs_finish_and_refuses_what_is_new(start):
    server = start().wait_until_ready()
    step, may_go_on = server.llm.engine.step, threading.Event()
    server.llm.engine.step = lambda: (may_go_on.wait(60), step())[1]
    with CLIENT.stream(
        "POST", f"{server.url}{PATH}", json={"prompt": "ab", "max_tokens": 30, "stream": True, "ignore_eos": True}
    ) as stream:
        server.signal()
        until(lambda: server.post().json()["error"]["code"] == "draining")
        assert CLIENT.get(f"{server.url}/health").status_code == 503
        assert server.thread.is_alive()
        may_go_on.set()
        text = "".join(stream.iter_text())
    assert '"finish_reason":"length"' in text
    assert text.endswith("data: [DONE]\n\n")
    server.thread.join(60)
    assert not server.thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        server.post()


@pytest.mark.parametrize("how", ["time", "second signal"])
def test_what_does_not_finish_is_aborted(start, how):
    server = start(drain_timeout_s=0.1 if how == "time" else 60).wait_until_ready()
    step = server.llm.engine.step
    server.llm.engine.step = lambda: (time.sleep(0.02), step())[1]
    body = {"prompt": "ab", "max_tokens": 500, "stream": True, "ignore_eos": True}
    with CLIENT.stream("POST", f"{server.url}{PATH}", json=body) as stream:
        server.signal()
        if how == "second signal":
            until(lambda: server.server.state.is_draining)
            server.signal()
        text = "".join(stream.iter_text())
    assert '"finish_reason":"abort"' in text
    assert text.endswith("data: [DONE]\n\n")
    server.thread.join(60)
    assert not server.thread.is_alive()


def test_the_command(with_tokenizer, tmp_path):
    """From the command line to the exit status after SIGTERM; the printed curl's request is served, and recorded."""
    command = [sys.executable, "-m", "nanovllm_extras", "serve", str(with_tokenizer), "--port", "0"]
    command += ["--api-key", "k1", "k2", "--trace", str(tmp_path / "run.jsonl")]
    environment = {**os.environ, API_KEY_VARIABLE: "k3 k4"}
    with subprocess.Popen(
        [*command, "--num-kv-blocks", "64"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        lines = []
        while not lines or not lines[-1].startswith("try it"):
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
        assert lines[1].startswith(f"serving          {with_tokenizer} at http://127.0.0.1:")
        assert "1,024 tokens in 64 blocks" in lines[3]
        assert "256 requests, of which 2.0 may have 512 tokens" in lines[4]
        url, body = re.search(r"curl (\S+) .* -d '(.*)'", lines[-1]).groups()
        statuses = [
            CLIENT.post(url, json=json.loads(body), headers={"Authorization": f"Bearer {key}"}).status_code
            for key in ("k1", "k2", "k3", "k4", "k5")
        ]
        assert statuses == [200] * 4 + [401]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        log = process.stderr.read()
    assert "Traceback" not in log
    assert log.count(" length: 22 tokens in") == 4
    header, *lines = read_recording(tmp_path / "run.jsonl")
    replay = Replay(header)
    for line in lines:
        for event in line.get("events", []):
            replay.apply(event)
    assert (len(replay.seqs), replay.num_used) == (4, 0)


def test_flags_reach_the_server_and_its_engine(monkeypatch):
    seen = []

    def start(app, listening, load, *_):
        listening.close()
        seen.append(app.state.server.options)
        load()

    monkeypatch.setattr(launch.logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(launch, "keep_from_collector", lambda: None)  # of what the other tests need
    monkeypatch.setattr(launch, "run", lambda main: None)
    monkeypatch.setattr(
        launch.AsyncLLM, "from_engine_args", lambda engine_args, **others: seen.append((engine_args, others))
    )
    monkeypatch.setenv(API_KEY_VARIABLE, "k2 k3")
    flags = "--api-key k1 --served-model-name a b --max-choices 5 --max-request-bytes 6 --max-requests-per-minute 7 "
    flags += "--max-queued-requests 8 --drain-timeout 9 --allowed-origins http://x --max-num-seqs 10 --port 0 "
    flags += "--max-request-values 11 --forwarded-allow-ips 10.0.0.1 10.1.0.0/16"
    assert launch.main(flags.split()) == 0
    options, (engine_args, others) = seen
    assert options == ServerOptions(
        ("a", "b"),
        ("k1", "k2", "k3"),
        6,
        7,
        5,
        ("http://x",),
        9.0,
        max_request_values=11,
        forwarded_allow_ips=("10.0.0.1", "10.1.0.0/16"),
    )
    assert (engine_args.model, engine_args.max_num_seqs) == (TINY_QWEN3, 10)
    assert others == {"max_queued_requests": 8, "trace": None}


def test_a_bad_command_line_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(launch.logging, "basicConfig", lambda **_: None)
    for arguments, status, message in (
        (["--max-num-seqs", "0"], 2, "max_num_seqs must be an integer >= 1, got 0"),
        (["--pipeline-parallel-size", "2"], 2, "pipeline_parallel_size"),
        (["--max-queued-requests", "0"], 2, "must be at least 1, got 0"),
        (["--drain-timeout", "nan"], 2, "must be a number of at least 0"),
        (["no/such/folder/x"], 1, "no/such/folder/x"),
        (["--host", "256.0.0.1"], 1, "nanovllm serve: "),
    ):
        if status == 2:
            with pytest.raises(SystemExit, match="2"):
                launch.main(["--port", "0", *arguments])
        else:
            assert launch.main(["--port", "0", *arguments]) == status
        printed = capsys.readouterr().err.strip().splitlines()
        assert message in printed[-1]
        assert len(printed) <= 2


# ---- clients that misbehave


def test_clients_that_go_away_in_mid_stream_free_their_blocks(server, monkeypatch):
    """Dozens of them: some leave before the first token, some after it, some without a stream at all."""
    before, step = server.llm.get_stats(), server.llm.engine.step
    monkeypatch.setattr(server.llm.engine, "step", lambda: (time.sleep(0.01), step())[1])  # each has seconds to leave
    for i in range(60):
        connection = server.send(max_tokens=400, stream=i % 4 != 0)
        if i % 2:
            connection.recv(10)
        if i % 6 == 1:  # no orderly end: the next packet is answered with an error
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        elif i % 6 == 3:
            connection.shutdown(socket.SHUT_WR)
            until(lambda: server.server.state.num_in_progress == 0)
        connection.close()
    until(server.is_idle)
    after = server.llm.get_stats()
    assert after.num_finished == before.num_finished
    assert after.generation_tokens - before.generation_tokens < 60 * 400 / 4
    until(lambda: server.server.state.num_in_progress == 0)


def test_slow_readers_hold_no_blocks_and_stall_nobody(server):
    num_tokens = 300
    connections = [server.send(max_tokens=num_tokens, stream=True, logprobs=10) for _ in range(3)]
    assert server.post().status_code == 200
    until(server.is_idle)  # all are computed to their end, though nobody reads
    assert server.server.state.num_in_progress == 3
    for connection in connections:
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(2**20)
        connection.close()
        events = [json.loads(event) for event in re.findall(rb"data: (\{.*\})", received)]
        choices = [choice for event in events for choice in event["choices"]]
        assert choices[-1]["finish_reason"] == "length"
        assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == num_tokens
        assert len(choices) < num_tokens  # what came while the connection was full is in one event


MALFORMED = [
    HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}    ",
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: five\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    HEAD + b"X: " + b"a" * 200_000 + b"\r\nContent-Length: 0\r\n\r\n",
    HEAD + b"".join(b"X-%d: a\r\n" % i for i in range(20_000)) + b"\r\n",
    HEAD + b"Content-Length: 99999999999\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100 + b"\r\n\r\n",  # TLS
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"NONSENSE\r\n\r\n",
]


def test_malformed_http_is_refused(server):
    for raw in MALFORMED:
        answer = server.talk(raw)
        assert re.match(rb"HTTP/1.1 4\d\d ", answer), raw[:100]
        assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}


def test_nothing_is_said_in_the_midst_of_an_answer(server):
    """After a request for a stream come bytes that are not a request: at most one error follows the stream."""
    with server.send(max_tokens=50, stream=True) as connection:
        received = b""
        while b"data: " not in received:
            received += connection.recv(1000)
        connection.sendall(b"no request\r\n\r\n" * 2)
        while piece := connection.recv(1 << 20):
            received += piece
    _, answer, *errors = re.split(rb"HTTP/1.1 (?=\d)", received)
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") or not errors
    assert [error[:4] for error in errors] in ([], [b"400 "])


@pytest.mark.skipif(sys.platform != "linux", reason="the option is Linux's")
def test_a_peer_that_has_vanished_is_asked_after_half_a_minute_and_given_up_after_a_minute():
    """When the server ends first, another one can have its port at once."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        port = listening.getsockname()[1]
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 10
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        listening.close()
        listen("127.0.0.1", port).close()


TCP_REPAIR = 19  # of Linux: a connection in this state closes without telling its peer


def test_a_client_that_vanishes_without_a_word_frees_its_blocks(start, monkeypatch):
    """A half-open connection, as one whose client has lost its power; it waits for a whole answer."""
    monkeypatch.setattr(server_module, "SILENCE_S", 1)
    server = start().wait_until_ready()
    step = server.llm.engine.step
    monkeypatch.setattr(server.llm.engine, "step", lambda: (time.sleep(0.03), step())[1])
    connection = server.send(max_tokens=400)  # twelve seconds of work
    until(lambda: server.llm.get_stats().num_running == 1)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    except PermissionError:
        pytest.skip("only root can close a connection without a word")
    connection.close()
    until(server.is_idle)
    assert server.llm.get_stats().generation_tokens < 200
    assert server.server.state.num_in_progress == 0


def test_announcement_says_how_much_memory_the_states_take():
    """Those of the model that has some. With `num_kv_blocks`, they are in addition to the blocks."""
    options = {"device": "cpu", "num_kv_blocks": 20, "block_size": 4, "max_num_seqs": 3}
    with_states, without = LLM(TINY_QWEN3_5, **options), LLM(TINY_QWEN3, **options)
    said = [
        launch.announcement(llm, ServerOptions(model_names=("tiny",)), "http://x") for llm in (with_states, without)
    ]
    num_bytes = 7 * with_states.get_stats().states.bytes_per_slot  # of three sequences, three snapshots, the null slot
    lines = [f"states           6 slots of states, which take {num_bytes:,} bytes", "max concurrency  3 requests"]
    assert "\n".join(["KV cache         80 tokens in 20 blocks", *lines]) in said[0]
    assert "states" not in said[1]
