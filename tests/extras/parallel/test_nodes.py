"""Two "machines" on the loopback: each is a process of its own, and the ranks meet by TCP only.

Oracle: `transformers` for tokens. Everything but the handshake is slow: each machine imports torch. `test_machines.py`
has machines that are threads.
"""

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
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from nanovllm_extras import Config
from nanovllm_extras.parallel import nodes
from nanovllm_extras.parallel.nodes import accept_ranks, reach_engine
from tests.conftest import hf_greedy
from tests.extras.parallel.zygote import MARK, ROOT, marked_processes

PROMPTS = [[1, 2, 3, 4], [9, 8, 7]]
SCRIPT = """
import json, sys
from nanovllm_extras import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", device="cpu", skip_tokenizer_init=True, num_kv_blocks=128, block_size=4,
          attention_backend="torch", enforce_eager=True, **json.loads(sys.argv[2]))
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
found = [list(one.outputs[0].token_ids) for one in llm.generate(json.loads(sys.argv[3]), greedy, use_tqdm=False)]
print(json.dumps({"tokens": found}), flush=True)
"""


@pytest.fixture
def config():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Config("anything", tensor_parallel_size=4, nnodes=2, master_port=port)


@contextlib.contextmanager
def waiting(config):
    """Machine 0 waits in a thread; gives a list that gets the sockets that it has accepted."""
    found = []

    def accept():
        peers, listening = accept_ranks(config, range(2, 4))
        listening.close()
        found.append(peers)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield found
    thread.join(60)
    assert not thread.is_alive()


def call(config):
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", config.master_port), 60)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def close_all(peers):
    for peer in peers:
        peer.close()


# ---- the handshake


def test_ranks_come_in_any_order_and_get_their_sockets(config):
    node = replace(config, node_rank=1)
    with waiting(config) as found:
        late, early = reach_engine(node, range(3, 4)), reach_engine(node, range(2, 3))
    addresses = [peer.getsockname() for peer in early + late]
    assert [peer.getpeername() for peer in found[0]] == addresses
    for peer in early + late:  # a machine that vanishes is noticed
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    close_all(early + late + found[0])


def test_a_machine_that_comes_first_waits(config):
    peers = []
    node = replace(config, node_rank=1)
    thread = threading.Thread(target=lambda: peers.extend(reach_engine(node, range(2, 4))), daemon=True)
    thread.start()
    time.sleep(0.2)
    assert not peers
    with waiting(config):
        pass
    thread.join(60)
    assert len(peers) == 2
    close_all(peers)


def test_strangers_delay_nobody(config, monkeypatch, caplog):
    """At the same time, some send nothing, some send slowly, some send no valid hello, and one never stops."""
    monkeypatch.setattr(nodes, "HELLO_S", 3600.0)
    rubbish = [
        b"GET / HTTP/1.1\r\n\r\n", b"\n", b"[]\n", b"null\n", b'{"rank": 2}\n', b"\xff\xfe\n", b"[" * 200 + b"\n",
        b'{"rank": "x", "size": 4, "nnodes": 2}\n', b'{"rank": [2], "size": 4, "nnodes": 2}\n', b"x" * 100_000,
        b'{"rank": 1e999, "size": 4, "nnodes": 2}\n',
    ]  # fmt: skip
    with waiting(config):
        silent = [call(config) for _ in range(2 * nodes.MAX_CALLERS)]
        dripping = call(config)
        dripping.sendall(b"{")
        loud = [call(config) for _ in rubbish]
        for stranger, said in zip(loud, rubbish, strict=True):
            with contextlib.suppress(OSError):
                stranger.sendall(said)
        for stranger, said in zip(loud, rubbish, strict=True):
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(100) == b"", said  # the end, or a reset
        close_all(reach_engine(replace(config, node_rank=1), range(2, 4)))  # else `waiting` does not end
    close_all([*silent, dripping, *loud])
    assert "is not a rank of this engine" in caplog.text
    assert "too many connections" in caplog.text


def test_silence_has_a_limit(config, monkeypatch):
    monkeypatch.setattr(nodes, "HELLO_S", 0.1)
    with waiting(config):
        stranger = call(config)
        assert stranger.recv(1) == b""
        monkeypatch.undo()
        close_all(reach_engine(replace(config, node_rank=1), range(2, 4)))
    stranger.close()


@pytest.mark.parametrize(
    ("others", "ranks", "why"),
    [
        ({"tensor_parallel_size": 8}, range(4, 8), "tensor_parallel_size and nnodes are 4 and 2 on machine 0, got 8"),
        ({"nnodes": 4}, range(1, 2), "tensor_parallel_size and nnodes are 4 and 2"),
        ({}, range(4, 6), "rank 4 is not on another machine"),
        ({}, (2, 2), "rank 2 has already connected; each machine needs its own node_rank"),
    ],
)
def test_a_machine_that_does_not_belong_is_told_why(config, others, ranks, why):
    with waiting(config):
        with pytest.raises(ValueError, match=re.escape(why)):
            reach_engine(replace(config, node_rank=1, **others), ranks)
        close_all(reach_when_given_up(replace(config, node_rank=1), range(2, 4)))


