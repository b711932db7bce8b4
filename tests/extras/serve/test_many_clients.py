"""Many clients at once, and clients that behave badly: every answer is right, every block is free in the end, and
nobody waits for anybody else.

Oracles: an engine of its own, offline and greedy, for the words of each stream; the engine's count of free blocks.

Seen to fail when broken: an output that is delivered to another stream; a client that has gone whose request goes on;
a list that grows with every request (in the soak).
"""

import asyncio
import contextlib
import json
import random

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
