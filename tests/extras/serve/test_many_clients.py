"""Many clients at once, and clients that behave badly: every answer is right, every block is free in the end, and
nobody waits for anybody else.

Oracles: an engine of its own, offline and greedy, for the words of each stream; the engine's count of free blocks.

Seen to fail when broken: an output that is delivered to another stream; a client that has gone whose request goes on;
a list that grows with every request (in the soak).
"""

import asyncio
import contextlib
import json
import os
import random
import time
import urllib.request
from pathlib import Path

import aiohttp
import pytest

from nanovllm_extras import SamplingParams
from nanovllm_extras.bench.client import Client
from nanovllm_extras.bench.load_generator import Exchange, offer
from nanovllm_extras.bench.results import read_result
from tests.extras.serve.real_server import QUESTIONS, in_process

PATH = "/v1/completions"


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


def test_streams_at_once_are_all_right(bundled_server, offline):
    prompts, max_tokens = [prompt_of(i) for i in range(40)], 16
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    expected = [output.outputs[0] for output in offline.llm.generate(prompts, params, use_tqdm=False)]
    results = ask_all(bundled_server, [body_of(prompt, max_tokens) for prompt in prompts])
    assert [result.error for result in results] == [None] * len(prompts)
    assert [result.text for result in results] == [one.text for one in expected]
    assert [result.output_tokens for result in results] == [len(one.token_ids) for one in expected]
    bundled_server.wait_until_idle()


# ---- a long time


@pytest.mark.slow
def test_a_soak_takes_no_memory(capsys):
    """A thousand requests, one in three abandoned. After two fifths the server grows by no more than 5 MiB."""
    num_rounds, num_requests = 5, 200
    rng = random.Random(0)

    async def one(client, server, number, slots):
        body = body_of(prompt_of(rng.randrange(1000)), rng.randint(1, 40), ignore_eos=True)
        async with slots:
            if rng.random() < 1 / 3:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                content = json.dumps(body).encode()
                head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
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
    # a cache of 10 MiB: all of its blocks, which take memory when they are first used, are used in the first rounds
    with in_process("--num-kv-blocks", 320, "--device", "cpu") as server:
        for _ in range(num_rounds):
            asyncio.run(one_round(server))
            server.wait_until_idle()
            sizes.append(server.rss_bytes() / 2**20)
    growth = sizes[-1] - sizes[1]
    with capsys.disabled():
        print(f"\nRSS in MiB after each {num_requests} requests: {', '.join(f'{size:.1f}' for size in sizes)}")
        print(f"{num_rounds * num_requests:,} requests; after the first two fifths it grew by {growth:.1f} MiB")
    assert growth < 5


# ---- many streams of each route, many of which are left


def chat_body(number):
    return {"messages": [{"role": "user", "content": f"{QUESTIONS[number % len(QUESTIONS)]} ({number})"}]}


STREAMS = {  # route -> the body of a request, without the sampling, and how a client reads the text of its events
    "/v1/completions": (lambda number: {"prompt": prompt_of(number)}, lambda event: event["choices"][0]["text"]),
    "/v1/chat/completions": (chat_body, lambda event: event["choices"][0]["delta"].get("content", "")),
    "/v1/messages": (chat_body, lambda event: event.get("delta", {}).get("text", "")),
    "/v1/responses": (
        lambda number: {"input": chat_body(number)["messages"]},
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
}
ENDS = ("data: [DONE]", "event: message_stop", "event: response.completed", "event: response.incomplete")


def is_whole(received):
    *_, last, nothing = ("\n\n" + received.decode(errors="replace")).split("\n\n")
    return nothing == "" and last.split("\n")[0] in ENDS


def text_of(path, received):
    assert is_whole(received), received[-300:]
    values = [event.rpartition("data: ")[2] for event in received.decode().split("\n\n")[:-2]]
    return "".join(STREAMS[path][1](json.loads(value)) or "" for value in values)


class Leaver:
    """When a client leaves: at a time, after a number of bytes, or never."""

    def __init__(self, chance, seconds, num_bytes):
        leaves = chance.random() < 0.4
        self.stays = not leaves
        is_timed = leaves and chance.random() < 0.3
        self.seconds = chance.uniform(0, seconds) if is_timed else None
        self.num_bytes = chance.randint(1, num_bytes) if leaves and not is_timed else float("inf")


async def read_until(session, url, body, leaver):
    """The bytes of a stream, which the client may leave."""
    received = b""

    async def read():
        nonlocal received
        async with session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            async for data in response.content.iter_any():
                received += data
                if len(received) >= leaver.num_bytes:
                    response.close()
                    return

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), leaver.seconds)
    return received


def seconds_until_idle(server):
    """The time until no request runs or waits, every block is free, and `/load` is 0."""
    start = time.perf_counter()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while True:
        with urllib.request.urlopen(server.url + "/load", timeout=30) as response:
            found = [json.load(response)["server_load"], *map(server.metric, names)]
        seconds = time.perf_counter() - start
        if not any(found):
            return seconds
        assert seconds < 60, found
        time.sleep(0.01)


def processor_s(server):
    """The processor time of the server, so far."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_300_streams_of_each_route_of_which_two_fifths_are_left(offline, capsys):
    """Twice: what takes memory in the second round takes it each time."""
    num_streams, max_tokens, chance = 300, 32, random.Random(1)
    sampling = {"model": "tiny-qwen3", "temperature": 0, "stream": True}
    outputs = offline.llm.chat(
        [chat_body(i)["messages"] for i in range(num_streams)],
        SamplingParams(temperature=0, max_tokens=max_tokens),
        use_tqdm=False,
    )
    assert [output.prompt for output in outputs] == [prompt_of(i) for i in range(num_streams)]
    expected = [output.outputs[0].text for output in outputs]

    async def ask(server, path, leavers):
        connector = aiohttp.TCPConnector(limit=0)
        limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": max_tokens}
        async with aiohttp.ClientSession(connector=connector) as session:
            bodies = [STREAMS[path][0](i) | sampling | limit for i in range(num_streams)]
            asked = [
                read_until(session, server.url + path, body, leaver)
                for body, leaver in zip(bodies, leavers, strict=True)
            ]
            return await asyncio.gather(*asked)

    told, sizes = [], []
    with in_process("--num-kv-blocks", 2048, "--device", "cpu") as server:
        for _ in range(2):
            for path in STREAMS:
                start = time.perf_counter()
                leavers = [Leaver(chance, 1.0, 1500) for _ in range(num_streams)]
                received = asyncio.run(ask(server, path, leavers))
                seconds, before = time.perf_counter() - start, processor_s(server)
                idle = seconds_until_idle(server)
                work_s = processor_s(server) - before
                stayed = [i for i in range(num_streams) if leavers[i].stays]
                assert [text_of(path, received[i]) for i in stayed] == [expected[i] for i in stayed]
                assert work_s < 1, "what clients have left is computed to its end"
                num_left = sum(not is_whole(one) for one in received)
                assert num_left > num_streams / 4
                ended = f"{len(stayed)} whole, {num_left} left, in {seconds:.1f} s"
                told.append(f"{path}: {ended}; idle after {1000 * idle:.0f} ms")
            sizes.append(server.rss_bytes() / 2**20)
    with capsys.disabled():
        print(
            "\n" + "\n".join(told) + f"\nRSS {sizes[0]:.1f} MiB after the first round, {sizes[1]:.1f} after the second"
        )
    assert sizes[1] - sizes[0] < 10
