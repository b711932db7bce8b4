"""What breaks around a server does not take it along: memory, files, disks, tokenizers, processes, other requests.

Oracles: `transformers` for the tokens of the requests beside; for the server itself, that it answers as before.
"""

import asyncio
import contextlib
import json
import os
import resource
import time
import urllib.error
import urllib.request

import pytest
import torch

from nanovllm_extras import TINY_QWEN3, SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.trace.recording import TraceFile
from tests.conftest import hf_greedy
from tests.extras.serve.real_server import in_process, in_thread

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


@pytest.mark.parametrize(
    ("take", "where"),
    [
        (lambda: torch.empty(1 << 55), "model"),
        (lambda: torch.empty(1 << 55), "logits"),
        (lambda: bytearray(1 << 60), "text"),
    ],
    ids=["torch in the model", "torch for logits", "python for text"],
)
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


@pytest.mark.slow
def test_without_file_descriptors_clients_wait_and_are_served_later():
    """Connections that cannot be accepted do not make it turn in circles for ever, or end.

    The server asks for more open files than the usual limit, so more clients than that are served at once.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        server = stack.enter_context(in_process(TINY_QWEN3, "--served-model-name", "tiny-qwen3", "--num-kv-blocks", 64))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.ExitStack() as connections:
            clients = [connections.enter_context(server.connect()) for _ in range(400)]
            for client in clients:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert {client.recv(1000).split(b"\r\n")[0] for client in clients} == {b"HTTP/1.1 200 OK"}
        truth = complete(server)

        limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        num_open = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (num_open + 4, limits[1]))
        connections = [server.connect() for _ in range(40)]
        time.sleep(0.3)
        assert server.process.poll() is None
        for connection in connections:
            connection.close()
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
        deadline = time.monotonic() + 20
        while True:
            try:
                assert complete(server) == truth
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
