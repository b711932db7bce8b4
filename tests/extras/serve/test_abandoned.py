"""A client that leaves with many requests unfinished: at most one more step is computed for it, whatever it has sent.

The engine stands still while the client leaves, so the steps that follow can be counted.
"""

import asyncio
import contextlib
import json
import threading
import time
import urllib.request

import pytest

from nanovllm_extras import PoolingParams, SamplingParams
from nanovllm_extras.serve.async_llm import AsyncLLM
from nanovllm_extras.serve.batch.replica import Replica, ReplicaSpec
from nanovllm_extras.serve.batch.rows import Row
from nanovllm_extras.serve.engine_thread import NewRequest
from nanovllm_extras.serve.server_options import ServerOptions
from tests.extras.serve.conftest import CHAT_TEMPLATE
from tests.extras.serve.real_server import in_thread

MANY = 120
PROMPTS = [[1 + i % 200, *range(1, 250), *range(1, 150)] for i in range(MANY)]
MESSAGES = [{"role": "user", "content": "x" * 200}]


@pytest.fixture(scope="module")
def llm(with_tokenizer):
    options = {"num_kv_blocks": 4096, "block_size": 4, "max_num_batched_tokens": 512, "max_num_seqs": 16}
    with AsyncLLM(with_tokenizer, dtype="float32", **options) as made:
        made.engine.tokenizer.chat_template = CHAT_TEMPLATE
        yield made


class Gate:
    """Holds each step back until the gate is open, and counts the steps that have begun."""

    def __init__(self, llm):
        self.step, self.num_steps, self.is_open = llm.engine.step, 0, threading.Event()
        self.is_open.set()

    def __call__(self):
        self.num_steps += 1
        assert self.is_open.wait(60)
        return self.step()


@pytest.fixture
def gate(llm, monkeypatch):
    made = Gate(llm)
    monkeypatch.setattr(llm.engine, "step", made)
    yield made
    made.is_open.set()
    wait_until(lambda: at_rest(llm))


def at_rest(llm):
    stats = llm.get_stats()
    return not llm._inboxes and (stats.num_running, stats.num_waiting, llm.thread.num_queued) == (0, 0, 0)


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask(url, path, body, timeout_s=60):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


ROUTES = [
    ("/v1/completions", {"prompt": PROMPTS, "max_tokens": 50}),
    ("/v1/completions", {"prompt": ["x" * 400] * MANY, "max_tokens": 50, "stream": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 120, "max_tokens": 50}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 16, "max_tokens": 200, "stream": True}),
    ("/v1/embeddings", {"input": PROMPTS}),
    ("/rerank", {"query": "x", "documents": ["x" * 200] * MANY}),
    ("/pooling", {"input": PROMPTS[:60], "task": "token_embed"}),
    ("/v1/responses", {"input": "x" * 200, "max_output_tokens": 200}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 200}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 200, "stream": True}),
]


@pytest.fixture(scope="module")
def server(llm):
    with in_thread(llm, log_requests=False) as server:
        yield server


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_client_that_closes_its_socket_costs_one_step_at_most(llm, server, gate, path, body):
    gate.is_open.clear()
    content = json.dumps({**body, "model": "tiny-qwen3"}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    with server.connect() as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + content)
        wait_until(lambda: gate.num_steps == 1)
    wait_until(lambda: server.state.num_in_progress == 0)  # the server notices that the socket is closed
    gate.is_open.set()
    answer = ask(server.url, "/v1/completions", {"model": "tiny-qwen3", "prompt": [1, 2, 3], "max_tokens": 1})
    assert answer["usage"]["completion_tokens"] == 1
    assert gate.num_steps <= 2, "that which ran when the client left, and that of the other client's token"
    wait_until(lambda: at_rest(llm))
    assert gate.num_steps <= 3


ENDLESS = SamplingParams(max_tokens=50, ignore_eos=True)


@pytest.mark.parametrize(
    ("params", "prompts", "how"),
    [
        (ENDLESS, PROMPTS, "cancel"),
        (ENDLESS, PROMPTS, "abort"),
        (PoolingParams(), PROMPTS, "cancel"),
        (SamplingParams(max_tokens=50, ignore_eos=True, n=16), PROMPTS[:20], "abort"),
    ],
)
def test_a_consumer_that_leaves_costs_one_step_at_most(llm, gate, params, prompts, how):
    gate.is_open.clear()

    async def consume(requests):
        outputs = []
        async with contextlib.aclosing(llm.generate_many(requests)) as stream:
            async for output in stream:
                outputs.append(output)
        return outputs

    async def main():
        requests = [NewRequest(f"one-{i}", prompt, params) for i, prompt in enumerate(prompts)]
        consumer = asyncio.create_task(consume(requests))
        while gate.num_steps == 0:
            await asyncio.sleep(0.005)
        if how == "abort":
            await llm.abort([request.request_id for request in requests])
        else:
            consumer.cancel()
            await asyncio.wait([consumer])
        gate.is_open.set()
        if how == "abort":
            outputs = await consumer
            assert sorted(output.request_id for output in outputs if output.finished) == sorted(
                request.request_id for request in requests
            )
        (*_, last) = [output async for output in llm.generate([1, 2, 3], SamplingParams(max_tokens=1))]
        assert len(last.outputs[0].token_ids) == 1

    asyncio.run(main())
    assert gate.num_steps <= 2
    wait_until(lambda: at_rest(llm))
    assert gate.num_steps <= 3


# ---- a task that reads outputs ends while it waits for something else

