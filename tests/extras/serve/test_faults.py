"""What breaks around a server does not take it along: memory, files, disks, tokenizers, processes, other requests.

Oracles: `transformers` for the tokens of the requests beside; for the server itself, that it answers as before.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch

from nanovllm_extras import TINY_QWEN3, SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.trace.recording import TraceFile
from tests.conftest import hf_greedy
from tests.extras.serve.real_server import ROOT, in_process, in_thread, wait_for_port

PROMPTS = [[1 + i, 40 + 3 * i, 7, 99 - i, 5] for i in range(6)]
SMALL = {"num_kv_blocks": 256, "block_size": 4, "dtype": "float32"}


def greedy(max_tokens=16, **others):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


@pytest.fixture(scope="module")
def llm(with_tokenizer):
    with AsyncLLM(with_tokenizer, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    return [hf_greedy(tiny_checkpoint[1], prompt, 16) for prompt in PROMPTS]


async def tokens_of(stream):
    outputs = [output async for output in stream]
    return outputs[-1].outputs[0].token_ids


def post(url, body, timeout=60):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)


def complete(server, prompt="What is a block table?", **others):
    body = {"model": "tiny-qwen3", "prompt": prompt, "max_tokens": 8, "temperature": 0, **others}
    return post(server.url + "/v1/completions", body)["choices"][0]["text"]


# ---- requests


def test_a_request_that_makes_its_step_fail_fails_alone(llm, expected):
    """The others keep their K and V: nothing is computed twice."""

    class TooMuch(Exception):
        pass

    def fail(output_token_ids, logits):
        if len(output_token_ids) == 3:
            raise TooMuch
        return logits

    async def serve():
        streams = [tokens_of(llm.generate(prompt, greedy())) for prompt in PROMPTS]
        bad = tokens_of(llm.generate([9] * 7, greedy(logits_processors=[fail])))
        return await asyncio.gather(*streams, bad, return_exceptions=True)

    before = llm.get_stats()
    *found, error = asyncio.run(serve())
    assert found == expected
    assert isinstance(error, TooMuch)
    after = llm.get_stats()
    cached = after.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens
    num_computed = sum(len(prompt) + 15 for prompt in PROMPTS) + 7 + 3
    assert after.scheduled_tokens - before.scheduled_tokens == num_computed - cached
    assert after.num_free_blocks == after.num_kv_blocks


def test_a_failure_of_a_request_that_has_gone_since_harms_nobody(llm, expected):
    """Its step found it at fault, and raised afterwards all the same: all requests of the step have ended by then."""
    llm.engine.faults._failures["gone"] = ValueError()
    assert asyncio.run(tokens_of(llm.generate(PROMPTS[0], greedy()))) == expected[0]
    llm.thread.check_health()


def test_a_tokenizer_that_raises_fails_one_request(with_tokenizer, expected, monkeypatch):
    with AsyncLLM(with_tokenizer, **SMALL) as llm, in_thread(llm) as server:
        encode = llm.engine.tokenizer.encode

        def broken(text, *arguments, **options):
            if "boom" in text:
                raise RuntimeError("no such text")
            return encode(text, *arguments, **options)

        monkeypatch.setattr(llm.engine.tokenizer, "encode", broken)
        text = complete(server, "hello")
        with pytest.raises(urllib.error.HTTPError) as info:
            complete(server, "boom")
        assert info.value.code == 500
        assert json.load(info.value)["error"]["message"]
        assert complete(server, "hello") == text
        server.wait_until_idle()


# ---- recordings


def test_a_recording_on_a_full_disk_stops_alone(with_tokenizer, expected, tmp_path):
    trace = TraceFile(tmp_path / "run.jsonl")
    with AsyncLLM(with_tokenizer, trace=trace, **SMALL) as llm, in_thread(llm) as server:

        async def serve():
            return await asyncio.gather(*[tokens_of(llm.generate(prompt, greedy())) for prompt in PROMPTS])

        assert asyncio.run(serve()) == expected
        assert server.metric("recording_failures_total") == 0
        trace._file = open("/dev/full", "w")  # noqa: SIM115
        assert asyncio.run(serve()) == expected
        assert server.metric("recording_failures_total") == 1
        assert asyncio.run(serve()) == expected
        complete(server, "hello")


# ---- memory


@pytest.mark.parametrize("take", [lambda: torch.empty(1 << 55), lambda: bytearray(1 << 60)], ids=["torch", "python"])
@pytest.mark.parametrize("where", ["model", "logits", "text"])
def test_memory_that_is_refused_in_a_step_fails_its_requests(with_tokenizer, expected, monkeypatch, take, where):
    """By the allocators themselves. The next requests are served as if nothing had been."""
    with AsyncLLM(with_tokenizer, **SMALL) as llm:
        runner, num_steps = llm.engine.runner, [0]
        names = {"model": (runner.model, "forward"), "logits": (runner.model, "compute_logits")}
        owner, name = names.get(where, (llm.engine.scheduler, "update"))
        working = getattr(owner, name)

        def refused(*arguments):
            num_steps[0] += 1
            return take() if num_steps[0] in (3, 4) else working(*arguments)

        async def serve():
            streams = [tokens_of(llm.generate(prompt, greedy())) for prompt in PROMPTS]
            return await asyncio.gather(*streams, return_exceptions=True)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refused)
            found = asyncio.run(serve())
        failed = [isinstance(one, RuntimeError | MemoryError) for one in found]
        assert all(failed) if where != "logits" else any(failed)  # a row's logits may be refused to only one request
        assert [one for one, has_failed in zip(found, failed, strict=True) if not has_failed] == [
            tokens for tokens, has_failed in zip(expected, failed, strict=True) if not has_failed
        ]
        assert asyncio.run(serve()) == expected
        stats = llm.get_stats()
        assert stats.num_free_blocks == stats.num_kv_blocks


# ---- the machine


@contextlib.contextmanager
def limited(process, kind, value):
    """A limit of the system on a running process, taken back at the end."""
    soft, hard = resource.prlimit(process.pid, kind)
    resource.prlimit(process.pid, kind, (value, hard))
    try:
        yield
    finally:
        resource.prlimit(process.pid, kind, (soft, hard))


@pytest.fixture(scope="module")
def server():
    with in_process(TINY_QWEN3, "--served-model-name", "tiny-qwen3", "--num-kv-blocks", 512) as server:
        server.truth = complete(server)
        yield server


@pytest.mark.slow
def test_more_clients_at_once_than_the_usual_limit_of_open_files(request):
    """Most systems let a process open 1,024 files, unless it asks for more; here it is 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    with in_process(TINY_QWEN3, "--num-kv-blocks", 64) as server, contextlib.ExitStack() as connections:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        clients = [connections.enter_context(server.connect()) for _ in range(400)]
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert {client.recv(1000).split(b"\r\n")[0] for client in clients} == {b"HTTP/1.1 200 OK"}


