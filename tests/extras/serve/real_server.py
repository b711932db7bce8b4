"""A server behind a real socket: in a thread, where its engine can be looked at, or in a process, as users start it."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from nanovllm_extras import LLM, TINY_QWEN3, SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.routes.app import make_app
from nanovllm_extras.serve.routes.server import DrainingServer, listen
from nanovllm_extras.serve.server_options import ServerOptions
from nanovllm_extras.serve.state import Server

ROOT = Path(__file__).resolve().parents[3]
QUESTIONS = [
    "What is paged attention?",
    "Why does an LLM server use continuous batching?",
    "What is the KV cache?",
    "What is chunked prefill?",
    "Who are you?",
]


@dataclass
class RealServer:
    port: int
    llm: AsyncLLM | None = None
    """Of a server in this process."""
    state: Server | None = None
    """Of a server in this process: its application's."""
    process: subprocess.Popen | None = None
    scheme: str = "http"

    @property
    def url(self):
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def metric(self, name):
        """The sum of a metric's samples."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as response:
            text = response.read().decode()
        samples = re.findall(rf"^nanovllm:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert samples, f"no {name} in {text}"
        return sum(map(float, samples))

    def wait_until_idle(self, timeout_s=60.0):
        """No request runs or waits, and no block is owned by any."""
        deadline = time.monotonic() + timeout_s
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while any(found := [self.metric(name) for name in names]):
            assert time.monotonic() < deadline, dict(zip(names, found, strict=True))
            time.sleep(0.02)
        if self.llm is not None:
            stats = self.llm.get_stats()
            assert (stats.num_free_blocks, stats.num_running) == (stats.num_kv_blocks, 0)

    def rss_bytes(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status).group(1))

    def connect(self, receive_buffer=None):
        """A bare connection."""
        connection = socket.socket()
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", self.port))
        return connection


@contextlib.contextmanager
def in_thread(llm, **options):
    """An application over `llm` on a free port, until the block ends."""
    listening = listen("127.0.0.1", 0)
    app = make_app(ServerOptions(**{"model_names": ("tiny-qwen3",), **options}), llm)
    loop, servers, is_made = asyncio.new_event_loop(), [], threading.Event()

    async def serve():
        servers.append(DrainingServer(app))
        is_made.set()
        await servers[0].serve([listening])

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    is_made.wait(60)
    try:
        yield RealServer(listening.getsockname()[1], llm=llm, state=app.state.server)
    finally:
        servers[0].should_exit = True
        thread.join(60)
        loop.close()


@contextlib.contextmanager
def in_process(*arguments, timeout_s=120.0, tls=None):
    """`python -m nanovllm serve …` on a free port, until it answers. tls: the client's, for a server of https."""
    command = [sys.executable, "-m", "nanovllm_extras", "serve", *map(str, arguments), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            port, scheme = wait_for_port(process, log, timeout_s, tls), "https" if tls else "http"
            yield RealServer(port, process=process, scheme=scheme)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, read(log)


@contextlib.contextmanager
def started(*words):
    """`nanovllm WORDS` on a free port. The block may kill the process."""
    command = [sys.executable, "-m", "nanovllm_extras", *words, "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            yield RealServer(wait_for_port(process, log, 120), process=process)
        finally:
            process.terminate()
            assert process.wait(60) in (0, -signal.SIGKILL)


def wait_for_port(process, log, timeout_s, tls=None):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"https?://127\.0\.0\.1:([1-9]\d*)", read(log)):
            with contextlib.suppress(OSError), urllib.request.urlopen(found[0] + "/health", timeout=5, context=tls):
                return int(found[1])
        time.sleep(0.02)
    raise AssertionError(f"the server does not answer; it has said: {read(log)}")


def read(log):
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")


class Offline:
    """What an engine of its own says, greedily: the truth about every answer."""

    def __init__(self):
        self.llm = LLM(TINY_QWEN3, device="cpu", num_kv_blocks=2048)

    def chat(self, question, **params):
        messages = [{"role": "user", "content": question}]
        (output,) = self.llm.chat(messages, SamplingParams(**{"temperature": 0, **params}), use_tqdm=False)
        return output