def reach_when_given_up(config, ranks):
    """Those sockets of a refused machine that were accepted are given up with it: until then their ranks are taken."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return reach_engine(config, ranks)
        except ValueError as error:
            if "has already connected" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def test_something_else_that_listens_there(config):
    with socket.create_server(("127.0.0.1", config.master_port)) as other:

        def answer():
            peer = other.accept()[0]
            peer.recv(100)
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            peer.close()

        threading.Thread(target=answer).start()
        with pytest.raises(ValueError, match="the program that listens there is not nanovllm"):
            reach_engine(replace(config, node_rank=1), range(2, 4))


def test_a_port_that_is_taken_and_an_address_that_is_not_here(config):
    message = "master_addr and master_port must be an address of this machine and a free port"
    with socket.create_server(("127.0.0.1", config.master_port)), pytest.raises(ValueError, match=message):
        accept_ranks(config, range(2, 4))
    with pytest.raises(ValueError, match=message):
        accept_ranks(replace(config, master_addr="192.0.2.1"), range(2, 4))
    with pytest.raises(ValueError, match="master_addr must be an address of machine 0"):
        reach_engine(replace(config, master_addr="no.such.host.invalid"), range(2, 4))


# ---- whole engines


class Machines:
    """Processes that share a mark, by which all that they have started is found."""

    def __init__(self, model, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.model, self.tmp_path = model, tmp_path
        self.processes, self.mark = {}, tmp_path.name + os.urandom(4).hex()
        self.environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), MARK: self.mark,
        }  # fmt: skip

    def options(self, node):
        return {"tensor_parallel_size": 2, "nnodes": 2, "node_rank": node, "master_port": self.port}

    def start(self, node):
        arguments = [self.model, json.dumps(self.options(node)), json.dumps(PROMPTS)]
        self.launch([sys.executable, "-c", SCRIPT, *arguments], node)

    def serve(self, node, *arguments):
        options = [part for key, value in self.options(node).items() for part in (f"--{key.replace('_', '-')}", value)]
        command = [
            sys.executable,
            "-m",
            "nanovllm_extras",
            "serve",
            self.model,
            "--dtype",
            "float32",
            "--device",
            "cpu",
        ]
        command += ["--attention-backend", "torch", "--num-kv-blocks", 128, "--block-size", 4]
        self.launch([*command, *options, *arguments], node)

    def launch(self, command, name):
        self.processes[name] = subprocess.Popen(
            list(map(str, command)), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    def wait(self, name, timeout_s=120):
        """(exit status, what it has said)"""
        process = self.processes[name]
        said = process.communicate(timeout=timeout_s)[0]
        return process.returncode, said

    def wait_for_line(self, name, begin):
        lines = []
        while not lines or not lines[-1].startswith(begin):
            lines.append(self.processes[name].stdout.readline())
            assert lines[-1], lines
        return lines[-1]

    def interrupt(self, name):
        os.killpg(self.processes[name].pid, signal.SIGINT)

    def expect_nothing_left(self, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while left := marked_processes(self.mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.01)
        assert list(self.tmp_path.iterdir()) == []


@pytest.fixture
def machines(tiny_checkpoint, with_tokenizer, tmp_path):
    made = []

    def make(has_tokenizer=False):
        made.append(Machines(with_tokenizer if has_tokenizer else tiny_checkpoint[0], tmp_path))
        return made[-1]

    yield make
    for one in made:
        for pid in marked_processes(one.mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for process in one.processes.values():
            process.wait()
            process.stdout.close()


def tokens_in(said):
    return json.loads(re.search(r'^{"tokens".*$', said, re.MULTILINE)[0])["tokens"]


@pytest.mark.slow
def test_two_machines_give_the_tokens_of_one(machines, tiny_checkpoint):
    both = machines()
    both.start(1)
    time.sleep(1)
    both.start(0)
    status, said = both.wait(0)
    assert status == 0, said
    assert tokens_in(said) == [hf_greedy(tiny_checkpoint[1], prompt, 8) for prompt in PROMPTS]
    assert both.wait(1)[0] == 0
    both.expect_nothing_left()


@pytest.mark.slow
def test_the_command(machines):
    """Only machine 0 speaks HTTP; when a machine dies, it answers 503, and the process ends with a signal as ever."""
    both = machines(has_tokenizer=True)
    both.serve(0, "--port", 0)
    url = re.search(r"http://\S+", both.wait_for_line(0, "loading"))[0]
    both.serve(1, "--port", url.rpartition(":")[2])  # which is taken: it must not matter
    both.wait_for_line(0, "serving")
    body = json.dumps({"prompt": "ab", "max_tokens": 4}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert len(json.load(response)["choices"]) == 1
    both.processes[1].kill()
    begin = time.monotonic()
    while (status := status_of(url + "/health")) == 200:
        assert time.monotonic() < begin + 60
    assert (status, status_of(request)) == (503, 503)
    both.interrupt(0)
    assert both.wait(0)[0] == 0
    both.expect_nothing_left()


def status_of(request):
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_a_signal_ends_a_server_that_waits_for_machines(machines):
    alone = machines(has_tokenizer=True)
    alone.serve(0, "--port", 0)
    alone.wait_for_line(0, "loading")
    time.sleep(1)
    alone.interrupt(0)
    status, said = alone.wait(0)
    assert (status, "ended while loading" in said) == (0, True), said
    alone.expect_nothing_left()