@pytest.mark.slow
def test_without_file_descriptors_clients_wait_and_are_served_later(server):
    """Connections that cannot be accepted do not make it turn in circles for ever, or end."""
    folder = f"/proc/{server.process.pid}/fd"
    with limited(server.process, resource.RLIMIT_NOFILE, len(os.listdir(folder)) + 4):
        connections = [server.connect() for _ in range(40)]
        time.sleep(0.3)
        assert server.process.poll() is None
        for connection in connections:
            connection.close()
        deadline = time.monotonic() + 20
        while True:
            try:
                assert complete(server) == server.truth
                break
            except (OSError, urllib.error.URLError):
                assert time.monotonic() < deadline
                time.sleep(0.1)
    assert complete(server) == server.truth


@pytest.mark.slow  # two starts of a server
def test_a_server_that_was_killed_under_load_starts_again_on_its_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nanovllm_extras", "serve", str(TINY_QWEN3), "--port", str(port)]
    command += ["--served-model-name", "tiny-qwen3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    texts = []
    for _ in range(2):
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            try:
                assert wait_for_port(process, log, 60) == port
                url = f"http://127.0.0.1:{port}/v1/completions"
                body = {"model": "tiny-qwen3", "prompt": "What is a block table?", "max_tokens": 200, "temperature": 0}
                texts.append(post(url, body)["choices"][0]["text"])
                ended = []
                endless = json.dumps({**body, "ignore_eos": True, "max_tokens": 4000, "stream": True}).encode()

                def read(url=url, endless=endless, ended=ended):
                    request = urllib.request.Request(url, endless, {"Content-Type": "application/json"})
                    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=60) as lines:
                        for _ in lines:
                            pass
                    ended.append(True)

                threads = [threading.Thread(target=read) for _ in range(4)]
                for thread in threads:
                    thread.start()
                time.sleep(0.3)
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait(30)
            for thread in threads:
                thread.join(30)
            assert len(ended) == 4, "a client of a dead server waits"
    assert texts[0] == texts[1]