LONG = SamplingParams(max_tokens=300, ignore_eos=True)


async def steps_after(llm, gate, leave):
    """Let one step begin, call `leave`, and return how many begin after it."""
    gate.is_open.clear()
    before = gate.num_steps
    while gate.num_steps == before:
        await asyncio.sleep(0.005)
    await leave()
    await asyncio.sleep(0.01)
    before = gate.num_steps
    gate.is_open.set()
    while not at_rest(llm):
        await asyncio.sleep(0.005)
    return gate.num_steps - before


@pytest.mark.parametrize(
    ("how", "where"),
    [("cancel", "in send"), ("fail", "in a callee"), ("fail", "beside other tasks"), ("cancel", "after another task")],
)
def test_a_task_that_ends_between_two_outputs(llm, gate, how, where):
    """The task is kept, and with its traceback the generator."""

    async def main():
        sent, fails = asyncio.Event(), asyncio.Event()

        async def send():
            sent.set()
            await fails.wait()
            raise OSError("the connection is closed")

        async def consume(stream):
            async for _ in stream:
                await send()

        async def call(stream):
            await consume(stream)

        stream, others = llm.generate([1, 2, 3], LONG), []
        if where == "beside other tasks":
            others = [asyncio.create_task(tokens(llm.generate([4, 5], SamplingParams(max_tokens=3)))) for _ in range(3)]
        elif where == "after another task":
            await asyncio.create_task(read_one(stream))
        task = asyncio.create_task((call if where == "in a callee" else consume)(stream))
        await sent.wait()

        async def leave():
            task.cancel() if how == "cancel" else fails.set()
            await asyncio.wait([task])

        num_steps = await steps_after(llm, gate, leave)
        assert task.cancelled() if how == "cancel" else isinstance(task.exception(), OSError)
        await asyncio.gather(*others)
        return num_steps, stream

    num_steps, _ = asyncio.run(main())
    assert num_steps <= 1


async def read_one(stream):
    return await anext(stream)


async def tokens(stream):
    return [output async for output in stream][-1].outputs[0].token_ids


def test_each_output_may_be_read_by_a_task_of_its_own(llm):
    """A task that returns has not left."""

    async def main():
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        whole, stream, last = await tokens(llm.generate([1, 2, 3], params)), llm.generate([1, 2, 3], params), None
        with contextlib.suppress(StopAsyncIteration):
            while True:
                last = await asyncio.create_task(read_one(stream))
        return last.outputs[0], whole

    last, whole = asyncio.run(main())
    assert (last.token_ids, last.finish_reason) == (whole, "length")


def test_a_task_that_is_cancelled_after_another_has_gone_on_ends_nothing(llm):
    async def main():
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        whole, stream = await tokens(llm.generate([1, 2, 3], params)), llm.generate([1, 2, 3], params)

        has_read = asyncio.Event()

        async def read_and_wait():
            await anext(stream)
            has_read.set()
            await asyncio.sleep(60)

        first = asyncio.create_task(read_and_wait())
        await has_read.wait()
        second = asyncio.create_task(tokens(stream))
        await asyncio.sleep(0)
        first.cancel()
        return await second, whole

    assert len(set(map(tuple, asyncio.run(main())))) == 1


def test_the_message_of_a_task_that_fails_is_still_logged(llm, caplog):
    async def fail():
        async for _ in llm.generate([1, 2, 3], LONG):
            raise OSError("the connection is closed")

    async def main():
        task = asyncio.create_task(fail())
        await asyncio.wait([task])
        await asyncio.sleep(0)

    asyncio.run(main())
    assert "Task exception was never retrieved" in caplog.text


async def read_all(inbox):
    while inbox.unfinished:
        await inbox.take()


def test_shutdown_does_not_wait_for_requests_that_are_queued(with_tokenizer, monkeypatch):
    with AsyncLLM(with_tokenizer, dtype="float32", max_num_batched_tokens=512) as made:
        gate = Gate(made)
        monkeypatch.setattr(made.engine, "step", gate)

        async def main():
            gate.is_open.clear()
            requests = [NewRequest(f"{i}", prompt, SamplingParams(max_tokens=50)) for i, prompt in enumerate(PROMPTS)]
            inbox = await made.submit(requests)
            while gate.num_steps == 0:
                await asyncio.sleep(0.005)
            thread, ending = made.thread, asyncio.create_task(asyncio.to_thread(made.shutdown))
            while not thread._must_end:
                await asyncio.sleep(0.005)
            gate.is_open.set()
            await ending
            with pytest.raises(RuntimeError, match="shut down"):
                await read_all(inbox)

        asyncio.run(main())
        assert gate.num_steps == 1


def test_a_batch_that_is_cancelled(llm, gate, tmp_path):
    gate.is_open.clear()
    options = ServerOptions(model_names=("tiny-qwen3",), log_requests=False)
    rows = [Row(f"row {i}", "/v1/completions", json.dumps({"prompt": PROMPTS, "max_tokens": 50})) for i in range(3)]

    async def main():
        spec = ReplicaSpec(lambda: llm, options, tmp_path, "run", 16)
        answering = asyncio.create_task(Replica(spec).answer(rows))
        while gate.num_steps == 0:
            await asyncio.sleep(0.005)
        answering.cancel()
        await asyncio.wait([answering])
        await asyncio.sleep(0.1)
        gate.is_open.set()

    asyncio.run(main())
    wait_until(lambda: at_rest(llm))
    assert gate.num_steps <= 2
