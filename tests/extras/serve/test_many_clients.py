"""Many clients at once, and clients that behave badly: every answer is right, every block is free in the end, and
nobody waits for anybody else.

Oracles: an engine of its own, offline and greedy, for the words of each stream; the engine's count of free blocks.

Seen to fail when broken: an output that is delivered to another stream; a client that has gone whose request goes on;
a slow reader that stalls the others; a list that grows with every request (in the soak).
"""

import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import time

import pytest

from nanovllm_extras import TINY_QWEN3, SamplingParams
from nanovllm_extras.bench.client import Client
from nanovllm_extras.bench.load_generator import Exchange, offer
from nanovllm_extras.bench.results import read_result
from nanovllm_extras.serve.async_llm import AsyncLLM
from tests.extras.serve.real_server import QUESTIONS, Offline, in_process, in_thread

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server():
    with AsyncLLM(TINY_QWEN3, device="cpu", num_kv_blocks=4096) as llm, in_thread(llm) as server:
        yield server


def prompt_of(number):
    """Of a conversation; some prompts share their beginning, none is the same."""
    return f"<|im_start|>user\n{QUESTIONS[number % len(QUESTIONS)]} ({number})<|im_end|>\n<|im_start|>assistant\n"


def body_of(prompt, max_tokens, **others):
    body = {"model": "tiny-qwen3", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    return {**body, "stream_options": {"include_usage": True}, **others}


def ask_all(server, bodies):
    """All at once; what became of each."""

    async def run():
        async with Client(server.url, {}) as client:

            async def send(body, exchange):
                await client.post(PATH, body, exchange)

            contents = [json.dumps(body).encode() for body in bodies]
            return await offer(contents, [0.0] * len(bodies), send)

    return [read_result(exchange, 0) for exchange in asyncio.run(run())]


def check_streams(server, num_streams, max_tokens):
    offline = Offline()
    prompts = [prompt_of(i) for i in range(num_streams)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    expected = offline.llm.generate(prompts, params, use_tqdm=False)
    offline.llm.shutdown()
    results = ask_all(server, [body_of(prompt, max_tokens) for prompt in prompts])
    assert [result.error for result in results] == [None] * num_streams
    assert [result.text for result in results] == [output.outputs[0].text for output in expected]
    assert [result.output_tokens for result in results] == [len(output.outputs[0].token_ids) for output in expected]
    server.wait_until_idle()


def test_streams_at_once_are_all_right(server):
    check_streams(server, 60, 24)


@pytest.mark.slow
def test_two_hundred_streams_at_once_are_all_right(server):
    check_streams(server, 200, 128)


# ---- clients that go away


def request_bytes(body):
    content = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


LONG = body_of("The KV cache", 1500, ignore_eos=True)


def test_a_client_that_is_killed_frees_its_blocks(server):
    """kill -9 of a process that reads several streams."""
    script = (
        "import socket, sys, time\n"
        "connections = [socket.create_connection(('127.0.0.1', int(sys.argv[1]))) for _ in range(8)]\n"
        "for c in connections: c.sendall(sys.argv[2].encode())\n"
        "for c in connections:\n"
        "    while b'data: {' not in c.recv(10000): pass\n"
        "print('reading', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-S", "-c", script, str(server.port), request_bytes(LONG).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        is_reading = client.stdout.readline() == b"reading\n"
        num_running = server.metric("num_requests_running")
        client.send_signal(signal.SIGKILL)
    assert is_reading
    assert num_running == 8
    server.wait_until_idle(timeout_s=1.0)  # of 1,500 steps each, a few


@pytest.mark.parametrize("how", ["reset", "close", "half-close"])
def test_a_connection_that_ends_in_mid_stream_frees_its_blocks(server, how):
    with server.connect() as connection:
        connection.sendall(request_bytes(LONG))
        while b"data: {" not in connection.recv(10_000):
            pass
        assert server.metric("num_requests_running") == 1
        if how == "reset":  # no orderly end: the next packet is answered with an error
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if how == "half-close":
            connection.shutdown(socket.SHUT_WR)
            server.wait_until_idle(timeout_s=1.0)
    server.wait_until_idle(timeout_s=1.0)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHos", request_bytes(LONG)[:-9]])
def test_half_a_request_holds_nothing(server, sent):
    """A connection on which no more comes: others are served, and no block is owned."""
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(server.connect()).sendall(sent)
        check_alive(server)
        server.wait_until_idle()


def check_alive(server):
    (result,) = ask_all(server, [body_of("A block table", 4, ignore_eos=True)])
    assert (result.error, result.output_tokens) == (None, 4)


@pytest.mark.slow
def test_slow_readers_stall_nobody(server):
    """Streams that nobody reads: their connections fill up, their requests end, and others are answered meanwhile."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(server.connect(receive_buffer=2048)) for _ in range(4)]
        for connection in slow:
            connection.sendall(request_bytes({**LONG, "max_tokens": 600, "logprobs": 5}))
        start = time.perf_counter()
        results = ask_all(server, [body_of(prompt_of(i), 8, ignore_eos=True) for i in range(8)])
        assert [result.error for result in results] == [None] * 8
        assert time.perf_counter() - start < 30
        server.wait_until_idle(timeout_s=60)  # the engine has ended them, even if no client reads
        text = b""
        slow[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # now at full speed
        while b"[DONE]" not in text:
            text += slow[0].recv(1 << 20)
        usage = json.loads(text.split(b"data: ")[-2].split(b"\n")[0])["usage"]
        assert usage["completion_tokens"] == 600, "a slow reader gets all of its answer in the end"


def test_hundreds_of_abandoned_streams_leave_no_trace(server):
    abandon(server, 200, 40)


def abandon(server, num_streams, num_at_a_time):
    async def abandon_one(number, slots):
        async with slots:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request_bytes(body_of(prompt_of(number), 1000, ignore_eos=True)))
            await reader.read(random.Random(number).choice([1, 300, 3000]))
            writer.transport.abort()

    async def run():
        slots = asyncio.Semaphore(num_at_a_time)
        await asyncio.gather(*(abandon_one(i, slots) for i in range(num_streams)))

    asyncio.run(run())
    server.wait_until_idle()


# ---- a long time


@pytest.mark.slow
def test_a_soak_takes_no_memory(capsys):
    """Two thousand requests, one in three abandoned. After a first fifth the server grows by no more than 8 MiB."""
    num_rounds, num_requests = 10, 200
    rng = random.Random(0)

    async def one(client, server, number, slots):
        body = body_of(prompt_of(rng.randrange(1000)), rng.randint(1, 40), ignore_eos=True)
        async with slots:
            if rng.random() < 1 / 3:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(request_bytes(body))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(reader.read(300), rng.random() / 10)
                writer.transport.abort()
                return
            exchange = Exchange(0.0)
            await client.post(PATH, json.dumps(body).encode(), exchange)
            result = read_result(exchange, 0)
            assert (result.error, result.output_tokens) == (None, body["max_tokens"])

    async def one_round(server):
        slots = asyncio.Semaphore(32)
        async with Client(server.url, {}) as client:
            await asyncio.gather(*(one(client, server, i, slots) for i in range(num_requests)))

    sizes = []
    # a cache of 10 MiB: all of its blocks, which take memory when they are first used, are used in the first fifth
    with in_process("--num-kv-blocks", 320, "--device", "cpu") as server:
        for _ in range(num_rounds):
            asyncio.run(one_round(server))
            server.wait_until_idle()
            sizes.append(server.rss_bytes() / 2**20)
    growth = sizes[-1] - sizes[num_rounds // 5 - 1]
    with capsys.disabled():
        print(f"\nRSS in MiB after each {num_requests} requests: {', '.join(f'{size:.1f}' for size in sizes)}")
        print(f"{num_rounds * num_requests:,} requests; after the first fifth it grew by {growth:.1f} MiB")
    assert growth < 8
